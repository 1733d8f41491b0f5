"""Readers of the formats in which people keep images: arrays, CIFAR's batches, SVHN's `.mat`, folders of pictures.

A reader takes paths and returns images (N, 32, 32, 3) with labels, if there are any; it knows nothing of set names.
Beside each is a counter that looks at headers or names only. A file that cannot be read is one `ArtefactError`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from neuralmean.bench.data.imageset import SIZE, Fit, fit_image, fit_images
from neuralmean.bench.data.pickles import read_batch
from neuralmean.errors import ArtefactError, MissingExtraError

Pictures = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp", ".gif", ".tif", ".tiff"})
_PIXELS = SIZE * SIZE * 3
# What numpy, zipfile and Pillow raise on damaged or hostile files; a header may also claim more than fits in memory.
_ARRAY_ERRORS = (ValueError, OSError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)
_PICTURE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, MemoryError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Format:
    """One way to keep images on disk: its name for people, its reader, and its counter."""

    label: str
    read: Callable[[Sequence[Path], Fit], Pictures]
    count: Callable[[Sequence[Path]], int]


def _read_npz(paths: Sequence[Path], fit: Fit) -> Pictures:
    """Images and, if there, labels of an `.npz` file."""
    path = paths[0]
    try:
        # Opened here, since numpy leaves a file open that turns out to be no archive.
        with path.open("rb") as handle, np.load(handle, allow_pickle=False) as held:
            if "images" not in held:
                raise _wrong(path, "an array `images`", f"only {sorted(held)}")
            images = _checked(held["images"], path)
            labels = held["labels"].astype(np.int64).reshape(-1) if "labels" in held else None
    except _ARRAY_ERRORS as error:
        if isinstance(error, ArtefactError):
            raise
        raise _damaged(path, error) from error
    if labels is not None and len(labels) != len(images):
        raise _wrong(path, "one label per image", f"{len(labels)} labels for {len(images)} images")
    return fit_images(images, fit), labels


def _count_npz(paths: Sequence[Path]) -> int:
    """Images of an `.npz` file, read off the array's header."""
    path = paths[0]
    try:
        with zipfile.ZipFile(path) as archive, archive.open("images.npy") as member:
            return _rows(member, archive.getinfo("images.npy").file_size)
    except _ARRAY_ERRORS as error:
        raise _damaged(path, error) from error


def _read_npy(paths: Sequence[Path], fit: Fit) -> Pictures:
    path = paths[0]
    try:
        images = _checked(np.load(path, allow_pickle=False), path)
    except _ARRAY_ERRORS as error:
        if isinstance(error, ArtefactError):
            raise
        raise _damaged(path, error) from error
    return fit_images(images, fit), None


def _count_npy(paths: Sequence[Path]) -> int:
    try:
        with paths[0].open("rb") as handle:
            return _rows(handle, paths[0].stat().st_size)
    except _ARRAY_ERRORS as error:
        raise _damaged(paths[0], error) from error


def _rows(handle: Any, size: int) -> int:
    """Length of the array whose header `handle` starts with and that takes `size` bytes in all."""
    version = np.lib.format.read_magic(handle)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(handle)
    if len(shape) != 4 or handle.tell() + math.prod(shape) * dtype.itemsize != size:
        raise ValueError(f"an array of shape {shape} in {size:,} bytes")
    return int(shape[0])


def _checked(images: npt.NDArray[Any], path: Path) -> npt.NDArray[np.uint8]:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[-1] != 3 or not images.size:
        raise _wrong(path, "uint8 images of shape (N, H, W, 3)", f"{images.dtype} {images.shape}")
    return images


def _read_python_batches(paths: Sequence[Path], fit: Fit) -> Pictures:
    batches = [read_batch(path) for path in paths]
    return np.concatenate([images for images, _ in batches]), np.concatenate([labels for _, labels in batches])


def _count_python_batches(paths: Sequence[Path]) -> int:
    return sum(len(read_batch(path)[1]) for path in paths)


def _binary(label_bytes: int) -> Format:
    """CIFAR's binary batches: per image `label_bytes` bytes, the last of which is the label, and 3,072 of pixels."""
    record = label_bytes + _PIXELS

    def count(paths: Sequence[Path]) -> int:
        for path in paths:
            if path.stat().st_size % record or not path.stat().st_size:
                got = f"{path.stat().st_size:,} bytes"
                raise _wrong(path, f"records of {record:,} bytes (is it damaged?)", got)
        return sum(path.stat().st_size // record for path in paths)

    def read(paths: Sequence[Path], fit: Fit) -> Pictures:
        count(paths)
        rows = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, record) for path in paths])
        images = rows[:, label_bytes:].reshape(-1, 3, SIZE, SIZE).transpose(0, 2, 3, 1)
        return images, rows[:, label_bytes - 1].astype(np.int64)

    return Format("binary batches", read, count)


def _scipy_io() -> Any:
    try:
        import scipy.io
    except ImportError:
        raise MissingExtraError(
            "Reading SVHN's .mat files needs the 'scipy' package. Install it with `pip install neuralmean[bench]`."
        ) from None
    return scipy.io


