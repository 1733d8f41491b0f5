"""Images stored in one array: `.npy`, and `.npz` with a key `images`, uint8 of shape (N, H, W, C).

Rows are read a few at a time, so memory does not grow with the file. The header is checked against the file before a
row is read: nothing is unpickled, and a file is rejected if its header claims more than it holds, or if it would unpack
to absurdly more than its size on disk. The text of the `InputError` is the reason.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray
from typing_extensions import Self

from neuralmean.errors import InputError

__all__ = ["ARRAY_EXTENSIONS", "ArrayFile", "row_name", "split_name"]

ARRAY_EXTENSIONS = frozenset({".npy", ".npz"})
KEY = "images"
MAX_ROW_BYTES = 400_000_000
# Deflate compresses at most about 1,000 to 1; images that compress 200 to 1 and unpack to gigabytes are an attack.
BOMB_RATIO, BOMB_BYTES = 200, 4 * 2**30


def row_name(path: str, row: int) -> str:
    """The name of one row of an array file.

    Example:
        >>> row_name("photos.npz", 12)
        'photos.npz#12'
    """
    return f"{path}#{row}"


def split_name(name: str) -> tuple[str, int | None]:
    """Path and row of a name; None for a name that is not a row of an array file.

    Example:
        >>> split_name("photos.npz#12"), split_name("photo#12.png")
        (('photos.npz', 12), ('photo#12.png', None))
    """
    path, mark, row = name.rpartition("#")
    if mark and row.isascii() and row.isdigit() and Path(path).suffix.lower() in ARRAY_EXTENSIONS:
        return path, int(row)
    return name, None


class ArrayFile:
    """The images of one open file, to be read in increasing order of rows.

    Attributes:
        path: The file.
        shape: (N, H, W, C), as its header says.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        self._stream: IO[bytes] | None = None
        self._row = 0
        try:
            claimed = self._open()
            self.shape = self._read_header()
            self._begin = self._stream.tell() if self._stream is not None else 0
            self._check_length(*claimed)
        except InputError:
            self.close()
            raise
        except _DAMAGE as error:
            self.close()
            raise InputError(_reason(error)) from error

    def __len__(self) -> int:
        return self.shape[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows `start` to `stop` (exclusive), shape (stop - start, H, W, C)."""
        if not 0 <= start < stop <= len(self):
            raise InputError(f"there is no row {stop - 1}: it has {len(self):,} images")
        rows = np.empty((stop - start, *self.shape[1:]), np.uint8)
        try:
            self._seek(start)
            _fill(self._stream, rows.reshape(-1).data)
        except _DAMAGE as error:
            raise InputError(_reason(error)) from error
        self._row = stop
        return rows

    def close(self) -> None:
        """Close the file; reading afterwards is an error."""
        for resource in (self._stream, self._archive):
            if resource is not None:
                resource.close()

    def _seek(self, row: int) -> None:
        if row != self._row and self._stream is not None:
            # Inside an archive, this unpacks everything before, in constant memory.
            self._stream.seek(self._begin + row * math.prod(self.shape[1:]))
            self._row = row

    def _open(self) -> tuple[int, int]:
        """Open the stream and return the size of the array in bytes, unpacked and on disk."""
        path = Path(self.path)
        if not path.is_file():
            raise InputError("there is no such file")
        size = path.stat().st_size
        if size == 0:
            raise InputError("the file is empty")
        if path.suffix.lower() == ".npy":
            self._stream = path.open("rb")
            return size, size
        self._archive = zipfile.ZipFile(path)
        keys = [name.removesuffix(".npy") for name in self._archive.namelist()]
        if KEY not in keys:
            raise InputError(f"it has no array {KEY!r}, only {keys[:5]}")
        member = self._archive.getinfo(f"{KEY}.npy")
        self._stream = self._archive.open(member)
        return member.file_size, member.compress_size

    def _read_header(self) -> tuple[int, int, int, int]:
        version = npy.read_magic(self._stream)  # type: ignore[arg-type]
        readers: dict[tuple[int, int], Any] = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise InputError(f"its array has the unknown format version {version}")
        shape, fortran, dtype = readers[version](self._stream)
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3, 4):
            raise InputError(
                "its images must be uint8 with shape (N, H, W, C) and 1, 3 or 4 channels, "
                f"but they are {dtype} with shape {shape}"
            )
        if fortran:
            raise InputError("its images are in column order; save them after `np.ascontiguousarray`")
        if min(shape) < 1:
            raise InputError(f"it has no images: its shape is {shape}")
        return shape[0], shape[1], shape[2], shape[3]

    def _check_length(self, unpacked: int, packed: int) -> None:
        expected = self._begin + math.prod(self.shape)
        if math.prod(self.shape[1:]) > MAX_ROW_BYTES:
            raise InputError(f"its images are absurdly large: its shape is {self.shape}")
        if unpacked != expected:
            raise InputError(f"its header promises {expected:,} bytes, but there are {unpacked:,}")
        if unpacked > BOMB_BYTES and unpacked > BOMB_RATIO * max(packed, 1):
            raise InputError(f"it would unpack from {packed:,} to {unpacked:,} bytes")


_DAMAGE = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    NotImplementedError,
    SyntaxError,
    MemoryError,
    tokenize.TokenError,  # numpy parses the header of an array as Python
    zipfile.BadZipFile,
    zlib.error,
)


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"the system reported: {error.strerror}"
    return f"the file is damaged or cut short ({' '.join(str(error).split())[:120] or type(error).__name__})"


def _fill(stream: IO[bytes] | None, view: memoryview) -> None:
    while view:
        n = stream.readinto(view) if stream is not None else 0  # type: ignore[attr-defined]
        if not n:
            raise EOFError("it ends too early")
        view = view[n:]
