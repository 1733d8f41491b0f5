"""Recorded passes without Python: the model and its reductions as one TorchScript graph, where that can be trusted.

A pass of a deep network with one image spends a third of its time in Python, and several passes at a time get in each other's
way there, as one thread at a time may run Python. A graph has neither trouble. A model is only run as a graph if tracing it
raised no doubt (nothing depends on the values or shapes of a tensor) and if the graph gives the model's numbers on other inputs.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]

from neuralmean.channels import main_tensor
from neuralmean.data import Batch
from neuralmean.errors import InputError
from neuralmean.layers import unwrap
from neuralmean.observer import Observer, Rows
from neuralmean.recorder import RecordingModule
from neuralmean.recording import Exits
from neuralmean.running import device_of, is_compiled

_SIZES = (3, 2, 5)  # of the batches: one to trace with, two to compare with
_RELATIVE, _ABSOLUTE = 1e-4, 1e-5


class TracedObserver(Observer):
    """An observer that runs a graph where the inputs have the shape it was made for, and the model elsewhere.

    Args:
        observer: The observer of the model; its head has been looked for already.
        graph: What `trace` made.
        shape: Of one input.
    """

    def __init__(self, observer: Observer, graph: Any, shape: torch.Size) -> None:
        recorder = observer.recorder
        super().__init__(recorder.model, observer.layers, variance=recorder.variance, head=recorder.head)
        self._graph, self._shape = graph, shape

    def around(self, observer: Observer) -> TracedObserver:
        """Return the same for another observer of the same model, or of one that shares its tensors."""
        return TracedObserver(observer, self._graph, self._shape)

    def observe(self, batch: Batch, *, name: str = "x", exits: Exits | None = None) -> tuple[Any, Rows]:
        """Return the main tensor of the model's output for a batch and the rows of it; see `Observer.observe`."""
        x = batch.first
        fits = x.dtype is torch.float32 and x.shape[1:] == self._shape and x.device.type == "cpu"
        if not fits or exits is not None or len(batch.args) != 1 or batch.kwargs or x.requires_grad:
            return super().observe(batch, name=name, exits=exits)
        with torch.no_grad():
            output, rows = _read(self._graph(x))
        self._check_finite(rows.means, name)
        return output, rows


def trace(observer: Observer, example: Tensor, *, fold: bool = False) -> TracedObserver:
    """Return an observer that runs the model as a graph.

    Args:
        observer: The observer of the model.
        example: Inputs, shape (N, ...); only the shape of one counts.
        fold: Whether batch norms may be folded into the convolutions before them: faster, and the last digit may differ.

    Raises:
        InputError: The model cannot be a graph, or not safely.
    """
    core = unwrap(observer.recorder.model)
    wanted = f"Expected {type(core).__name__} to be a fixed graph of its input"
    if is_compiled(observer.recorder.model):
        raise InputError(f"{wanted}, but it is compiled already.")
    if device_of(core).type != "cpu" or example.dtype is not torch.float32:
        raise InputError(f"{wanted}, in float32 on the CPU, but got {example.dtype} for a model on {device_of(core)}.")
    generator = torch.Generator().manual_seed(0)
    first, *others = (torch.randn(size, *example.shape[1:], generator=generator) for size in _SIZES)
    try:
        with torch.no_grad():
            observer.observe(Batch((first,)))  # finds the head
            traced = TracedObserver(observer, _make_graph(observer, first, fold=fold), example.shape[1:])
            for x in others:
                _compare(observer.observe(Batch((x,))), traced.observe(Batch((x,))))
    except Exception as error:  # whatever a model or torch has against it
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0][:200].rstrip(".")
        raise InputError(f"{wanted}, but it is not: {reason}. It runs layer by layer as it is.") from error
    return traced


def _make_graph(observer: Observer, x: Tensor, *, fold: bool) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graph = torch.jit.freeze(torch.jit.trace(_Graph(observer, fold=fold), (x,), check_trace=False))  # type: ignore[no-untyped-call]
    doubts = [str(warning.message) for warning in caught if issubclass(warning.category, TracerWarning)]
    if doubts:  # something depends on a value or a shape
        raise InputError(doubts[0])
    return graph


class _Graph(nn.Module):
    """The model with its reductions as a function of one tensor to a fixed number of tensors."""

    def __init__(self, observer: Observer, *, fold: bool) -> None:
        super().__init__()
        recorder = observer.recorder
        self._module = RecordingModule(
            unwrap(recorder.model), recorder.layers, variance=recorder.variance, head=recorder.head, behind=fold
        )
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return output, means, variances, logits and feature; what is not recorded is empty."""
        output, (means, variances, calls, feature, logits) = self._module((x,), {}, None)
        main = main_tensor(output)
        if main is None or any(part is None for part in means) or set(calls) != {1}:
            raise InputError("its output holds no tensor, or a layer runs never or more than once")
        nothing = x.new_zeros(0)
        joined = nothing if variances[0] is None else torch.cat(variances, dim=1)
        optional = (nothing if tensor is None else tensor for tensor in (logits, feature))
        return (main, self._module.undo(torch.cat(means, dim=1)), joined, *optional)


def _read(parts: tuple[Tensor, ...]) -> tuple[Tensor, Rows]:
    output, means, *optional = parts
    return output, Rows(means, *(None if tensor.dim() == 1 else tensor for tensor in optional))


def _compare(expected: tuple[Any, Rows], found: tuple[Any, Rows]) -> None:
    pairs = [(main_tensor(expected[0]), found[0])]
    pairs += [
        (getattr(expected[1], name), getattr(found[1], name)) for name in ("means", "variances", "output", "feature")
    ]
    for one, other in pairs:
        if one is None and other is None:
            continue
        if one is None or other is None or not torch.allclose(one, other, rtol=_RELATIVE, atol=_ABSOLUTE):
            raise InputError("the graph does not give the model's numbers")
