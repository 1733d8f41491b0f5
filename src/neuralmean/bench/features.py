"""Channel statistics, logits and features of image sets, computed once and cached on disk.

The key of an entry covers everything that its numbers depend on: weights, preprocessing, images and layers. An entry is
written in parts, each with a digest. A killed run therefore resumes where it stopped, only the damaged parts of a file
are computed again, and incomplete parts are never read. Concurrent runs divide the parts among them by file locks,
which the system releases when a process dies.
"""

from __future__ import annotations

import errno
import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuralmean.bench.data.imageset import SIZE, ImageSet
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.models.evaluate import BATCH
from neuralmean.data.batch import Batch
from neuralmean.data.progress import track
from neuralmean.errors import ArtefactError, NeuralMeanWarning
from neuralmean.files.atomic import locked, write_atomically
from neuralmean.models.fingerprint import fingerprint
from neuralmean.models.layers import Layer, select_layers
from neuralmean.recording.observer import FIND_HEAD, ChannelStats, Observer

FORMAT = 1
PART = 500  # images in one part of an entry
ARRAYS = ("means", "variances", "logits", "feature")
_INDEX = "entry.json"


@dataclass(frozen=True)
class Features:
    """Recorded statistics of one image set; rows are images, in the order of the set.

    Attributes:
        layers: The watched layers, in the order of the columns.
        means: Channel means, shape (N, D), float32.
        variances: Channel variances, shape (N, D); None unless they were requested.
        logits: Shape (N, K); None if the model has no class head.
        feature: Input of the class head, shape (N, F).
        seconds: Duration of the forward passes, which may have run earlier.
    """

    layers: tuple[Layer, ...]
    means: Tensor
    variances: Tensor | None
    logits: Tensor | None
    feature: Tensor | None
    seconds: float

    def __len__(self) -> int:
        return len(self.means)


def compute(trained: TrainedModel, images: ImageSet, *, variance: bool = False) -> Features:
    """Run the model over `images` now, without the cache."""
    layers = select_layers(trained.model)
    observer = Observer(trained.model, layers, variance=variance, head=FIND_HEAD)
    begun = time.perf_counter()
    rows = _observe(observer, trained, images, 0, len(images))
    return Features(layers, rows.means, rows.variances, rows.logits, rows.feature, seconds=time.perf_counter() - begun)


