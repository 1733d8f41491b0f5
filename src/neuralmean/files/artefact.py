"""The saved file: safetensors with a JSON header and a digest over all of it. No pickle, no code.

Nothing read is trusted: sizes are bounded, the digest is checked before anything is used, and any defect raises
`ArtefactError`. The reader is our own, as that of safetensors holds three copies in memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors.torch import save as save_tensors
from torch import Tensor

from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.atomic import write_atomically

FORMAT_VERSION = 1
MAX_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 4 * 2**20
MAX_PARTS = 100_000  # lists, objects and names in the header: a few bytes each there, hundreds in Python
_KEY = "neuralmean"
_DTYPES = {"F32": torch.float32, "F64": torch.float64, "I32": torch.int32, "I64": torch.int64}


@dataclass(frozen=True)
class Artefact:
    """The content of a saved detector: named tensors, and a header of JSON values that describes them."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, path: str | Path) -> None:
        """Write the file atomically."""
        try:
            # As it will be read, since JSON turns keys into strings and may reorder them.
            header = json.loads(json.dumps({**self.header, "format_version": FORMAT_VERSION}))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"Expected `info` to hold nothing but JSON values, but it does not ({error}).") from None
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        header["digest"] = _digest(header, tensors)
        content = save_tensors(tensors, {_KEY: json.dumps(header, sort_keys=True)})
        (length,) = struct.unpack("<Q", content[:8])
        n_parts = sum(content.count(mark, 8, 8 + length) for mark in (b"[", b"{", b":"))
        if len(content) > MAX_BYTES or length > MAX_HEADER_BYTES or n_parts > MAX_PARTS:
            raise InputError(
                f"Expected at most {MAX_BYTES >> 20} MiB to save, {MAX_HEADER_BYTES >> 20} of them names and `info` with "
                f"{MAX_PARTS:,} parts, but got {len(content) / 2**20:.0f} MiB, {length / 2**20:.1f} and {n_parts:,}. Watch fewer "
                "layers, choose another scorer or keep less in `info`."
            )
        with write_atomically(path) as file:
            file.write(content)

    @classmethod
    def read(cls, path: str | Path) -> Artefact:
        """Read and check the file at `path`.

        Raises:
            ArtefactError: The file is missing, damaged, truncated, of a newer format or not a saved detector.
        """
        name = str(path)
        try:
            with _open_regular(Path(path)) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_BYTES:
                    raise ArtefactError(
                        f"Expected {name!r} to be at most {MAX_BYTES >> 20} MiB, but it is larger. It is not a saved detector."
                    )
                entries, header, start = _read_header(file, size, name)
                _check_version(header, name)
                tensors = _read_tensors(file, entries, size - start, name)
        except (OSError, ValueError) as error:
            if isinstance(error, ArtefactError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise ArtefactError(f"Expected to read a saved detector from {name[:300]!r}, but {reason}.") from None
        if header.get("digest") != _digest({k: v for k, v in header.items() if k != "digest"}, tensors):
            raise ArtefactError(
                f"Expected {name!r} to match its digest, but it does not: it was damaged or changed. Fit again."
            )
        return cls(header, tensors)


def add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """Add a tensor to a digest: its name, type, shape and values."""
    data = tensor.detach().cpu().contiguous()
    digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
    digest.update(_bytes(data))


def _bytes(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor."""
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a single number may have any stride
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 1.26's stubs do not say so


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def _open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; a pipe or a device, which could block, is an error."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(descriptor, "rb") if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if file is None:
        kind = "a folder" if path.is_dir() else "a pipe or a device"
        os.close(descriptor)
        raise ArtefactError(f"Expected {str(path)!r} to be a saved detector, but it is {kind}.")
    return file


def _read_header(file: BinaryIO, size: int, path: str) -> tuple[dict[str, Any], dict[str, Any], int]:
    """Return the entries of the tensors, our header, and where the data begins."""
    broken = f"Expected {path!r} to be a file that `Detector.save` wrote, but it is not one, or it is truncated."
    first = file.read(8)
    length = struct.unpack("<Q", first)[0] if len(first) == 8 else size
    if length > min(MAX_HEADER_BYTES, size - 8):
        raise ArtefactError(broken)
    text = file.read(length)
    if sum(map(text.count, (b"[", b"{", b":"))) > MAX_PARTS:
        raise ArtefactError(broken)
    try:
        entries = json.loads(text)
        header = json.loads(entries.pop("__metadata__")[_KEY])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ArtefactError(broken) from None
    if not isinstance(header, dict):
        raise ArtefactError(broken)
    return entries, header, 8 + length


def _check_version(header: dict[str, Any], path: str) -> None:
    version = header.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ArtefactError(
            f"Expected {path!r} to state its format version, but it states {str(version)[:40]!r}. It is damaged."
        )
    if version > FORMAT_VERSION:
        raise ArtefactError(
            f"Expected {path!r} to have format version {FORMAT_VERSION} or older, but it has {version}. "
            "Upgrade neuralmean to read it."
        )


def _read_tensors(file: BinaryIO, entries: dict[str, Any], size: int, path: str) -> dict[str, Tensor]:
    """Return the tensors, each read into its own memory, so that a file needs no more memory than its size."""
    planned = _plan(entries, size)
    if planned is None:
        raise ArtefactError(
            f"Expected {path!r} to hold tensors, but they cannot be read: it is truncated or damaged. Fit again."
        )
    tensors = {}
    for name, dtype, shape in planned:
        tensors[name] = torch.empty(shape, dtype=dtype)
        if tensors[name].numel() and file.readinto(_bytes(tensors[name])) != tensors[name].nbytes:  # type: ignore[attr-defined]
            raise ArtefactError(f"Expected {path!r} not to change while it is read, but it became shorter. Try again.")
    return tensors


def _plan(entries: dict[str, Any], size: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]] | None:
    """Return name, type and shape of each tensor in the order of the file; None if they do not fill it exactly."""
    planned, end = [], 0
    try:
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            is_shape = len(shape) <= 8 and all(type(side) is int and 0 <= side <= MAX_BYTES for side in shape)
            begin, stop = entry["data_offsets"]
            if not is_shape or begin != end or stop != end + math.prod(shape) * dtype.itemsize or stop > size:
                return None
            planned.append((name, dtype, shape))
            end = stop
    except (KeyError, TypeError, ValueError):
        return None
    return planned if end == size else None
