"""One capture of a forward pass as a graph: `torch.export`, and what must not be taken for a fixed graph.

`torch.export` refuses most of what depends on values. What it lets through is looked for here: numbers and sizes made of
values, state that a pass changes, and another result where gradients are recorded. Nothing here compiles or runs a graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuralmean.errors import InputError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_PLAIN = (int, float, complex, str, bytes, type(None))
_DEEPEST = 4  # containers and objects in each other


def capture(module: nn.Module, inputs: Sequence[Tensor], *, any_size: bool) -> ExportedProgram:
    """Return a module of tensors as an exported program.

    Args:
        module: What to capture, in evaluation mode.
        inputs: Its inputs, which have the batch in front.
        any_size: Whether the program takes batches of any size from two on; else only of the size of `inputs`.

    Raises:
        InputError: The module is not the same graph for all values, sizes and calls; the message is the reason.
    """
    program = _export(module, inputs, any_size=any_size)
    with torch.enable_grad():
        other = _export(module, inputs, any_size=any_size)
    if str(program.graph) != str(other.graph):
        raise InputError("what it does depends on whether gradients are recorded")
    return program


def _export(module: nn.Module, inputs: Sequence[Tensor], *, any_size: bool) -> ExportedProgram:
    size = len(inputs[0])
    rows = torch.export.Dim("batch")
    shapes = tuple({0: rows} if any_size and value.dim() and len(value) == size else {} for value in inputs)
    reason = ""
    for strict in (False, True):  # the strict way follows `len(x)`, which the other takes for a constant
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch.export warns of its own deprecations
                program: ExportedProgram = torch.export.export(
                    module, tuple(inputs), dynamic_shapes={"inputs": shapes}, strict=strict
                )
                program = program.run_decompositions({})
        except Exception as error:  # noqa: BLE001 - torch has many kinds of them
            reason = reason or (str(error).strip().splitlines() or [type(error).__name__])[0]
            continue
        _check(program)
        return program
    raise InputError(f"torch.export cannot follow it ({reason.rstrip('.')[:200]})")


def _check(program: ExportedProgram) -> None:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    signature = program.graph_signature
    if signature.buffers_to_mutate:
        raise InputError(f"a pass writes to {sorted(signature.buffers_to_mutate.values())[0]!r}")
    if signature.user_inputs_to_mutate:
        raise InputError("it writes to its input")
    for node in program.graph.nodes:
        if free_unbacked_symbols(node.meta.get("val")):
            raise InputError(f"it makes numbers or sizes of values ({node.name})")


def state_of(model: nn.Module) -> list[Any]:
    """Return what a pass may change besides tensors it returns: attributes of modules, of their classes, and globals.

    Two states that are equal mean that nothing was changed in between, as far as this can be seen.
    """
    return list(_states(model))


def _states(model: nn.Module) -> Iterator[Any]:
    seen: set[type] = set()
    for name, module in model.named_modules():
        skipped = ("_modules", "_parameters", "_buffers")
        own = {key: value for key, value in vars(module).items() if key not in skipped}
        yield name, _freeze(own, 0)
        for tensors in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
            yield name, [(key, _freeze(tensor, 0)) for key, tensor in tensors]
        kind = type(module)
        if kind in seen or kind.__module__.partition(".")[0] == "torch":
            continue
        seen.add(kind)
        yield _freeze({key: value for key, value in vars(kind).items() if not callable(value)}, _DEEPEST - 1)
        known = getattr(kind.forward, "__globals__", {})
        yield _freeze({k: v for k, v in known.items() if isinstance(v, (*_PLAIN, list, dict, set))}, _DEEPEST - 1)


def _freeze(value: Any, depth: int) -> Any:
    """Return something that is equal as long as a value is unchanged."""
    if isinstance(value, _PLAIN):
        return type(value).__name__, repr(value)
    if isinstance(value, Tensor):
        return id(value), -1 if value.is_inference() else value._version
    if depth >= _DEEPEST:
        return id(value), len(value) if hasattr(value, "__len__") else None
    if isinstance(value, dict):
        return [(repr(key)[:80], _freeze(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [_freeze(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return len(value), sorted(map(repr, value))
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and not callable(value) and not isinstance(value, nn.Module):
        return id(value), _freeze(dict(inner), depth + 1)
    return id(value)
