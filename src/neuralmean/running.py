"""How a model is run: in evaluation mode, where its weights are, compiled or not, and what its errors mean."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

_eval_lock = threading.Lock()
_eval_users: weakref.WeakKeyDictionary[nn.Module, tuple[int, list[nn.Module]]] = weakref.WeakKeyDictionary()


@contextmanager
def evaluating(core: nn.Module, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Keep `core` in evaluation mode inside the block; the last of several threads to leave puts the flags back."""
    with _eval_lock:
        users, training = _eval_users.get(core, (0, []))
        if users == 0:
            training = [module for module in modules if module.training]
            for module in training:
                module.training = False
        changed = users > 0 or bool(training)  # else there is nothing to put back
        if changed:
            _eval_users[core] = (users + 1, training)
    try:
        yield
    finally:
        if changed:
            _leave(core)


def _leave(core: nn.Module) -> None:
    with _eval_lock:
        users, training = _eval_users[core]
        if users == 1:
            del _eval_users[core]
            for module in training:
                module.training = True
        else:
            _eval_users[core] = (users - 1, training)


def shared_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model whose modules, and so hooks and flags, are its own and whose tensors are the model's.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> other = shared_copy(model)
        >>> other is model, other.weight is model.weight
        (False, True)
    """
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def device_of(core: nn.Module) -> torch.device:
    """Return where the first parameter or buffer is."""
    tensor = next((tensor for tensors in (core.parameters(), core.buffers()) for tensor in tensors), None)
    return torch.device("cpu") if tensor is None else tensor.device


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` was applied to `model`."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    return hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None


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