def _read_svhn(paths: Sequence[Path], fit: Fit) -> Pictures:
    """Images `X` (32, 32, 3, N) and labels `y` of a MATLAB 5 file; SVHN's label 10 is the digit 0."""
    path, io = paths[0], _scipy_io()
    try:
        held = io.loadmat(path, variable_names=["X", "y"])
        images, labels = held["X"].transpose(3, 0, 1, 2), held["y"].reshape(-1).astype(np.int64) % 10
    except Exception as error:  # scipy raises whatever the parser stumbles on
        raise _damaged(path, error) from error
    images = _checked(images, path)
    if len(labels) != len(images):
        raise _wrong(path, "one label per image", f"{len(labels)} labels for {len(images)} images")
    return fit_images(images, fit), labels


def _count_svhn(paths: Sequence[Path]) -> int:
    path, io = paths[0], _scipy_io()
    try:
        shapes = {name: shape for name, shape, _ in io.whosmat(path)}
        return int(shapes["X"][3])
    except Exception as error:  # likewise
        raise _damaged(path, error) from error


def _read_folder(paths: Sequence[Path], fit: Fit) -> Pictures:
    """All pictures under a folder, by path; labels are its subfolders, where there are two or more."""
    folder = paths[0]
    files = list_pictures(folder)
    if not files:
        raise _wrong(folder, f"pictures ({', '.join(sorted(SUFFIXES))})", "none")
    images = np.empty((len(files), SIZE, SIZE, 3), np.uint8)
    for row, file in enumerate(files):
        images[row] = _read_picture(file, fit)
    return images, _labels(folder, files)


def _read_picture(path: Path, fit: Fit) -> npt.NDArray[np.uint8]:
    try:
        with Image.open(path) as image:
            return fit_image(image, fit)
    except _PICTURE_ERRORS as error:
        raise _damaged(path, error) from error


def _labels(folder: Path, files: Sequence[Path]) -> npt.NDArray[np.int64] | None:
    parts = [file.relative_to(folder).parts for file in files]
    if any(len(part) < 2 for part in parts):
        return None
    classes = sorted({part[0] for part in parts}, key=_natural)
    if len(classes) < 2:
        return None
    index = {name: row for row, name in enumerate(classes)}
    return np.array([index[part[0]] for part in parts], np.int64)


def _natural(text: str) -> list[tuple[int, str]]:
    """Sort key that puts `9` before `10`."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.split(r"(\d+)", text)]


def list_pictures(folder: Path) -> list[Path]:
    """Pictures under a folder, at any depth, sorted by path; hidden files and folders are left out."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(parent, name) for name in names if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
        ]
    return sorted(found, key=lambda path: _natural(path.relative_to(folder).as_posix()))


def _count_folder(paths: Sequence[Path]) -> int:
    return len(list_pictures(paths[0]))


def _read_sheets(paths: Sequence[Path], fit: Fit) -> Pictures:
    """Sheets of 32 x 32 tiles beside a `set.json` with the count, the labels and the SHA-256 of the pixels."""
    about = _about(paths[0])
    tiles = []
    for path in sorted(paths[0].parent.glob("*.webp")):
        try:
            with Image.open(path) as sheet:
                pixels = np.asarray(sheet.convert("RGB"))
            grid = pixels.reshape(pixels.shape[0] // SIZE, SIZE, pixels.shape[1] // SIZE, SIZE, 3)
        except _PICTURE_ERRORS as error:
            raise _damaged(path, error) from error
        tiles.append(grid.transpose(0, 2, 1, 3, 4).reshape(-1, SIZE, SIZE, 3))
    images = np.concatenate(tiles)[: about["count"]] if tiles else np.empty((0, SIZE, SIZE, 3), np.uint8)
    if hashlib.sha256(images.tobytes()).hexdigest() != about["sha256"]:
        raise _wrong(paths[0].parent, "the pixels that its set.json names by their SHA-256", "others")
    labels = np.asarray(about["labels"], np.int64) if "labels" in about else None
    return images, labels


def _count_sheets(paths: Sequence[Path]) -> int:
    return int(_about(paths[0])["count"])


def _about(path: Path) -> dict[str, Any]:
    try:
        about = json.loads(path.read_text("utf-8"))
        if not isinstance(about["count"], int) or not isinstance(about["sha256"], str):
            raise TypeError("`count` or `sha256` is of another type")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    return dict(about)


def _wrong(path: Path, expected: str, got: str) -> ArtefactError:
    return ArtefactError(f"Expected {path.name} to hold {expected}, but got {got}. Check the file, or get it anew.")


def _damaged(path: Path, error: BaseException) -> ArtefactError:
    reason = f"{type(error).__name__}: {error}"
    return ArtefactError(
        f"Expected {path.name} to be readable, but it is damaged ({reason}). Remove it and get it anew."
    )


NPZ = Format("npz", _read_npz, _count_npz)
NPY = Format("npy", _read_npy, _count_npy)
PYTHON_BATCHES = Format("python batches", _read_python_batches, _count_python_batches)
CIFAR10_BINARY = _binary(1)
CIFAR100_BINARY = _binary(2)
SVHN_MAT = Format("mat", _read_svhn, _count_svhn)
FOLDER = Format("folder", _read_folder, _count_folder)
SHEETS = Format("sheets", _read_sheets, _count_sheets)
