"""Decodes one image from one file, or returns the reason why it cannot.

PNG, JPEG, WebP, BMP and TIFF, recognised by content, not by name; of several frames, the first. The EXIF orientation is
applied. No file is trusted: any error of Pillow becomes a reason, not a traceback, and an image with more pixels than
the limit is rejected by its header, before anything is unpacked. Conversion to 8-bit RGB happens in `preprocessing`.
"""

from __future__ import annotations

import io
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from PIL import Image, UnidentifiedImageError

from neuralmean.data.images.arrays import ArrayFile, split_name
from neuralmean.errors import InputError

__all__ = ["EXTENSIONS", "MAX_PIXELS", "Unreadable", "decode_image", "read_image"]

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF")
EXTENSIONS = frozenset(
    {".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".dib", ".tif", ".tiff"},
)
# Pillow's own limit: it warns above this, and raises above twice as much.
MAX_PIXELS = 89_478_485

_ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Unreadable:
    """A file that could not be read as an image, and the reason."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


def read_image(path: str | Path, *, max_pixels: int = MAX_PIXELS) -> Image.Image | Unreadable:
    """Return the image in a file, upright and in its own mode, or the reason why it cannot be read.

    Args:
        path: A file, or one row of an array file as `ImageBatches` names it: `images.npz#12`.
        max_pixels: Reject images with more pixels than this.
    """
    name = str(path)
    try:
        return open_image(name, max_pixels)
    except InputError as error:
        return Unreadable(name, str(error))


def decode_image(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Return the upright image in the bytes of a file, or raise `InputError` with the reason."""
    if not data:
        raise InputError("the file is empty")
    return _decode(io.BytesIO(data), max_pixels)


def open_image(name: str, max_pixels: int) -> Image.Image:
    """Like `read_image`, but raises `InputError` with the reason."""
    array_path, row = split_name(name)
    if row is not None and not Path(name).exists():
        with ArrayFile(array_path) as file:
            pixels = file.read(row, row + 1)[0]
        return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    try:
        status = os.stat(name)  # noqa: PTH116 - a hot loop over strings
        # Reading a pipe or a device could block forever.
        if not stat.S_ISREG(status.st_mode):
            raise InputError("it is not a file")
        if status.st_size == 0:
            raise InputError("the file is empty")
        with open(name, "rb") as handle:  # noqa: PTH123
            return _decode(handle, max_pixels)
    except OSError as error:
        raise InputError(f"the system reported: {error.strerror or error}") from error


def _decode(handle: IO[bytes], max_pixels: int) -> Image.Image:
    try:
        image: Image.Image = Image.open(handle, formats=FORMATS)
    except UnidentifiedImageError:
        raise InputError("it is not a PNG, JPEG, WebP, BMP or TIFF image, or its beginning is damaged") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InputError(f"it has more pixels than the limit of {max_pixels:,}") from None
    except Exception as error:  # a hostile header can make Pillow raise almost anything
        raise InputError(f"its beginning is damaged ({_short(error)})") from error
    width, height = image.size
    if width * height > max_pixels:
        raise InputError(f"it has {width:,} x {height:,} pixels, more than the limit of {max_pixels:,}")
    if width * height == 0:
        raise InputError("it has no pixels")
    try:
        image.load()
    except MemoryError:
        raise InputError("there is not enough memory to unpack it") from None
    except Exception as error:  # so can a hostile body
        raise InputError(f"the file is damaged or cut short ({_short(error)})") from error
    return _upright(image)


def _upright(image: Image.Image) -> Image.Image:
    """Return the image rotated as its EXIF orientation says; a damaged entry is ignored."""
    try:
        turn = _TURNS.get(image.getexif().get(_ORIENTATION_TAG, 1))
    except (SyntaxError, ValueError, TypeError, KeyError, IndexError, EOFError, OSError, struct.error, UserWarning):
        return image
    return image if turn is None else image.transpose(turn)


def _short(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text[:117] + "...") if len(text) > 120 else text or type(error).__name__
