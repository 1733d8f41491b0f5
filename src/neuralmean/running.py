"""How a model is run: in evaluation mode, where its weights are, compiled or not, and what its errors mean."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.layers import WRAPPERS

_training = operator.itemgetter("training")
_eval_lock = threading.Lock()
# Of models that threads are in, by id: how many threads, and what to put back.
_eval_users: dict[int, tuple[int, list[nn.Module]]] = {}


class Modules(list[nn.Module]):
    """Every module of a model, and whether that is still so. What is asked with every pass is a single line of Python."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__(core.modules())
        self.core = core
        stores: list[Mapping[str, nn.Module | None]] = [module._modules for module in self]
        self._leaves = [children for children in stores if not children]  # quicker to look at
        self._children = [children for children in stores if children]
        self._known = [dict(children) for children in self._children]
        self._tensors: list[dict[str, Any]] = [own for m in self for own in (m._parameters, m._buffers) if own]
        attributes = [vars(module) for module in self]
        self._flags = [own for own in attributes if "training" in own]  # a scripted module has it elsewhere
        self._others = [module for module, own in zip(self, attributes, strict=True) if "training" not in own]

    def are_all(self) -> bool:
        """Whether no module was added, replaced or removed."""
        return not any(self._leaves) and self._children == self._known

    def tensors(self) -> list[Tensor | None]:
        """Every parameter and buffer, as it is now."""
        return list(chain.from_iterable(map(dict.values, self._tensors)))

    def are_training(self) -> bool:
        """Whether any is in training mode."""
        return any(map(_training, self._flags)) or any(module.training for module in self._others)


class evaluating:  # noqa: N801 - reads as what it does; a generator would take twice as long
    """Keep a model in evaluation mode inside the block; the last of several threads to leave puts the flags back."""

    __slots__ = ("_changed", "_modules")

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._changed = False  # else there is nothing to put back

    def __enter__(self) -> None:
        modules = self._modules
        with _eval_lock:
            if not _eval_users and not modules.are_training():
                return
            users, training = _eval_users.get(id(modules.core), (0, []))
            if users == 0:
                training = [module for module in modules if module.training]
                for module in training:
                    module.training = False
            if training:
                self._changed = True
                _eval_users[id(modules.core)] = (users + 1, training)

    def __exit__(self, *_: object) -> None:
        if not self._changed:
            return
        with _eval_lock:
            key = id(self._modules.core)
            users, training = _eval_users.pop(key)
            if users > 1:
                _eval_users[key] = (users - 1, training)
            else:
                for module in training:
                    module.training = True


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
