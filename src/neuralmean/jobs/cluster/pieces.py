"""The inputs of one chunk: files, rows of an array file, or an unreadable container.

A piece is small and is sent to a worker; the worker calls `items` and gets images one after the other, each a path, the
bytes of a file, an array or the reason why there is none. Decoding happens in `reading`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from neuralmean.data.images import Unreadable
from neuralmean.data.images.arrays import ArrayFile, row_name
from neuralmean.errors import InputError

Item = str | bytes | NDArray[np.uint8] | Unreadable
_ROWS_AT_ONCE = 64


class Piece(Protocol):
    """Some inputs, in order."""

    @property
    def names(self) -> list[str]:
        """The name of each input, for the result."""

    def items(self) -> Iterator[Item]:
        """Read the inputs, one at a time, in order."""

    def select(self, places: Sequence[int]) -> Piece:
        """Return the piece with only the inputs at these positions, in increasing order."""

    def describe(self) -> Any:
        """Return JSON values that are equal for equal pieces, also in another process."""


@dataclass(frozen=True)
class Files:
    """Image files."""

    paths: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The paths."""
        return list(self.paths)

    def items(self) -> Iterator[Item]:
        """Yield the paths, for the decoder to open."""
        yield from self.paths

    def select(self, places: Sequence[int]) -> Files:
        """Return some of the files."""
        return Files(tuple(self.paths[place] for place in places))

    def describe(self) -> Any:
        """Return the paths."""
        return ["files", *self.paths]


@dataclass(frozen=True)
class ArrayRows:
    """Rows of an `.npy` or `.npz` file."""

    path: str
    rows: tuple[int, ...]

    @property
    def names(self) -> list[str]:
        """Names such as `images.npz#12`."""
        return [row_name(self.path, row) for row in self.rows]

    def items(self) -> Iterator[Item]:
        """Yield one image (H, W, C) after the other, from runs of neighbouring rows."""
        try:
            with ArrayFile(self.path) as file:
                for first, stop in stretches(self.rows, _ROWS_AT_ONCE):
                    yield from file.read(first, stop)
        except InputError as error:
            # Rows that were read before the damage are good; those after it have the same reason.
            reason = str(error)
            while True:
                yield Unreadable("", reason)

    def select(self, places: Sequence[int]) -> ArrayRows:
        """Return some of the rows."""
        return ArrayRows(self.path, tuple(self.rows[place] for place in places))

    def describe(self) -> Any:
        """Return the path and the rows."""
        return ["array", self.path, list(stretches(self.rows))]


@dataclass(frozen=True)
class Closed:
    """A source that cannot be opened: a folder without permission, a damaged archive."""

    note: Unreadable

    @property
    def names(self) -> list[str]:
        """Its path."""
        return [self.note.path]

    def items(self) -> Iterator[Item]:
        """Yield the reason."""
        yield self.note

    def select(self, places: Sequence[int]) -> Closed:
        """Return itself: it has a single input."""
        return self

    def describe(self) -> Any:
        """Return the path."""
        return ["closed", self.note.path]


def stretches(rows: Sequence[int], limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive numbers, as first and one after the last, at most `limit` long.

    Example:
        >>> list(stretches([3, 4, 5, 9])), list(stretches([3, 4, 5], 2))
        ([(3, 6), (9, 10)], [(3, 5), (5, 6)])
    """
    first = last = None
    for row in rows:
        if first is None or last is None or row != last + 1 or (limit is not None and row - first >= limit):
            if first is not None and last is not None:
                yield first, last + 1
            first = row
        last = row
    if first is not None and last is not None:
        yield first, last + 1