class Store:
    """A folder of features, each computed on first use.

    Args:
        root: The folder, created when needed. Its content may be deleted between runs.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self._open: dict[str, Features] = {}  # entries whose digests were checked by this process

    def read(
        self,
        trained: TrainedModel,
        images: ImageSet,
        *,
        layers: str | Sequence[str] | None = None,
        variance: bool = False,
    ) -> Features:
        """Return the features of `images`, from the cache if they are there; otherwise compute and cache them.

        Args:
            trained: The model; its weights and its preprocessing are part of the key.
            images: The set; its digest is part of the key.
            layers: Dotted names or globs; None takes what `Detector` would.
            variance: Whether variances are needed. An entry with variances also serves requests without.
        """
        chosen = select_layers(trained.model, layers)
        keys = {flag: _key(trained, images, chosen, flag) for flag in (False, True)}
        if not variance and not self._has(keys[False]) and self._has(keys[True]):
            variance = True
        name = _name(keys[variance])
        if name not in self._open:
            self._open[name] = self._read(
                _Entry(self.root / name, keys[variance], len(images)), trained, images, chosen
            )
        return self._open[name]

    def has(self, trained: TrainedModel, images: ImageSet, *, variance: bool = False) -> bool:
        """Whether an entry for `images` is on disk, complete or not."""
        return self._has(_key(trained, images, select_layers(trained.model), variance))

    def _has(self, key: dict[str, Any]) -> bool:
        return (self.root / _name(key) / _INDEX).is_file()

    def _read(self, entry: _Entry, trained: TrainedModel, images: ImageSet, layers: tuple[Layer, ...]) -> Features:
        entry.make_folder()
        with entry.turn():
            entry.load()
        missing = entry.missing()
        if missing:
            observer = Observer(trained.model, layers, variance=entry.key["variance"], head=FIND_HEAD)
            what = f"{trained.name} on {images.name} ({images.split})"

            def images_of(part: int) -> int:
                start, stop = entry.span(part)
                return stop - start

            total = sum(map(images_of, missing))
            for part in track(entry.claims(), description=what, total=total, size=images_of):
                begun = time.perf_counter()
                rows = _observe(observer, trained, images, *entry.span(part))
                with entry.turn():
                    entry.write(part, rows, time.perf_counter() - begun)
        return entry.open(layers)


class _Entry:
    """One folder of arrays and an index with the digest of every finished part."""

    def __init__(self, folder: Path, key: dict[str, Any], rows: int) -> None:
        self.folder, self.key, self.rows = folder, key, rows
        self.widths: dict[str, int] = {}  # columns of each array, known after the first part
        self.parts: list[dict[str, Any] | None] = [None] * -(-rows // PART)

    def make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def span(self, part: int) -> tuple[int, int]:
        return part * PART, min(self.rows, (part + 1) * PART)

    def turn(self) -> AbstractContextManager[bool]:
        """Keep other processes from changing the entry inside the block."""
        return locked(self.folder / "lock")

    def claims(self) -> Iterator[int]:
        """Yield the missing parts that this process should compute; several processes share the work on an entry."""
        while missing := self.missing():
            for part in missing:
                with locked(self._claim(part), wait=False) as mine:
                    if mine and self._still_missing(part):
                        yield part
                        break
            else:  # other processes compute all of them: wait for one, then check again
                with locked(self._claim(missing[0])):
                    self._still_missing(missing[0])

    def _claim(self, part: int) -> Path:
        return self.folder / f"lock-{part}"

    def _still_missing(self, part: int) -> bool:
        with self.turn():
            self._catch_up()
        return self.parts[part] is None

    def _catch_up(self) -> None:
        """Reload the index, which other processes may have changed."""
        held = _read_json(self.folder / _INDEX)
        if held is not None and held.get("key") == self.key and len(held["parts"]) == len(self.parts):
            self.widths = held["widths"]
            self.parts = [own or other for own, other in zip(self.parts, held["parts"], strict=True)]

    def missing(self) -> list[int]:
        return [index for index, part in enumerate(self.parts) if part is None]

    def load(self) -> None:
        """Load the list of finished parts whose digests match, and warn about the others."""
        index = self.folder / _INDEX
        if not index.exists():
            return
        held = _read_json(index)
        wanted = {"key": self.key, "rows": self.rows, "part": PART}
        if held is None or any(held.get(name) != value for name, value in wanted.items()):
            self._complain("its index cannot be read")
            index.unlink()
            return
        self.widths, claimed = held["widths"], held["parts"]
        try:
            arrays = self._maps()
        except (OSError, ValueError, EOFError) as error:
            self.widths = {}
            self._complain(f"{type(error).__name__}: {error}")
            index.unlink()
            return
        for number, part in enumerate(claimed):
            if part is not None and self._digest(arrays, number) == part["digest"]:
                self.parts[number] = part
        lost = sum(part is not None for part in claimed) - sum(part is not None for part in self.parts)
        if lost:
            self._complain(f"{lost} of {len(claimed)} parts have another digest")
            self._write_index()

    def write(self, part: int, rows: ChannelStats, seconds: float) -> None:
        """Write the rows of one part, then mark the part as finished in the index."""
        tensors = dict(zip(ARRAYS, (rows.means, rows.variances, rows.logits, rows.feature), strict=True))
        arrays = {
            name: np.ascontiguousarray(value.float().numpy()) for name, value in tensors.items() if value is not None
        }
        try:
            self._catch_up()
            if not self.widths:
                self._create({name: array.shape[1] for name, array in arrays.items()})
            start, _ = self.span(part)
            for name, array in arrays.items():
                # Written through the file and not through a memory map: a full disk is then an error, not a crash.
                with self._path(name).open("r+b") as handle:
                    handle.seek(_header_size(self._path(name)) + start * array.strides[0])
                    handle.write(array.tobytes())
            self.parts[part] = {"digest": _digest(arrays.values()), "seconds": seconds}
            self._write_index()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def open(self, layers: tuple[Layer, ...]) -> Features:
        """Map the arrays into memory; all parts must be finished."""
        # Copy on write: torch requires writable memory, and nothing written reaches the file.
        maps = {name: torch.from_numpy(np.load(self._path(name), mmap_mode="c")) for name in self.widths}
        seconds = sum(part["seconds"] for part in self.parts if part is not None)
        return Features(
            layers,
            maps["means"],
            maps.get("variances"),
            maps.get("logits"),
            maps.get("feature"),
            seconds=seconds,
        )

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"

    def _create(self, widths: dict[str, int]) -> None:
        for name, width in widths.items():
            with self._path(name).open("wb") as handle:
                shape = (self.rows, width)
                header = {"descr": "<f4", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(handle, header)
                handle.truncate(handle.tell() + 4 * self.rows * width)
        self.widths = widths

    def _maps(self) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
        maps = {name: np.load(self._path(name), mmap_mode="r") for name in self.widths}
        for name, array in maps.items():
            if array.shape != (self.rows, self.widths[name]) or array.dtype != np.float32:
                raise ValueError(f"{name}.npy holds {array.dtype} {array.shape}")
        return maps

    def _digest(self, arrays: dict[str, np.ndarray[Any, np.dtype[np.float32]]], part: int) -> str:
        start, stop = self.span(part)
        return _digest(array[start:stop] for array in arrays.values())

    def _write_index(self) -> None:
        index = {"key": self.key, "rows": self.rows, "part": PART, "widths": self.widths, "parts": self.parts}
        with write_atomically(self.folder / _INDEX, "w") as handle:
            json.dump(index, handle)

    def _complain(self, why: str) -> None:
        warnings.warn(
            f"The features cached in {str(self.folder)!r} are damaged ({why}). The damaged parts are computed again.",
            NeuralMeanWarning,
            stacklevel=5,
        )


def _observe(observer: Observer, trained: TrainedModel, images: ImageSet, start: int, stop: int) -> ChannelStats:
    pieces = []
    with torch.no_grad():
        for first in range(start, stop, BATCH):
            pixels = trained.preprocess(images.images[first : min(stop, first + BATCH)])
            pieces.append(observer.observe(Batch((pixels,)), name=images.name)[1])
    return ChannelStats.cat(pieces)


def _key(trained: TrainedModel, images: ImageSet, layers: Sequence[Layer], variance: bool) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "architecture": trained.name,
        "weights": fingerprint(trained.model),
        "mean": list(trained.mean),
        "std": list(trained.std),
        **_resizing(trained),
        "images": images.digest,
        "layers": [[layer.name, layer.kind, layer.channels] for layer in layers],
        "variance": variance,
    }


def _resizing(trained: TrainedModel) -> dict[str, Any]:
    """Return the part of the key for models that resize their images; empty for the paper's models, which do not."""
    if trained.size == SIZE:
        return {}
    return {"size": trained.size, "interpolation": trained.interpolation, "crop_fraction": trained.crop_fraction}


def _name(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]


def _digest(arrays: Iterator[Any] | Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _header_size(path: Path) -> int:
    with path.open("rb") as handle:
        np.lib.format.read_magic(handle)
        np.lib.format.read_array_header_1_0(handle)
        return handle.tell()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        held = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return held if isinstance(held, dict) and {"widths", "parts"} <= set(held) else None


def _cannot_write(folder: Path, error: OSError) -> ArtefactError:
    why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return ArtefactError(
        f"Expected to cache features in {str(folder)!r}, but {why}. Choose another cache folder; finished parts stay."
    )
