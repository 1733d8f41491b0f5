"""Finds the paper's sets in a data folder, in any known layout, and loads them.

The files of a set may be in the data folder itself, in a folder with one of its names, or in such a folder nested in
another (`isun/iSUN/iSUN_patches`). Nothing is written or downloaded here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuralmean.bench.data.imageset import Fit, ImageSet
from neuralmean.bench.data.readers import FOLDER, NAMED_PICTURES, NPY, NPZ, Format, list_pictures
from neuralmean.bench.data.registry import DataSet, Layout, Split, check_split, dataset, names
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import ArtefactError, InputError, MissingExtraError


@dataclass(frozen=True)
class Located:
    """Location and format of one split of a set."""

    dataset: DataSet
    split: Split
    format: Format
    paths: tuple[Path, ...]
    md5: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file or folder; for several files, their folder."""
        return self.paths[0] if len(self.paths) == 1 else self.paths[0].parent


@dataclass(frozen=True)
class Entry:
    """One line of an inventory: a split of a set, found or missing."""

    name: str
    title: str
    split: str
    path: Path | None  # None: missing
    layout: str | None
    count: int | None  # None: missing or unreadable
    expected: int  # the official number of images
    check: str  # "official files", "complete", "10,000 of 73,257 images", or what is wrong
    ok: bool  # whether it can be loaded
    hint: str  # how to get it, if missing or damaged


def load(name: str, split: str, root: Path | str, *, rules: Preprocessing | None = None) -> ImageSet:
    """Load one split of a set from `root`.

    Args:
        name: A set of the paper, by its name in `names()` or another common name.
        split: `"train"` or `"test"`; sets without splits are `"test"`.
        root: The data folder.
        rules: Preprocessing of pictures in folders; None makes them 32 x 32, unless the set keeps its size.
    """
    found = dataset(name)
    part = check_split(found, split)
    located = locate(name, part, root)
    if located is None:
        raise InputError(
            f"Expected the {part} split of {found.name!r} in {str(root)!r}, but it is missing. {_how(found, part)}"
        )
    images, labels = located.format.read(located.paths, rules or found.fit)
    return ImageSet.of(images, labels, name=found.name, split=part)


def read(
    path: Path | str,
    *,
    name: str | None = None,
    split: str = "test",
    fit: Fit = "resize",
    rules: Preprocessing | None = None,
) -> ImageSet:
    """Read images of your own: an `.npz` or `.npy` file, or a folder of pictures.

    Args:
        path: The file or folder.
        name: Name of the set; None takes the file's stem.
        split: The split.
        fit: How to make pictures 32 x 32.
        rules: Preprocessing to use instead of `fit`.
    """
    path = Path(path)
    formats = {".npz": NPZ, ".npy": NPY}
    if path.is_dir():
        kind = FOLDER
    elif path.is_file() and path.suffix in formats:
        kind = formats[path.suffix]
    else:
        what = f"the file {str(path)!r}" if path.exists() else f"{str(path)!r}, which is not there"
        raise InputError(f"Expected an .npz file, an .npy file or a folder of pictures, but got {what}.")
    images, labels = kind.read([path], rules or fit)
    return ImageSet.of(images, labels, name=name or path.stem, split=split)


def locate(name: str, split: str, root: Path | str) -> Located | None:
    """Return the location of one split of a set below `root`, or None."""
    found = dataset(name)
    part = check_split(found, split)
    root = Path(root)
    if not root.is_dir():
        raise InputError(
            f"Expected the data folder {str(root)!r} to be there, but it is not. Make it, or name another."
        )
    folders = list(_folders(root, found))
    for layout in found.layouts_of(part):
        for folder, named in folders:
            paths = tuple(folder / file for file in layout.files)
            if (named or not layout.named) and _present(layout, paths):
                return Located(found, part, layout.format, paths, layout.md5)
    return None


def find(root: Path | str, *, only: Sequence[str] | None = None) -> list[Entry]:
    """List every split of every set: whether it was found, whether it is complete, and how to get it.

    Args:
        root: The data folder.
        only: Sets to look for; None for all.
    """
    wanted = map(dataset, names() if only is None else only)
    return [_entry(found, split, root) for found in wanted for split in found.counts]


def _entry(found: DataSet, split: Split, root: Path | str) -> Entry:
    expected, how = found.counts[split], _how(found, split)
    located = locate(found.name, split, root)
    if located is None:
        return Entry(found.name, found.title, split, None, None, None, expected, "missing", ok=False, hint=how)
    count, hint, ok = None, "", True
    try:
        count = located.format.count(located.paths)
        check = _check(located, count, expected)
    except (ArtefactError, MissingExtraError) as error:
        check, hint, ok = str(error), how if isinstance(error, ArtefactError) else "", False
    label = located.format.label
    return Entry(found.name, found.title, split, located.path, label, count, expected, check, ok=ok, hint=hint)


def _check(located: Located, count: int, expected: int) -> str:
    if located.md5:
        return "official files" if _sums(located.paths) == located.md5 else "not the official files"
    if count == expected:
        return "complete"
    return f"{count:,} of {expected:,} images" if count < expected else f"{count:,} images, officially {expected:,}"


def _sums(paths: Sequence[Path]) -> tuple[str, ...]:
    return tuple(md5_of(path) for path in paths)


def md5_of(path: Path) -> str:
    """MD5 sum of a file."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _folders(root: Path, found: DataSet) -> Iterator[tuple[Path, bool]]:
    """Folders that may contain the set, and whether they have one of its names."""
    known = {found.name, *found.folders}
    yield root, root.name in known
    for folder in _subfolders(root, known):
        yield folder, True
        for inner in _subfolders(folder, known):
            yield inner, True


def _subfolders(folder: Path, known: set[str]) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.name in known and entry.is_dir())


def _present(layout: Layout, paths: Sequence[Path]) -> bool:
    if layout.format in (FOLDER, NAMED_PICTURES):
        # Pictures next to a set.json are sheets of many images each.
        return paths[0].is_dir() and not (paths[0] / "set.json").exists() and bool(list_pictures(paths[0]))
    return all(path.is_file() for path in paths)


def _how(found: DataSet, split: Split) -> str:
    """Return how to get a missing set."""
    stem = f"{found.name}-{split}.npz"
    if not found.sources:
        return f"Get it from {found.page}, or put {stem} there: {found.name!r} has no public file to download."
    return f"Get it with `nmd bench data --download {found.name}`, from {found.page}, or put {stem} there."
