"""Readers of image formats: arrays, CIFAR's batches, SVHN's `.mat`, folders of pictures.

A reader takes paths and returns images (N, 32, 32, 3) with labels, if there are any. Each reader comes with a counter
that reads only headers or names. A file that cannot be read raises `ArtefactError`.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import tempfile
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
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import ArtefactError, MissingExtraError

Resizing = Fit | Preprocessing
Pictures = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64] | None]
SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".ppm", ".webp", ".gif", ".tif", ".tiff"})
_PIXELS = SIZE * SIZE * 3
MOST_PICTURES = 50_000  # of one split; of more, a random subset is read
MOST_IN_MEMORY = 1 << 31  # bytes
# Raised by numpy, zipfile and Pillow on damaged or hostile files; a header may also claim more than fits in memory.
_ARRAY_ERRORS = (ValueError, OSError, EOFError, KeyError, MemoryError, zipfile.BadZipFile, zlib.error)
_PICTURE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, MemoryError, Image.DecompressionBombError)


@dataclass(frozen=True)
class Format:
    """One format of images on disk: its display name, its reader and its counter."""

    label: str
    read: Callable[[Sequence[Path], Resizing], Pictures]
    count: Callable[[Sequence[Path]], int]


def _read_npz(paths: Sequence[Path], fit: Resizing) -> Pictures:
    """Images and labels, if any, of an `.npz` file."""
    path = paths[0]
    try:
        # Opened here, as numpy leaves files open that are not archives.
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
    """Number of images of an `.npz` file, from the array's header."""
    path = paths[0]
    try:
        with zipfile.ZipFile(path) as archive, archive.open("images.npy") as member:
            return _rows(member, archive.getinfo("images.npy").file_size)
    except _ARRAY_ERRORS as error:
        raise _damaged(path, error) from error


def _read_npy(paths: Sequence[Path], fit: Resizing) -> Pictures:
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
    """Length of the array in a stream of `size` bytes that starts with its header."""
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


def _read_python_batches(paths: Sequence[Path], fit: Resizing) -> Pictures:
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

    def read(paths: Sequence[Path], fit: Resizing) -> Pictures:
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


def _read_svhn(paths: Sequence[Path], fit: Resizing) -> Pictures:
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


def _read_folder(paths: Sequence[Path], fit: Resizing) -> Pictures:
    """All pictures in a folder, sorted by path; with two or more subfolders, these are the labels."""
    folder = paths[0]
    files = list_pictures(folder)
    if not files:
        raise _wrong(folder, f"pictures ({', '.join(sorted(SUFFIXES))})", "none")
    kept, labels = _draw(files), _labels(folder, files)
    return _read_pictures([files[row] for row in kept], fit), None if labels is None else labels[kept]


def _read_pictures(files: Sequence[Path], fit: Resizing) -> npt.NDArray[np.uint8]:
    first = _read_picture(files[0], fit)
    images = _room((len(files), *first.shape))
    for row, file in enumerate(files):
        picture = _read_picture(file, fit)
        if picture.shape != first.shape:
            expected, got = (f"{shape[1]} x {shape[0]} pixels" for shape in (first.shape, picture.shape))
            raise _wrong(file, f"{expected} like the other pictures of its set", got)
        images[row] = picture
    return images


