"""The saved file: safetensors with a JSON header and a digest over all of it. No pickle, no code.

Reading trusts nothing: sizes are bounded, the digest is checked before anything is used, and whatever is wrong with a
file is an `ArtefactError` of one sentence.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.atomic import write_atomically

FORMAT_VERSION = 1
MAX_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 16 * 2**20
_KEY = "neuralmean"


@dataclass(frozen=True)
class Artefact:
    """The content of a saved detector: named tensors, and a header of JSON values that says what they are."""

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    def write(self, path: str | Path) -> None:
        """Write the file, whole or not at all."""
        try:
            # As it will be read: the keys of a dict are text then, and in another order.
            header = json.loads(json.dumps({**self.header, "format_version": FORMAT_VERSION}))
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(f"Expected `info` to hold nothing but JSON values, but it does not ({error}).") from None
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.tensors.items()}
        header["digest"] = _digest(header, tensors)
        content = save_tensors(tensors, {_KEY: json.dumps(header, sort_keys=True)})
        if len(content) > MAX_BYTES or struct.unpack("<Q", content[:8])[0] > MAX_HEADER_BYTES:
            raise InputError(
                f"Expected at most {MAX_BYTES >> 20} MiB to save, {MAX_HEADER_BYTES >> 20} of them names and `info`, but got "
                f"{len(content) / 2**20:.0f} MiB. Watch fewer layers, choose another scorer or keep less in `info`."
            )
        with write_atomically(path) as file:
            file.write(content)

    @classmethod
    def read(cls, path: str | Path) -> Artefact:
        """Read and check the file at `path`.

        Raises:
            ArtefactError: The file is missing, damaged, truncated, of a newer format or not one of ours.
        """
        content = _read_bounded(Path(path))
        header = _read_header(content, str(path))
        version = header.get("format_version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ArtefactError(
                f"Expected {str(path)!r} to say its format version, but it says {version!r}. It is damaged."
            )
        if version > FORMAT_VERSION:
            raise ArtefactError(
                f"Expected {str(path)!r} to have format version {FORMAT_VERSION} or older, but it has {version}. "
                "Upgrade neuralmean to read it."
            )
        try:
            # Copied to memory of their own: views into the file's bytes are not aligned as torch's tensors are.
            tensors = {name: tensor.clone() for name, tensor in load_tensors(content).items()}
        except (SafetensorError, ValueError, TypeError, KeyError, RuntimeError, OverflowError) as error:
            raise ArtefactError(
                f"Expected {str(path)!r} to hold tensors, but they cannot be read ({error}). It is damaged."
            ) from None
        if header.get("digest") != _digest({k: v for k, v in header.items() if k != "digest"}, tensors):
            raise ArtefactError(
                f"Expected {str(path)!r} to match its digest, but it does not: it was damaged or changed. Fit again."
            )
        return cls(header, tensors)


def add_tensor(digest: hashlib._Hash, name: str, tensor: Tensor) -> None:
    """Add a tensor to a digest: its name, type, shape and values."""
    data = tensor.detach().cpu().contiguous()
    digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
    flat = data.as_strided((data.numel(),), (1,))  # a single number may have any stride
    digest.update(flat.view(torch.uint8).numpy().tobytes())


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(tensors):
        add_tensor(digest, name, tensors[name])
    return digest.hexdigest()


def _read_bounded(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise ArtefactError(f"Expected {str(path)!r} to be a saved detector, but it is a folder.")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ArtefactError(
            f"Expected to read a saved detector from {str(path)!r}, but {error.strerror or error}."
        ) from None
    if len(content) > MAX_BYTES:
        raise ArtefactError(
            f"Expected {str(path)!r} to be at most {MAX_BYTES >> 20} MiB, but it is larger. It is not a saved detector."
        )
    return content


def _read_header(content: bytes, path: str) -> dict[str, Any]:
    """Return our header, after checking that the lengths in the file make sense."""
    broken = f"Expected {path!r} to be a file that `Detector.save` wrote, but it is not one, or it is truncated."
    if len(content) < 8:
        raise ArtefactError(broken)
    length = struct.unpack("<Q", content[:8])[0]
    if length > min(MAX_HEADER_BYTES, len(content) - 8):
        raise ArtefactError(broken)
    try:
        entries = json.loads(content[8 : 8 + length])
        header = json.loads(entries["__metadata__"][_KEY])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise ArtefactError(broken) from None
    ends = [entry["data_offsets"][1] for key, entry in entries.items() if key != "__metadata__" and _has_offsets(entry)]
    if not isinstance(header, dict) or max(ends, default=0) > len(content) - 8 - length:
        raise ArtefactError(broken)
    return header


def _has_offsets(entry: Any) -> bool:
    offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
    return isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(offset, int) for offset in offsets)
