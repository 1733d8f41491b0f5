"""Checks that a model is the same function in every pass, which its graph cannot show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from neuralmean.data.probes import are_close
from neuralmean.errors import InputError

_PLAIN = (int, float, complex, str, bytes, type(None))
_DEEPEST = 4  # nesting of containers and objects


def check_repeats(model: nn.Module, run: Callable[[], Any]) -> None:
    """Raise unless a model's passes change no state and do not depend on whether gradients are recorded.

    Args:
        model: The model.
        run: Runs one pass, always on the same input, and returns the model's output.

    Raises:
        InputError: The message is the reason.
    """
    with torch.no_grad():
        run()  # the first pass may set up caches
        before = list(_states(model))
        leaves = pytree.tree_flatten(run())[0]
        if list(_states(model)) != before:
            raise InputError("a pass changes what the model keeps in Python or in a buffer")
    for mode in (torch.enable_grad, torch.inference_mode):
        with mode():
            others = pytree.tree_flatten(run())[0]
        if len(others) != len(leaves) or not all(map(are_close, leaves, others)):
            raise InputError("its output differs from call to call, or depends on whether gradients are recorded")


def _states(model: nn.Module) -> Iterator[Any]:
    """Yield the state that a pass may change: attributes of modules and their classes, and globals."""
    seen: set[type] = set()
    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if key not in ("_modules", "_parameters", "_buffers")}
        yield name, _state(own, 0)
        for tensors in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            yield name, [(key, _state(tensor, 0)) for key, tensor in tensors]
        kind = type(module)
        if kind in seen or kind.__module__.partition(".")[0] == "torch":
            continue
        seen.add(kind)
        yield _state({key: value for key, value in vars(kind).items() if not callable(value)}, _DEEPEST - 1)
        known = getattr(kind.forward, "__globals__", {})
        yield _state({k: v for k, v in known.items() if isinstance(v, (*_PLAIN, list, dict, set))}, _DEEPEST - 1)


def _state(value: Any, depth: int) -> Any:
    """Return an object that compares equal as long as a value is unchanged."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if depth >= _DEEPEST:
        return id(value), len(value) if hasattr(value, "__len__") else None
    if isinstance(value, dict):
        return [(repr(key)[:80], _state(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_state(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return len(value), sorted(map(repr, value))
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and not callable(value) and not isinstance(value, nn.Module):
        return id(value), _state(dict(inner), depth + 1)
    return id(value)
