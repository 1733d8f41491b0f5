"""Turns a piece into batches for the model, in a worker.

Everything is decoded here, in the worker's one thread. A chunk that has killed a worker before is read with care: each
image is decoded in a separate process, so that only the image that crashes it is lost.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.data.images import MAX_PIXELS, Unreadable, decode_image, read_image
from neuralmean.data.images.pool import decode_in_order
from neuralmean.data.images.worker import Task
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError
from neuralmean.jobs.cluster.pieces import Item, Piece

Pixels = NDArray[np.uint8]
BATCH_SIZE = 64


@dataclass(frozen=True)
class Reading:
    """How pieces are read.

    Attributes:
        preprocessing: What to do to the images.
        batch_size: Images per forward pass.
        max_pixels: Refuse larger images.
        careful: Whether to decode in another process.
    """

    preprocessing: Preprocessing
    batch_size: int = BATCH_SIZE
    max_pixels: int = MAX_PIXELS
    careful: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise InputError(f"Expected `batch_size` to be a positive integer, but got {self.batch_size!r}.")


@dataclass
class Batches:
    """Iterates over a piece once; fills `unreadable` on the way."""

    piece: Piece
    how: Reading
    unreadable: list[Unreadable] = field(default_factory=list)

    def __iter__(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield names and input of the model, shape (N, C, H, W).

        A batch covers the next `batch_size` inputs; one that cannot be read is missing in it, and images of different
        sizes are in different batches.
        """
        names: list[str] = []
        images: list[Pixels] = []
        place = 0
        with closing(self._items()) as items:
            for place, (name, item) in enumerate(items, 1):
                pixels = self._pixels(name, item)
                if images and pixels is not None and pixels.shape != images[0].shape:
                    yield names, self._normalise(images)
                    names, images = [], []
                if pixels is not None:
                    names.append(name)
                    images.append(pixels)
                if images and place % self.how.batch_size == 0:
                    yield names, self._normalise(images)
                    names, images = [], []
        if images:
            yield names, self._normalise(images)

    def _normalise(self, images: list[Pixels]) -> Tensor:
        return self.how.preprocessing.normalise(np.stack(images))

    def _items(self) -> Generator[tuple[str, Item]]:
        names = self.piece.names
        items = iter(self.piece.items())
        early = Unreadable("", "the source ends before it")
        for name in names:
            yield name, next(items, early)  # each name has exactly one answer, whatever the source does

    def _pixels(self, name: str, item: Item) -> Pixels | None:
        try:
            if isinstance(item, Unreadable):
                raise InputError(item.reason)
            if isinstance(item, np.ndarray):
                return np.asarray(self.how.preprocessing.array_pixels(item[None])[0])
            if self.how.careful:
                return self._decode_apart(item)
            image = read_image(item, max_pixels=self.how.max_pixels) if isinstance(item, str) else item
            if isinstance(image, Unreadable):
                raise InputError(image.reason)
            if isinstance(image, bytes):
                image = decode_image(image, max_pixels=self.how.max_pixels)
            return self.how.preprocessing.pixels(image)
        except InputError as error:
            self.unreadable.append(Unreadable(name, str(error)))
        except MemoryError:
            self.unreadable.append(Unreadable(name, "there is not enough memory to unpack it"))
        return None

    def _decode_apart(self, item: str | bytes) -> Pixels:
        with tempfile.TemporaryDirectory() as folder:
            path = item if isinstance(item, str) else str(Path(folder) / "image")
            if isinstance(item, bytes):
                Path(path).write_bytes(item)
            task = (Task((path,)), True)
            answers = decode_in_order([task], self.how.preprocessing, workers=1, max_pixels=self.how.max_pixels)
            ((_, answer),) = list(answers)
        if answer.failures:
            raise InputError(answer.failures[0])
        return np.asarray(answer.pixels[0][0])
