"""Batches of images from paths, decoded ahead while the model works on the current batch.

`ImageBatches` combines the finder, the decoders and the preprocessing. The order is that of the paths and does not
depend on the number of workers; memory does not grow with the number of files. Unreadable files are recorded and
skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuralmean.data.images.arrays import ArrayFile, row_name
from neuralmean.data.images.decode import MAX_PIXELS, Unreadable
from neuralmean.data.images.find import count_inputs, find_inputs
from neuralmean.data.images.pool import decode_in_order, default_workers
from neuralmean.data.images.worker import Answer, Task
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ImageBatch", "ImageBatches"]

KEPT_NOTES = 1000
MAX_WORKERS = 1024
_FILES_PER_TASK = 64
_FILES_PER_TASK_ANY_SIZE = 8  # bounds the memory of a task for images that keep their size


class ImageBatch(NamedTuple):
    """The model's input for some images, and their names."""

    images: Tensor  # (N, C, H, W)
    names: list[str]


class ImageBatches:
    """All images that `paths` name, as batches that a model or a `Detector` takes; can be iterated more than once.

    Every batch but the last has `batch_size` images; if `preprocessing.size` is None, images of different sizes are in
    different batches. During and after a pass, `n_images` is the number of images so far, `unreadable` and `skipped`
    list the first 1,000 files without one (`n_unreadable` and `n_skipped` count all), and `n_left_out` is the number of
    images that `skip` excluded.

    Args:
        paths: Folders, files, globs, `.npz` and `.npy` files; see `find_inputs`.
        preprocessing: What to do to the images.
        batch_size: Images per batch.
        workers: Number of decoding processes; None takes one less than the number of cores, 0 decodes in this process.
        max_pixels: Reject images with more pixels than this, before they are unpacked.
        on_unreadable: Called with each `Unreadable` as it is found.
        skip: Called with the name of each image; images for which it returns True are not read.

    Example:
        >>> import tempfile
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> Image.new("RGB", (40, 30)).save(folder / "a.png")
        >>> _ = (folder / "b.png").write_bytes(b"no image")
        >>> batches = ImageBatches(folder, Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3))
        >>> [images.shape for images, names in batches], batches.n_unreadable
        ([torch.Size([1, 3, 32, 32])], 1)
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        preprocessing: Preprocessing,
        *,
        batch_size: int = 64,
        workers: int | None = None,
        max_pixels: int = MAX_PIXELS,
        on_unreadable: Callable[[Unreadable], None] | None = None,
        skip: Callable[[str], bool] | None = None,
    ) -> None:
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("workers", workers or 0, 0),
            ("max_pixels", max_pixels, 1),
        ):
            if value < least:
                raise InputError(f"Expected `{name}` to be at least {least}, but got {value!r}.")
        if workers is not None and workers > MAX_WORKERS:
            raise InputError(f"Expected `workers` to be at most {MAX_WORKERS} processes, but got {workers!r}.")
        self._paths = paths
        self._preprocessing = preprocessing
        self.batch_size = batch_size
        self._workers = default_workers() if workers is None else workers
        self._max_pixels = max_pixels
        self._on_unreadable = on_unreadable
        self._skip = skip
        find_inputs(paths)  # a missing path raises now rather than at the first batch
        self._reset()

    def __iter__(self) -> Iterator[ImageBatch]:
        self._reset()
        waiting: list[NDArray[np.uint8]] = []
        names: list[str] = []
        for task, answer in self._answers():
            good = iter([name for place, name in enumerate(task.names) if place not in answer.failures])
            for place, reason in answer.failures.items():
                self._note_unreadable(Unreadable(task.names[place], reason))
            for run in answer.pixels:
                if waiting and waiting[-1].shape[1:] != run.shape[1:]:
                    yield self._batch(waiting, names)
                    waiting, names = [], []
                waiting.append(run)
                names.extend(islice(good, len(run)))
                while len(names) >= self.batch_size:
                    full, rest = _cut(waiting, self.batch_size)
                    yield self._batch(full, names[: self.batch_size])
                    waiting, names = rest, names[self.batch_size :]
        if names:
            yield self._batch(waiting, names)

    def count(self) -> int:
        """Count the images without opening any; walks the folders once more."""
        return count_inputs(self._paths)

    def _reset(self) -> None:
        self.n_images = self.n_unreadable = self.n_skipped = self.n_left_out = 0
        self.unreadable: list[Unreadable] = []
        self.skipped: list[str] = []

    def _batch(self, runs: list[NDArray[np.uint8]], names: list[str]) -> ImageBatch:
        self.n_images += len(names)
        return ImageBatch(self._preprocessing.normalise(runs[0] if len(runs) == 1 else np.concatenate(runs)), names)

    def _answers(self) -> Iterator[tuple[Task, Answer]]:
        tasks = self._tasks()
        beginning = list(islice(tasks, 2))
        # Starting a process takes longer than decoding a handful of images.
        workers = self._workers if len(beginning) > 1 else 0
        return decode_in_order(
            chain(beginning, tasks), self._preprocessing, workers=workers, max_pixels=self._max_pixels
        )

    def _tasks(self) -> Iterator[tuple[Task, bool]]:
        """Yield each task, and whether it is worth a worker, which array rows of unchanged size are not."""
        limit = _FILES_PER_TASK if self._preprocessing.size is not None else _FILES_PER_TASK_ANY_SIZE
        files: list[str] = []
        for source in find_inputs(self._paths):
            if source.kind == "image":
                if self._is_wanted(source.path):
                    files.append(source.path)
            elif source.kind == "skipped":
                self._note_skipped(source.path)
            elif source.kind == "unreadable":
                self._note_unreadable(Unreadable(source.path, source.reason))
            if files and (len(files) >= limit or source.kind == "array"):
                yield Task(tuple(files)), True
                files = []
            if source.kind == "array":
                yield from self._array_tasks(source.path)
        if files:
            yield Task(tuple(files)), True

    def _array_tasks(self, path: str) -> Iterator[tuple[Task, bool]]:
        try:
            with ArrayFile(path) as file:
                n, height, width, channels = file.shape
        except InputError as error:
            self._note_unreadable(Unreadable(path, str(error)))
            return
        as_it_is = self._preprocessing.keeps((height, width, channels))
        limit = max(1, min(_FILES_PER_TASK, 50_000_000 // (height * width * channels)))
        for begin in range(0, n, limit):
            names = [row_name(path, row) for row in range(begin, min(begin + limit, n))]
            # Called once per name, in order, so that `skip` may count.
            kept = [place for place, name in enumerate(names) if self._is_wanted(name)]
            if len(kept) == len(names):
                yield Task(tuple(names), path, begin), not as_it_is
                continue
            for place in kept:
                yield Task((names[place],), path, begin + place), not as_it_is

    def _is_wanted(self, name: str) -> bool:
        if self._skip is None or not self._skip(name):
            return True
        self.n_left_out += 1
        return False

    def _note_unreadable(self, note: Unreadable) -> None:
        self.n_unreadable += 1
        if len(self.unreadable) < KEPT_NOTES:
            self.unreadable.append(note)
        if self._on_unreadable is not None:
            self._on_unreadable(note)

    def _note_skipped(self, path: str) -> None:
        self.n_skipped += 1
        if len(self.skipped) < KEPT_NOTES:
            self.skipped.append(path)


def _cut(runs: list[NDArray[np.uint8]], n: int) -> tuple[list[NDArray[np.uint8]], list[NDArray[np.uint8]]]:
    """Split runs into the first `n` images and the rest."""
    full: list[NDArray[np.uint8]] = []
    for i, run in enumerate(runs):
        if len(run) >= n:
            rest = [run[n:]] if len(run) > n else []
            return [*full, run[:n]], [*rest, *runs[i + 1 :]]
        full.append(run)
        n -= len(run)
    return full, []
