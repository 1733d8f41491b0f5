"""Reads CIFAR's python batches without executing anything a pickle may contain.

A pickle is a program that may call anything it can name. CIFAR's batches name numpy's `_reconstruct`, `ndarray` and
`dtype`. Here these names resolve to minimal replacements that support plain arrays of bytes and integers; every other
name is rejected before anything is called. Numpy's own unpickling is never used.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from neuralmean.errors import ArtefactError

_DTYPES = {"u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8"}


class _Refused(pickle.UnpicklingError):
    """The pickle refers to a name that a batch of images does not need."""


class _Dtype:
    """Replacement for `numpy.dtype(code, align, copy)`."""

    def __init__(self, code: object, *flags: object) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        if text not in _DTYPES:
            raise _Refused(f"an array of type {text!r}")
        self.code = str(text)
        self.order = "<"

    def __setstate__(self, state: Any) -> None:
        order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
        if order not in ("<", ">", "|", "="):
            raise _Refused(f"an array of byte order {order!r}")
        self.order = order


class _Array:
    """Replacement for `numpy.ndarray`, set by `__setstate__((version, shape, dtype, fortran, bytes))`."""

    def __init__(self) -> None:
        self.array: npt.NDArray[Any] | None = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran, raw = state
        if not isinstance(dtype, _Dtype):
            raise _Refused("an array without a type")
        data = raw.encode("latin-1") if isinstance(raw, str) else raw
        flat = np.frombuffer(data, dtype=np.dtype(dtype.order + dtype.code))
        self.array = flat.reshape(shape, order="F" if fortran else "C")


def _reconstruct(*args: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str = "latin1") -> bytes:
    """Replacement for `_codecs.encode`, which old protocols of Python 3 use for bytes."""
    if encoding not in ("latin1", "latin-1"):
        raise _Refused(f"the encoding {encoding!r}")
    return text.encode("latin-1")


_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): _encode,
}


class _BatchUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of an allowed name."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None

    def persistent_load(self, pid: object) -> Any:
        """Reject references to objects outside the file."""
        raise _Refused(f"a persistent object {pid!r}")


def read_batch(path: Path) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one of CIFAR's python batches.

    Returns:
        Images (N, 32, 32, 3) and fine labels (N,).
    """
    try:
        with path.open("rb") as handle:
            content = _BatchUnpickler(handle, encoding="latin-1").load()
        if not isinstance(content, dict):
            raise TypeError(f"a {type(content).__name__} instead of a dict")
        fields = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in content.items()}
        labels = np.asarray(fields["labels" if "labels" in fields else "fine_labels"])
        pixels = fields["data"].array
        if pixels.dtype != np.uint8 or labels.dtype.kind != "i" or labels.shape != (len(pixels),):
            raise ValueError(f"{pixels.dtype} {pixels.shape} with labels {labels.dtype} {labels.shape}")
        images = pixels.reshape(len(pixels), 3, 32, 32).transpose(0, 2, 3, 1)
    except _Refused as error:
        raise ArtefactError(
            f"Expected {path.name} to hold nothing but arrays, but it refers to {error}. "
            "It is not CIFAR's own file and nothing of it was executed; download the set again."
        ) from None
    # A damaged pickle can raise almost anything.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ArtefactError(
            f"Expected {path.name} to be one of CIFAR's python batches, but it is damaged ({reason}). "
            "Remove it and download the set again."
        ) from error
    return images, labels.astype(np.int64)
