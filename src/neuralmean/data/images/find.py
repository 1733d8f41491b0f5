"""Finds input files in folders, by name or glob, and rows of arrays, in a fixed order and constant memory.

Names are yielded as they are found. A folder's files and subfolders are sorted by name; a folder with more than `RUN`
names is sorted on disk, so that a million files need no more memory than ten thousand. Nothing is opened here except
the headers of array files, to count their rows.
"""

from __future__ import annotations

import glob
import heapq
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal

from neuralmean.data.images.arrays import ARRAY_EXTENSIONS, ArrayFile
from neuralmean.data.images.decode import EXTENSIONS
from neuralmean.errors import InputError

__all__ = ["Source", "count_inputs", "find_inputs"]

RUN = 50_000


@dataclass(frozen=True)
class Source:
    """One file or folder that was found.

    Attributes:
        path: The file, starting with the path given by the caller.
        kind: `"image"` or `"array"` for files to try, `"skipped"` for other files, `"unreadable"` for folders that
            cannot be read.
        reason: Why it is skipped or unreadable.
    """

    path: str
    kind: Literal["image", "array", "skipped", "unreadable"]
    reason: str = ""


def find_inputs(paths: str | Path | Sequence[str | Path]) -> Iterator[Source]:
    """Yield everything that `paths` name, in order.

    A folder is walked with its subfolders; files in it are tried if they have the extension of an image, while others,
    hidden files and arrays are `skipped`. A file named directly is always tried. A name with `*`, `?` or `[` that does
    not exist literally is a glob (`**` matches subfolders), whose matches count as named directly. A path that does not
    exist raises before anything is read.

    Args:
        paths: One or more folders, files or globs.
    """
    names = _check(paths)
    return (source for name in names for source in _expand(name, in_order=True))


def count_inputs(paths: str | Path | Sequence[str | Path]) -> int:
    """Count the images, including rows of arrays, for progress bars."""
    total = 0
    for name in _check(paths):
        for source in _expand(name, in_order=False):
            if source.kind == "image":
                total += 1
            elif source.kind == "array":
                total += _count_rows(source.path)
    return total


def _count_rows(path: str) -> int:
    try:
        with ArrayFile(path) as file:
            return len(file)
    except InputError:
        return 1  # will be listed as unreadable


def _check(paths: str | Path | Sequence[str | Path]) -> list[str]:
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, (str, Path)) else paths)]
    if not names:
        raise InputError("Expected at least one folder, file or glob, but got none.")
    for name in names:
        if os.path.lexists(name):
            continue
        if not glob.has_magic(name):
            raise InputError(
                f"Expected {name!r} to be a folder, a file or a glob, but there is no such file or folder."
            )
        if next(_glob(name), None) is None:
            raise InputError(f"Expected {name!r} to match at least one file, but it matches none.")
    return names


def _expand(name: str, *, in_order: bool) -> Iterator[Source]:
    if os.path.lexists(name):
        yield from _named(name, in_order=in_order)
        return
    matches = _glob(name)
    # `**` matches a folder and also everything inside it.
    files_only = "**" in name
    for match in in_sorted_order(matches) if in_order else matches:
        if not (files_only and Path(match).is_dir()):
            yield from _named(match, in_order=in_order)


def _glob(pattern: str) -> Iterator[str]:
    # `Path.glob` rejects absolute patterns and normalises names, which should stay as given.
    return glob.iglob(pattern, recursive=True)  # noqa: PTH207


def _named(name: str, *, in_order: bool) -> Iterator[Source]:
    if Path(name).is_dir():
        yield from _walk(name, in_order=in_order)
    else:
        yield Source(name, "array" if _extension(name) in ARRAY_EXTENSIONS else "image")


def _walk(top: str, *, in_order: bool) -> Iterator[Source]:
    """Yield everything below a folder; links to parent folders are not followed."""
    open_folders = [_open(top, in_order)]
    while open_folders:
        folder, _, entries = open_folders[-1]
        try:
            entry = next(entries, None)
        except OSError as error:
            yield Source(folder, "unreadable", f"the system reported: {error.strerror or error}")
            entry = None
        if entry is None:
            open_folders.pop()
            continue
        path = os.path.join(folder, entry[:-1])  # noqa: PTH118 - a hot loop over strings
        if entry.startswith("."):
            yield Source(path, "skipped", "it is hidden")
        elif not entry.endswith("/"):
            yield _by_extension(path)
        elif (opened := _open(path, in_order))[1] in [place for _, place, _ in open_folders]:
            yield Source(path, "skipped", "it links to a parent folder")
        else:
            open_folders.append(opened)


def _open(folder: str, in_order: bool) -> tuple[str, tuple[int, int], Iterator[str]]:
    """Return a folder, its device and inode, and a lazy iterator over the names in it."""
    entries = _entries(folder)
    try:
        status = os.stat(folder)  # noqa: PTH116
        place = (status.st_dev, status.st_ino)
    except OSError:
        place = (-1, -1)  # listing the names will raise
    return folder, place, in_sorted_order(entries) if in_order else entries


def _by_extension(path: str) -> Source:
    if _extension(path) in EXTENSIONS:
        return Source(path, "image")
    return Source(path, "skipped", "it does not have the extension of an image")


def _entries(folder: str) -> Iterator[str]:
    """Yield the names in a folder, each followed by `/` for a folder or NUL for anything else."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                is_folder = entry.is_dir()
            except OSError:  # a link to itself, or a target without permission
                is_folder = False
            yield entry.name + ("/" if is_folder else "\0")


def _extension(name: str) -> str:
    return os.path.splitext(name)[1].lower()  # noqa: PTH122 - a hot loop over strings


def in_sorted_order(names: Iterable[str], *, run: int | None = None) -> Iterator[str]:
    """Sort the names; more than `run` of them are sorted in runs on disk and merged.

    Example:
        >>> list(in_sorted_order(["b", "c", "a"], run=2))
        ['a', 'b', 'c']
    """
    run = run or RUN
    names = iter(names)
    first = sorted(islice(names, run))
    with ExitStack() as stack:
        runs: list[Iterator[str]] = []
        stretch = first
        while len(stretch) == run and (following := sorted(islice(names, run))):
            runs.append(_spill(stretch, stack))
            stretch = following
        yield from heapq.merge(*runs, stretch)


def _spill(names: list[str], stack: ExitStack) -> Iterator[str]:
    file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    # A file name may contain anything but a slash and NUL, including line ends and bytes that are not text.
    file.writelines(os.fsencode(name).replace(b"\\", b"\\\\").replace(b"\n", b"\\n") + b"\n" for name in names)
    file.seek(0)
    names.clear()
    return _unspill(file)


def _unspill(file: BinaryIO) -> Iterator[str]:
    for line in file:
        parts = line[:-1].split(b"\\\\")
        yield os.fsdecode(b"\\".join(part.replace(b"\\n", b"\n") for part in parts))
