"""Tells whether a model still has the weights it had."""

from __future__ import annotations

import hashlib
import operator
from itertools import chain, compress
from typing import Any

from torch import Tensor, nn

from neuralmean.errors import ModelMismatchError
from neuralmean.files.artefact import add_tensor
from neuralmean.models.layers import unwrap

_version = operator.attrgetter("_version")
_values_of = operator.methodcaller("values")  # a scripted module has something else than dicts


def fingerprint(model: nn.Module) -> str:
    """Return a digest of every parameter and buffer of `model`: names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, value in sorted(unwrap(model).state_dict().items()):
        if isinstance(value, Tensor):
            add_tensor(digest, name, value)
    return digest.hexdigest()


class WeightsGuard:
    """Notices when the weights of a model change.

    Asking costs microseconds as long as nothing was written to the weights: the digest is taken again only when a
    tensor was replaced, moved or changed in place. (Writing through `.data` hides a change from torch, and so from us; so
    does an optimizer with `fused=True` on a model without batch norms.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._core = unwrap(model)
        self.digest = fingerprint(model)
        self._remember()

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies and other processes. A copy looks at the weights once before it takes them for what they were.
        return WeightsGuard, (self._core,), {"digest": self.digest, "_mark": None}

    def check(self) -> None:
        """Raise if the weights are not what they were."""
        found = self._values()
        if not any(self._empty) and self._are_held(found) and self._mark_of(found) == self._mark:
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
        # A batch norm in training mode writes its running mean without telling torch: only its counter of batches shows it.
        self._are_watched = [isinstance(value, Tensor) for value in self._held]
        # A tensor of inference mode has no version.
        pairs = zip(self._held, self._are_watched, strict=True)
        self._are_counted = [watched and not value.is_inference() for value, watched in pairs]
        self._mark: int | None = self._mark_of(self._held)

    # What follows runs with every forward pass, and so without a line of Python for each tensor.
    def _values(self) -> list[Any]:
        return list(chain.from_iterable(map(_values_of, self._stores)))

    def _are_held(self, found: list[Any]) -> bool:
        try:
            return found == self._held  # the same object is equal without being asked
        except Exception:  # another tensor, which answers with a tensor  # noqa: BLE001
            return False

    def _mark_of(self, values: list[Any]) -> int:
        """Return a number for where the tensors are and how often each was written to."""
        places = map(Tensor.data_ptr, compress(values, self._are_watched))
        return hash((*places, *map(_version, compress(values, self._are_counted))))
