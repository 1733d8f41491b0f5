"""Tells whether a model still has the weights it had."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from neuralmean.errors import ModelMismatchError
from neuralmean.layers import unwrap


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
        if self._state() == self._known:
            return
        if fingerprint(self._core) != self.digest:
            raise ModelMismatchError(
                "Expected the weights that the detector was made for, but the model's weights have changed since. "
                "Make a new Detector and `fit` it."
            )
        self._remember()

    def _remember(self) -> None:
        modules = list(self._core.modules())
        self._slots = [(store, key) for m in modules for store in (m._parameters, m._buffers) for key in store]
        self._children = [(m._modules, key) for m in modules for key in m._modules]
        self._known = self._state()

    def _state(self) -> list[object]:
        tensors = [store.get(key) for store, key in self._slots]
        return [*map(_mark, tensors), *(id(store.get(key)) for store, key in self._children)]


def _mark(tensor: Tensor | None) -> tuple[int, int] | None:
    if tensor is None:
        return None
    return (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
