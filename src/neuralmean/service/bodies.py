"""Request bodies, with limits on everything: bytes, time, compression, files, pixels.

Reads a body chunk by chunk and stops at the first byte too many. What cannot be used is a `Refusal`. Decoding images
takes processor time, so `decode_images` is to be called on a thread, unless `decode_small` did it.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from neuralmean.data.images import decode_image
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError
from neuralmean.service.refusal import Refusal, busy
from neuralmean.service.settings import Settings

T = TypeVar("T")
Aside = Callable[[Callable[[], Any]], Awaitable[Any]]

SMALL_BYTES = 16 * 2**10
SMALL_PIXELS = 128**2
"""A smaller image takes less time to decode than to pass to a thread and back."""


TOGETHER = 4
"""Limit on the pixels of all images of a request, as a multiple of the limit of one: a few bytes can unpack to millions."""


@dataclass(frozen=True)
class NamedBytes:
    """The bytes of an image file, and its name."""

    name: str
    data: bytes


class BodyReader:
    """Reads bodies and counts the bytes that are held.

    Args:
        settings: The limits.
        aside: Does work on a thread.
    """

    def __init__(self, settings: Settings, aside: Aside) -> None:
        self._settings, self._aside = settings, aside
        self._held = 0

    @property
    def n_bytes(self) -> int:
        """Number of bytes held."""
        return self._held

    @contextmanager
    def holding(self) -> Iterator[_Hold]:
        """Count bytes that are read in this block as held until its end."""
        hold = _Hold()
        try:
            yield hold
        finally:
            self._held -= hold.n_bytes

    async def read(self, request: Request, hold: _Hold) -> bytes:
        """Return the body of a request, unpacked."""
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > self._settings.max_body_bytes:
            raise self._too_large()
        try:
            body = await within(self._settings.timeout_s, self._collect(request, hold))
        except (asyncio.TimeoutError, TimeoutError):
            raise Refusal(
                408, f"Expected the whole body within {self._settings.timeout_s:g} seconds, but it did not come."
            ) from None
        encoding = request.headers.get("content-encoding", "").strip().lower()
        if encoding in ("", "identity"):
            return body
        plain: bytes = await self._aside(partial(self._unpack, body, encoding))
        self.add(hold, len(plain))
        return plain

    def add(self, hold: _Hold, n_bytes: int) -> None:
        """Count more bytes as held, or refuse the request if there are too many."""
        if self._held + n_bytes > self._settings.max_bytes_in_flight:
            raise busy("The server holds too many requests already. Try again later.", 1)
        self._held += n_bytes
        hold.n_bytes += n_bytes

    async def _collect(self, request: Request, hold: _Hold) -> bytes:
        chunks: list[bytes] = []
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > self._settings.max_body_bytes:
                raise self._too_large()
            self.add(hold, len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    def _unpack(self, body: bytes, encoding: str) -> bytes:
        if encoding not in ("gzip", "deflate"):
            raise Refusal(415, f"Expected a body that is plain, gzip or deflate, but got {encoding[:40]!r}.")
        unpacker = zlib.decompressobj(31 if encoding == "gzip" else 15)
        try:
            plain = unpacker.decompress(body, self._settings.max_body_bytes + 1)
        except zlib.error:
            raise Refusal(400, f"Expected the body to be packed with {encoding}, but it cannot be unpacked.") from None
        if len(plain) > self._settings.max_body_bytes:
            raise self._too_large()
        if not unpacker.eof or unpacker.unused_data:
            raise Refusal(400, f"Expected the body to be packed with {encoding}, but it is cut short or longer.")
        return plain

    def _too_large(self) -> Refusal:
        return Refusal(413, f"Expected a body of at most {self._settings.max_body_bytes} bytes, but it is larger.")


async def within(seconds: float, work: Awaitable[T]) -> T:
    """Await something, or raise TimeoutError."""
    if sys.version_info < (3, 11):
        return await asyncio.wait_for(work, seconds)
    async with asyncio.timeout(seconds):  # without a separate task, which would take as long as the reading
        try:
            return await work
        finally:
            del work  # or an exception would keep it, and all that it holds, until garbage is collected


@dataclass
class _Hold:
    n_bytes: int = 0


async def split_files(request: Request, body: bytes, max_files: int) -> list[NamedBytes]:
    """Return the image files in a body: those of a form, or the body itself."""
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        if not body:
            raise Refusal(400, "Expected an image file as the body, or a form with image files, but the body is empty.")
        return [NamedBytes("body", body)]

    async def stream() -> AsyncGenerator[bytes, None]:
        yield body
        yield b""

    try:
        parser = MultiPartParser(request.headers, stream(), max_files=max_files, max_fields=max_files)
        form = await parser.parse()
    except MultiPartException as error:
        status = 413 if "Too many" in error.message else 400
        raise Refusal(status, f"Expected a form with at most {max_files} image files, but: {error.message}") from None
    except (
        KeyError,
        ValueError,
        LookupError,
        UnicodeError,
    ):  # a boundary that is missing or strange, a charset unknown
        raise Refusal(400, "Expected a form with image files, but it cannot be read.") from None
    async with form_closing(form.multi_items()) as files:
        found = [NamedBytes((file.filename or "file")[:200], await file.read()) for file in files]
    if not found:
        raise Refusal(400, "Expected a form with image files, but there is no file in it.")
    return found


class form_closing:  # noqa: N801 - reads like a function
    """The uploaded files of a form, closed at the end of the block."""

    def __init__(self, items: list[tuple[str, UploadFile | str]]) -> None:
        self._files = [value for _, value in items if isinstance(value, UploadFile)]

    async def __aenter__(self) -> list[UploadFile]:
        return self._files

    async def __aexit__(self, *_: object) -> None:
        for file in self._files:
            await file.close()


def decode_images(
    files: list[NamedBytes], preprocessing: Preprocessing, *, max_pixels: int, max_bytes: int
) -> list[NDArray[np.uint8]]:
    """Return the preprocessed images, uint8: as one batch (N, H, W, C), or separately if they differ in size.

    Args:
        files: The image files.
        preprocessing: How to prepare them.
        max_pixels: The most that an image may have.
        max_bytes: The most that all of them may take once they are prepared.
    """
    images: list[NDArray[np.uint8]] = []
    n_pixels = 0
    for file in files:
        try:
            image = decode_image(file.data, max_pixels=max_pixels)
            n_pixels += image.width * image.height
            images.append(preprocessing.pixels(image))
        except InputError as error:
            reason = str(error).rstrip(".")
            status = 413 if "more than the limit" in reason or "more pixels" in reason else 400
            raise Refusal(status, f"Expected {file.name!r} to be an image, but {_lower(reason)}.") from None
        if n_pixels > TOGETHER * max_pixels:
            raise Refusal(
                413,
                f"Expected images of at most {TOGETHER * max_pixels:,} pixels together, but they have more. Send fewer.",
            )
        if sum(image.nbytes for image in images) > max_bytes:
            raise Refusal(413, f"Expected images of at most {max_bytes} bytes together once unpacked. Send fewer.")
    if len({image.shape for image in images}) == 1:
        return [np.stack(images)]
    return [image[None] for image in images]


def decode_small(
    files: list[NamedBytes], preprocessing: Preprocessing, *, max_pixels: int, max_bytes: int
) -> list[NDArray[np.uint8]] | None:
    """Do the same as `decode_images` if that is fast; otherwise return None."""
    if len(files) > 1 or len(files[0].data) > SMALL_BYTES or max(preprocessing.size or (0,)) ** 2 > SMALL_PIXELS:
        return None
    try:
        return decode_images(files, preprocessing, max_pixels=min(max_pixels, SMALL_PIXELS), max_bytes=max_bytes)
    except Refusal as refusal:
        if refusal.status != 413:
            raise
        return None


def _lower(reason: str) -> str:
    return reason[:1].lower() + reason[1:]
