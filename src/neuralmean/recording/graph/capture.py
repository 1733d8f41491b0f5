"""Captures a forward pass as a graph by `torch.export`, for `freeze`, `.pt2` and ONNX.

`torch.export` rejects most computations that depend on values. The rest is rejected here: numbers and sizes computed
from values, writes to buffers or inputs, and graphs that depend on whether gradients are recorded.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuralmean.errors import InputError
from neuralmean.recording.graph.compiled import check_wanted
from neuralmean.recording.graph.split_means import split_means

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def capture(module: nn.Module, inputs: Sequence[Tensor], *, any_size: bool) -> ExportedProgram:
    """Export a module of tensors as a program.

    Args:
        module: The module, in evaluation mode; its `forward` takes `*inputs`.
        inputs: Example inputs, with the batch as first dimension.
        any_size: Whether the program takes batches of any size from two on, or only of the size of `inputs`.

    Raises:
        InputError: The graph depends on values, sizes or calls; the message is the reason.
    """
    with torch.enable_grad():
        other = _export(module, inputs, any_size=any_size)
    with torch.no_grad():
        program = _export(module, inputs, any_size=any_size)
    if str(program.graph) != str(other.graph):
        raise InputError("its graph depends on whether gradients are recorded")
    split_means(program.graph)
    program.graph.eliminate_dead_code()
    return program


def _export(module: nn.Module, inputs: Sequence[Tensor], *, any_size: bool) -> ExportedProgram:
    check_wanted()
    size = len(inputs[0])
    rows = torch.export.Dim("batch")
    shapes = tuple({0: rows} if any_size and value.dim() and len(value) == size else {} for value in inputs)
    reason = ""
    for strict in (False, True):  # strict mode traces `len(x)`, which the other mode treats as a constant
        try:
            with _silent():
                program: ExportedProgram = torch.export.export(
                    module, tuple(inputs), dynamic_shapes=(shapes,), strict=strict
                )
                program = program.run_decompositions({})
        except Exception as error:  # noqa: BLE001 - torch has many kinds of them
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            reason = reason or re.sub(r" \((unhinted|Size-like).*", "", said).strip().rstrip(".")[:200]
            continue
        _check(program)
        return program
    raise InputError(f"torch.export cannot follow it ({reason})")


def _check(program: ExportedProgram) -> None:
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    signature = program.graph_signature
    if signature.buffers_to_mutate:
        raise InputError(f"a pass writes to {sorted(signature.buffers_to_mutate.values())[0]!r}")
    if signature.user_inputs_to_mutate:
        raise InputError("it writes to its input")
    for node in program.graph.nodes:
        if free_unbacked_symbols(node.meta.get("val")):
            raise InputError(f"it computes numbers or sizes from values ({node.name})")


class _Muted:
    """Standard error without the output of one thread."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _silent() -> Generator[None]:
    """Keep torch.export from printing the whole rejected graph, and from warnings about its own deprecations."""
    log, stream = logging.getLogger("torch.fx.experimental.symbolic_shapes"), sys.stderr
    before = log.disabled
    log.disabled, sys.stderr = True, _Muted(stream)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled, sys.stderr = before, stream
