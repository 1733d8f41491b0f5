"""Tells whether a model still has the weights it had."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.errors import ModelMismatchError
from neuralmean.layers import unwrap

_version = operator.attrgetter("_version")


def fingerprint(model: nn.Module) -> str:
    """Return a digest of every parameter and buffer of `model`: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(unwrap(model).state_dict().items()):
        if isinstance(value, Tensor):
            data = value.detach().cpu().contiguous()
            digest.update(f"{name}:{data.dtype}:{tuple(data.shape)};".encode())
            digest.update(data.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class WeightsWatch:
    """Notices when the weights of a model change.

    Asking costs microseconds as long as nothing was written to the weights: the digest is taken again only when a
    tensor was replaced, moved or changed in place. (Writing through `.data` hides a change from torch, and so from us.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._core = unwrap(model)
        self.digest = fingerprint(model)
        self._remember()

    def check(self) -> None:
        """Raise if the weights are not what they were."""
        if self._same_tensors() and self._marks() == self._known_marks:
            return
        if fingerprint(self._core) != self.digest:
            raise ModelMismatchError(
                "Expected the weights that the detector was made for, but the model's weights have changed since. "
                "Make a new Detector and `fit` it."
            )
        self._remember()

    def _remember(self) -> None:
        modules = list(self._core.modules())
        self._stores: list[dict[str, Any]] = [
            store for m in modules for store in (m._parameters, m._buffers, m._modules)
        ]
        self._held = list(self._values())
        tensors = [value for value in self._held if isinstance(value, Tensor)]
        self._counted = [tensor for tensor in tensors if not tensor.is_inference()]  # the others have no version
        self._tensors = tensors
        self._known_marks = self._marks()

    # Both run before every forward pass, and so without a line of Python for each tensor.
    def _values(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._stores))

    def _same_tensors(self) -> bool:
        found = list(self._values())
        return len(found) == len(self._held) and all(map(operator.is_, found, self._held))

    def _marks(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._tensors), *map(_version, self._counted)]
