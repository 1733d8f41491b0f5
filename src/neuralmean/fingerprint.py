"""Tells whether a model still has the weights it had."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable
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
        found = self._values()
        if not any(self._empty) and self._are_held(found) and self._marks(found) == self._known_marks:
            return
        if fingerprint(self._core) != self.digest:
            raise ModelMismatchError(
                "Expected the weights that the detector was made for, but the model's weights have changed since. "
                "Make a new Detector and `fit` it."
            )
        self._remember()

    def _remember(self) -> None:
        modules = list(self._core.modules())
        stores: list[dict[str, Any]] = [store for m in modules for store in (m._parameters, m._buffers, m._modules)]
        self._stores = [store for store in stores if store]
        self._empty = [store for store in stores if not store]  # half of them, and quicker to look at
        self._held = self._values()
        # A batch norm that counts a batch changes its running mean too.
        names = [name for store in self._stores for name in store]
        places = [
            place
            for place, (name, value) in enumerate(zip(names, self._held, strict=True))
            if isinstance(value, Tensor) and name != "num_batches_tracked"
        ]
        self._tensors_of = _getter(places)
        # A tensor of inference mode has no version.
        self._counted_of = _getter([place for place in places if not self._held[place].is_inference()])
        self._known_marks = self._marks(self._held)

    # What follows runs with every forward pass, and so without a line of Python for each tensor.
    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._stores)))

    def _are_held(self, found: list[Any]) -> bool:
        try:
            return found == self._held  # the same object is equal without being asked
        except Exception:  # another tensor, which answers with a tensor  # noqa: BLE001
            return False

    def _marks(self, values: list[Any]) -> list[int]:
        return [*map(Tensor.data_ptr, self._tensors_of(values)), *map(_version, self._counted_of(values))]


def _getter(places: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Return what takes the items at these places out of a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda values: tuple(values[place] for place in places)
