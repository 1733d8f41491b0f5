"""Parquet files of images, and the forms of an Arrow column of images.

An image is the bytes of a file, a struct with `bytes` in it (as Hugging Face writes them), or a uint8 array: an Arrow
tensor, one of Ray's, or nested lists. Parquet can only be read from the start of a row group; a chunk lies within one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from neuralmean.data.images import Unreadable
from neuralmean.data.images.arrays import row_name
from neuralmean.errors import InputError
from neuralmean.jobs.cluster.extras import import_extra
from neuralmean.jobs.cluster.pieces import Item, stretches

COLUMNS = ("image", "img", "bytes", "jpg", "jpeg", "png", "webp", "pixels", "data")
NAME_COLUMNS = ("path", "__key__")
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class ParquetRows:
    """Some rows of one row group; `rows` count from the beginning of the group, which begins at row `first`."""

    path: str
    group: int
    first: int
    rows: tuple[int, ...]
    column: str | None

    @property
    def names(self) -> list[str]:
        """Names such as `photos.parquet#12`."""
        return [row_name(self.path, self.first + row) for row in self.rows]

    def items(self) -> Iterator[Item]:
        """Yield one image after the other; the file is read in steps, so a large group needs little memory."""
        try:
            with open_parquet(self.path) as file:
                yield from self._rows(file)
        except _damage() as error:
            reason = f"the file is damaged or cut short ({_short(error)})"
            while True:
                yield Unreadable("", reason)

    def _rows(self, file: Any) -> Iterator[Item]:
        column = image_column(file.schema_arrow, self.column, self.path)
        wanted, begin = iter(stretches(self.rows)), 0
        first, stop = next(wanted)
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, row_groups=[self.group], columns=[column]):
            values = batch.column(column)
            while first < begin + len(values):
                last = min(stop, begin + len(values))
                yield from images_of(values.slice(first - begin, last - first))
                if last < stop:
                    first = last
                    break
                following = next(wanted, None)
                if following is None:
                    return
                first, stop = following
            begin += len(values)

    def select(self, places: Sequence[int]) -> ParquetRows:
        """Return some of the rows."""
        return ParquetRows(self.path, self.group, self.first, tuple(self.rows[p] for p in places), self.column)

    def describe(self) -> Any:
        """Return path, column and rows."""
        return ["parquet", self.path, self.column, self.first, list(stretches(self.rows))]


def list_rows(path: str, column: str | None, limit: int) -> Iterator[ParquetRows | Unreadable]:
    """Yield the rows of a parquet file in pieces of at most `limit`, from its metadata alone."""
    try:
        with open_parquet(path) as file:
            sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
            chosen = image_column(file.schema_arrow, column, path)
    except InputError:
        raise
    except _damage() as error:
        yield Unreadable(path, f"it is no parquet file, or damaged ({_short(error)})")
        return
    first = 0
    for group, size in enumerate(sizes):
        rows = iter(range(size))
        while part := tuple(islice(rows, limit)):
            yield ParquetRows(path, group, first, part, chosen)
        first += size


def open_parquet(path: str) -> Any:
    """Open a parquet file."""
    return import_extra("pyarrow.parquet").ParquetFile(path)


def image_column(schema: Any, column: str | None, where: str) -> str:
    """Return the column that holds the images: the requested one, a usual name, or the only possible one."""
    names = list(schema.names)
    if column is not None:
        if column not in names:
            raise InputError(f"Expected {where!r} to have a column {column!r}, but it has {names}.")
        return column
    for usual in COLUMNS:
        if usual in names:
            return usual
    able = [name for name in names if _can_hold_images(schema.field(name).type)]
    if len(able) != 1:
        raise InputError(
            f"Expected {where!r} to have a column of images with one of the names {list(COLUMNS)}, but it has {names}. "
            "Choose one with `column`."
        )
    return str(able[0])


def images_of(values: Any) -> Iterator[Item]:
    """Yield the images in an Arrow array, one item for each value."""
    arrays = _as_tensors(values)
    if arrays is not None:
        yield from map(_checked, arrays)
        return
    for value in values:
        yield _image(value.as_py())


def names_of(block: Any) -> list[str] | None:
    """Return the names of the rows of an Arrow table, if it has a column of names."""
    for name in NAME_COLUMNS:
        if name in block.schema.names:
            return [str(value) for value in block.column(name).to_pylist()]
    return None


def _can_hold_images(kind: Any) -> bool:
    types = import_extra("pyarrow.types")
    if types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    nested = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(nested or types.is_binary(kind) or types.is_large_binary(kind) or hasattr(kind, "shape"))


def _as_tensors(values: Any) -> Any:
    """Return an Arrow or Ray tensor array as numpy arrays; None for anything else."""
    for chunk_method in ("to_numpy_ndarray", "to_numpy"):
        if hasattr(values.type, "shape") or "tensor" in type(values.type).__name__.lower():
            method = getattr(values, chunk_method, None)
            if method is not None:
                return method() if chunk_method == "to_numpy_ndarray" else method(zero_copy_only=False)
    return None


def _image(value: Any) -> Item:
    if isinstance(value, dict):
        value = value.get("bytes")
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if value is None:
        return Unreadable("", "this row is empty")
    if isinstance(value, str):
        return Unreadable("", "the row holds text and no image; to score files, pass their folder")
    try:
        array = np.asarray(value)
        # Nested lists arrive as int64; only values of a byte are pixels.
        if array.dtype.kind in "iu" and array.size and array.min() >= 0 and array.max() <= 255:
            array = array.astype(np.uint8)
    except (ValueError, TypeError, OverflowError):
        return Unreadable("", "the row is not an array of one shape")
    return _checked(array)


def _checked(array: Any) -> Item:
    array = np.asarray(array)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        return Unreadable(
            "", f"it must be uint8 with shape (H, W) or (H, W, C), but it is {array.dtype} with shape {array.shape}"
        )
    return np.ascontiguousarray(array)


def _damage() -> tuple[type[Exception], ...]:
    """Return the exceptions that reading a damaged file may raise, with Arrow's own."""
    own: type[Exception] = import_extra("pyarrow").ArrowException
    return (own, OSError, ValueError, TypeError, LookupError, NotImplementedError, MemoryError)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
