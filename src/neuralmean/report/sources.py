"""Sources of the report's images: batches with the names of their images, up to a limit.

Nothing here runs a model. Names are those of `ImageBatches`; data without names is numbered.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from neuralmean.data.batch import Batch, to_batch, to_batches
from neuralmean.data.images import find_inputs
from neuralmean.data.images.arrays import ArrayFile, row_name
from neuralmean.errors import InputError


def named_batches(data: Any, *, name: str, limit: int | None = None) -> Iterator[tuple[Batch, list[str | None]]]:
    """Yield the batches of `data` with the names of their images, None for an image without one.

    Args:
        data: Batches of `(images, names)` such as `ImageBatches`, or any data that a `Detector` takes.
        name: Name of the set in error messages.
        limit: Stop after this many images.
    """
    left = limit
    for batch, names in _with_names(data, name):
        if left is not None:
            if left <= 0:
                return
            if len(batch) > left:
                batch, names = _first_rows(batch, left), names[:left]
            left -= len(batch)
        yield batch, names


def count_images(data: Any, limit: int | None) -> int | None:
    """Return the number of images, or None if that is unknown without reading them."""
    count = getattr(data, "count", None)
    if isinstance(data, (Tensor, np.ndarray)):
        total: int | None = len(data)
    else:
        total = count() if callable(count) and not isinstance(data, (list, tuple)) else None
    if total is None or limit is None:
        return total if limit is None else limit
    return min(total, limit)


def spread_over(paths: str | Path | Sequence[str | Path], limit: int) -> Callable[[str], bool]:
    """Return a `skip` for `ImageBatches` that keeps exactly `limit` of the images, spread evenly over all of `paths`.

    The first images of a folder are often all of one class. Which images are kept depends on their names alone.

    Args:
        paths: Folders, files, globs, `.npz` and `.npy` files.
        limit: Number of images to keep; all if there are fewer.
    """
    if limit < 1:
        raise InputError(f"Expected `limit` to be at least 1, but got {limit!r}.")
    lowest = heapq.nsmallest(limit, map(_rank, _names(paths)))
    last = lowest[-1] if lowest else 0
    return lambda name: _rank(name) > last


def _first_rows(batch: Batch, n: int) -> Batch:
    size = len(batch)

    def cut(value: Any) -> Any:
        return value[:n] if isinstance(value, Tensor) and value.dim() > 0 and len(value) == size else value

    return Batch(tuple(map(cut, batch.args)), {key: cut(value) for key, value in batch.kwargs.items()})


def _names(paths: str | Path | Sequence[str | Path]) -> Iterator[str]:
    for source in find_inputs(paths):
        if source.kind == "image":
            yield source.path
        elif source.kind == "array":
            try:
                with ArrayFile(source.path) as file:
                    count = len(file)
            except InputError:
                continue  # reported when it is read
            yield from (row_name(source.path, row) for row in range(count))


def _rank(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "big")


def _with_names(data: Any, name: str) -> Iterator[tuple[Batch, list[str | None]]]:
    if isinstance(data, (Tensor, np.ndarray, DataLoader, Dataset, Mapping, str, bytes)) or not isinstance(
        data, Iterable
    ):
        for batch in to_batches(data, name=name):
            yield batch, [None] * len(batch)
        return
    for item in data:
        batch = to_batch(item)
        second = item[1] if isinstance(item, (tuple, list)) and len(item) == 2 else None
        has_names = (
            isinstance(second, (tuple, list)) and len(second) == len(batch) and all(isinstance(n, str) for n in second)
        )
        if len(batch):
            yield batch, list(second) if has_names and second is not None else [None] * len(batch)