def _room(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Return an empty array, in memory or, if it is large, in a temporary file that is deleted with it."""
    if math.prod(shape) <= MOST_IN_MEMORY:
        return np.empty(shape, np.uint8)
    with tempfile.TemporaryFile() as handle:  # the map keeps the unlinked file alive
        return np.memmap(handle, np.uint8, "w+", shape=shape)


def _read_image_list(paths: Sequence[Path], fit: Resizing) -> Pictures:
    """Pictures named by a list of OpenOOD, one `folder/file.jpg label` per line."""
    files, labels = _image_list(paths[0])
    return _read_pictures(files, fit), labels


def _image_list(path: Path) -> tuple[list[Path], npt.NDArray[np.int64] | None]:
    """Return the pictures of a list and their labels; None for OOD sets, whose labels are -1."""
    root = path.parent.parent.parent  # DATA/benchmark_imglist/imagenet/test_ninco.txt
    bases = [folder for name in ("images_largescale", "images_classic", ".") if (folder := root / name).is_dir()]
    files, labels = [], []
    for line in path.read_text("utf-8").splitlines():
        name, _, label = line.strip().rpartition(" ")
        found = next((base / name for base in bases if name and (base / name).is_file()), None)
        if found is None or not label.lstrip("-").isdecimal():
            raise _wrong(path, "lines `FILE LABEL` of pictures that exist", repr(line))
        files.append(found)
        labels.append(int(label))
    if not files:
        raise _wrong(path, "lines `FILE LABEL`", "an empty file")
    kept = _draw(files)
    return [files[row] for row in kept], None if min(labels) < 0 else np.array(labels, np.int64)[kept]


def _count_image_list(paths: Sequence[Path]) -> int:
    return len(paths[0].read_text("utf-8").splitlines())


def _draw(files: Sequence[Path]) -> npt.NDArray[np.int64]:
    """Return the rows to read: all, or a fixed draw if there are too many (ImageNet's train split)."""
    if len(files) <= MOST_PICTURES:
        return np.arange(len(files))
    return np.sort(np.random.default_rng(0).permutation(len(files))[:MOST_PICTURES])


def _read_named_pictures(paths: Sequence[Path], fit: Resizing) -> Pictures:
    """Pictures of a folder whose names end in their label: `12.webp` or `0003_12.webp`."""
    files = list_pictures(paths[0])
    labels = [file.stem.rpartition("_")[2] for file in files]
    if not files or not all(label.isdecimal() for label in labels):
        raise _wrong(paths[0], "pictures named LABEL or NUMBER_LABEL", f"{files[0].name if files else 'none'}")
    return _read_pictures(files, fit), np.array(labels, np.int64)


def _read_idx(paths: Sequence[Path], fit: Resizing) -> Pictures:
    """Images and labels in the IDX files of MNIST, plain or gzipped, converted from grey to RGB."""
    arrays = [_idx(path) for path in paths]
    images, labels = arrays[0], arrays[1].astype(np.int64)
    if images.ndim != 3 or labels.shape != (len(images),):
        raise _wrong(paths[0], "grey images and one label each", f"{images.shape} and {labels.shape}")
    return fit_images(np.repeat(images[..., None], 3, axis=3), fit), labels


def _idx(path: Path) -> npt.NDArray[np.uint8]:
    """Return the array of an IDX file: two zero bytes, 8 for uint8, the number of axes, each length, the values."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if content[:3] != b"\0\0\x08" or not 1 <= content[3] <= 4:
            raise ValueError("the file has no IDX header")
        start = 4 + 4 * content[3]
        shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
        return np.frombuffer(content[start:], np.uint8).reshape(shape)
    except (*_ARRAY_ERRORS, IndexError) as error:
        raise _damaged(path, error) from error


def _count_idx(paths: Sequence[Path]) -> int:
    return len(_idx(paths[1]))


def _read_picture(path: Path, fit: Resizing) -> npt.NDArray[np.uint8]:
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
    """Pictures in a folder, at any depth, sorted by path, without hidden files and folders."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [
            Path(parent, name) for name in names if Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")
        ]
    return sorted(found, key=lambda path: _natural(path.relative_to(folder).as_posix()))


def _count_folder(paths: Sequence[Path]) -> int:
    return len(list_pictures(paths[0]))


def _read_sheets(paths: Sequence[Path], fit: Resizing) -> Pictures:
    """Sheets of 32 x 32 tiles with a `set.json` of the count, the labels and the SHA-256 of the pixels."""
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
    return ArtefactError(
        f"Expected {path.name} to hold {expected}, but got {got}. Check the file, or download it again."
    )


def _damaged(path: Path, error: BaseException) -> ArtefactError:
    reason = f"{type(error).__name__}: {error}"
    return ArtefactError(
        f"Expected {path.name} to be readable, but it is damaged ({reason}). Remove it and download it again."
    )


NPZ = Format("npz", _read_npz, _count_npz)
NPY = Format("npy", _read_npy, _count_npy)
PYTHON_BATCHES = Format("python batches", _read_python_batches, _count_python_batches)
CIFAR10_BINARY = _binary(1)
CIFAR100_BINARY = _binary(2)
SVHN_MAT = Format("mat", _read_svhn, _count_svhn)
FOLDER = Format("folder", _read_folder, _count_folder)
SHEETS = Format("sheets", _read_sheets, _count_sheets)
NAMED_PICTURES = Format("folder, labels in names", _read_named_pictures, _count_folder)
IMAGE_LIST = Format("list of pictures", _read_image_list, _count_image_list)
IDX = Format("idx", _read_idx, _count_idx)
