"""Large tables of numbers, stored once, in memory or on disk, and read in blocks of rows.

A table larger than `IN_MEMORY` is stored in a memory-mapped file, so that it is a tensor like any other and the system
caches as much of it as fits. The file is unlinked: it disappears with the last tensor that uses it, even after `kill
-9`. Independent of models and scorers.
"""

from __future__ import annotations

import errno
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from neuralmean.errors import StorageError

IN_MEMORY = (
    1024**3
)  # bytes; a fit holds at most three such tables: rows of two kinds and, for the logistic scorer, a copy
BLOCK = 4 * 1024**2  # bytes processed at a time; about ten times as many in float64, with the results


def fits_in_memory(count: int, width: int) -> bool:
    """Whether a table of `count` rows of `width` float32 is held in memory."""
    return 4 * count * width <= IN_MEMORY


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor to be filled, in memory or, if it is large, on disk.

    Raises:
        StorageError: The disk is full.
    """
    size = math.prod(shape) * dtype.itemsize
    if size <= IN_MEMORY:
        return torch.empty(shape, dtype=dtype)
    try:
        with tempfile.TemporaryFile() as file:
            _reserve(file.fileno(), size)
            pages = mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise StorageError(
            f"Expected room for {size / 1e9:.1f} GB of rows in {tempfile.gettempdir()}, but got: {error.strerror}. "
            "Set TMPDIR to a folder with more room, or pass fewer examples."
        ) from error
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _reserve(file: int, size: int) -> None:
    """Allocate the file on disk, as a disk that fills up later would end the process without an exception."""
    if shutil.disk_usage(tempfile.gettempdir()).free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


class Table:
    """A tensor that grows by a few rows at a time.

    Args:
        additions: Approximate number of calls of `add`; None if unknown, in which case the table is moved when it is full.
    """

    def __init__(self, additions: int | None = None) -> None:
        self._additions, self._count = additions or 1, 0
        self._store = torch.empty(0)

    def add(self, rows: Tensor) -> None:
        """Append rows, shape (n, ...), all but the first dimension the same each time."""
        end = self._count + len(rows)
        if end > len(self._store):
            size = 2 * len(self._store) if self._count else self._additions * len(rows)
            store = empty((max(end, size), *rows.shape[1:]), rows.dtype)
            if self._count:
                store[: self._count] = self.rows
            self._store = store
        self._store[self._count : end] = rows
        self._count = end

    @property
    def rows(self) -> Tensor:
        """The rows so far, shape (N, ...)."""
        return self._store[: self._count]


def parts_of(count: int, width: int) -> Iterator[slice]:
    """Cut `count` rows of `width` float32 into blocks."""
    step = max(1, BLOCK // max(1, 4 * width))
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def take(table: Tensor, chosen: Tensor) -> Tensor:
    """Return a copy of the rows at `chosen`, in memory or, if it is large, on disk."""
    return torch.index_select(table, 0, chosen, out=empty((len(chosen), *table.shape[1:]), table.dtype))


@dataclass(frozen=True)
class Blocks:
    """Rows of a table, read in blocks, any number of times.

    Attributes:
        table: Shape (N, D), in memory or on disk.
        chosen: Indices of the rows, int64 (n,), in order; None for all.
        change: A function applied to each block when it is read.
    """

    table: Tensor
    chosen: Tensor | None = None
    change: Callable[[Tensor], Tensor] = lambda rows: rows

    def __len__(self) -> int:
        return len(self.table if self.chosen is None else self.chosen)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[part] for part in self.parts())

    def __getitem__(self, rows: slice | Tensor) -> Tensor:
        """Return some of the rows."""
        return self.change(self.table[rows if self.chosen is None else self.chosen[rows]])

    @property
    def width(self) -> int:
        """Columns of a block."""
        return self.change(self.table[:0]).shape[1]

    def parts(self) -> Iterator[slice]:
        """Return which rows each block has."""
        return parts_of(len(self), self.table.shape[1])

    def beside(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each block with its part of `values`, which has one entry per row."""
        return ((self[part], values[part]) for part in self.parts())

    def then(self, change: Callable[[Tensor], Tensor]) -> Blocks:
        """Return the same rows with a further change applied."""
        return Blocks(self.table, self.chosen, lambda rows: change(self.change(rows)))
