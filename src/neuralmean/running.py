"""How a model is run: in evaluation mode, where its weights are, compiled or not, and what its errors mean."""

from __future__ import annotations

import copy
import operator
import threading
import weakref
from collections.abc import Iterable

import torch
from torch import nn

from neuralmean.layers import WRAPPERS

_training = operator.attrgetter("training")
_eval_lock = threading.Lock()
_eval_users: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = weakref.WeakKeyDictionary()


class evaluating:  # noqa: N801 - reads as what it does; a generator would take twice as long
    """Keep `core` in evaluation mode inside the block; the last of several threads to leave puts the flags back."""

    __slots__ = ("_changed", "_core", "_modules")

    def __init__(self, core: nn.Module, modules: Iterable[nn.Module]) -> None:
        self._core, self._modules = core, modules
        self._changed = False  # else there is nothing to put back

    def __enter__(self) -> None:
        with _eval_lock:
            users, training = _eval_users.get(self._core, (0, []))
            if users == 0 and any(map(_training, self._modules)):
                training = [module for module in self._modules if module.training]
                for module in training:
                    module.training = False
            if users > 0 or training:
                self._changed = True
                _eval_users[self._core] = (users + 1, training)

    def __exit__(self, *_: object) -> None:
        if not self._changed:
            return
        with _eval_lock:
            users, training = _eval_users[self._core]
            if users == 1:
                del _eval_users[self._core]
                for module in training:
                    module.training = True
            else:
                _eval_users[self._core] = (users - 1, training)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose modules, and so hooks and flags, are its own and whose tensors are the model's.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> other = shared_copy(model)
        >>> other is model, other.weight is model.weight
        (False, True)
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return where the first parameter or buffer of these modules is."""
    for module in modules:
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                return tensor.device
    return torch.device("cpu")


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` was applied to `model`."""
    while isinstance(model, WRAPPERS):
        model = model.module
    return "_orig_mod" in model._modules or model._compiled_call_impl is not None


def is_shape_error(error: RuntimeError) -> bool:
    """Whether a model raised because its input has the wrong shape or type."""
    signs = (
        "channels",
        "shapes cannot be multiplied",
        "size",
        "dimension",
        "same dtype",
        "should be the same",
        "shape",
        "4D",
        "scalar type",
    )
    return type(error) is RuntimeError and any(sign in str(error) for sign in signs)
