"""Recorded passes without Python: the model and its reductions as one TorchScript graph, where that can be trusted.

A pass of a deep network with one image spends a third of its time in Python, and several passes at a time get in each other's
way there, as one thread at a time may run Python. A graph has neither trouble. A model is only run as a graph if tracing it
raised no doubt (nothing depends on the values or shapes of a tensor) and if the graph gives the model's numbers on other inputs.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # type: ignore[attr-defined]

from neuralmean.channels import main_tensor
from neuralmean.data import Batch
from neuralmean.errors import InputError
from neuralmean.layers import unwrap
from neuralmean.looking import Looks, run_with_exits
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
        depths: How many of the first layers each exit in the graph looks at.
    """

    def __init__(self, observer: Observer, graph: Any, shape: torch.Size, depths: Sequence[int] = ()) -> None:
        recorder = observer.recorder
        super().__init__(recorder.model, observer.layers, variance=recorder.variance, head=recorder.head)
        self._graph, self._shape, self._depths = graph, shape, tuple(depths)

    def around(self, observer: Observer) -> TracedObserver:
        """Return the same for another observer of the same model, or of one that shares its tensors."""
        return TracedObserver(observer, self._graph, self._shape, self._depths)

    def observe(self, batch: Batch, *, name: str = "x", exits: Exits | None = None) -> tuple[Any, Rows]:
        """Return the main tensor of the model's output for a batch and the rows of it; see `Observer.observe`."""
        x = batch.first
        fits = x.dtype is torch.float32 and x.shape[1:] == self._shape and x.device.type == "cpu"
        fits = fits and (exits is None or tuple(exits.depths) == self._depths)
        if not fits or len(batch.args) != 1 or batch.kwargs or x.requires_grad:
            return super().observe(batch, name=name, exits=exits)
        with torch.no_grad():
            if exits is None:
                output, rows = _read(self._graph(x))
            else:
                output, rows = run_with_exits(exits, lambda: _read(self._graph(x)), lambda means: (None, Rows(means)))
        self._check_finite(rows.means, name)
        return output, rows


def trace(observer: Observer, example: Tensor, *, fold: bool = False, depths: Sequence[int] = ()) -> TracedObserver:
    """Return an observer that runs the model as a graph.

    Args:
        observer: The observer of the model.
        example: Inputs, shape (N, ...); only the shape of one counts.
        fold: Whether batch norms may be folded into the convolutions before them: faster, and the last digit may differ.
        depths: Where the graph may be left: how many of the first layers each exit looks at.

    Raises:
        InputError: The model cannot be a graph, or not safely.
    """
    core = unwrap(observer.recorder.model)
    wanted = f"Expected {type(core).__name__} to be a fixed graph of its input"
    if is_compiled(observer.recorder.model):
        raise InputError(f"{wanted}, but it is compiled already.")
    if device_of(core.modules()).type != "cpu" or example.dtype is not torch.float32:
        raise InputError(
            f"{wanted}, in float32 on the CPU, but got {example.dtype} for a model on {device_of(core.modules())}."
        )
    generator = torch.Generator().manual_seed(0)
    first, *others = (torch.randn(size, *example.shape[1:], generator=generator) for size in _SIZES)
    try:
        with torch.no_grad():
            observer.observe(Batch((first,)))  # finds the head
            graph = _make_graph(_Graph(observer, fold=fold, depths=depths), first, fold=fold)
            traced = TracedObserver(observer, graph, example.shape[1:], depths)
            for x in others:
                _compare(observer.observe(Batch((x,))), traced.observe(Batch((x,))))
    except Exception as error:  # whatever a model or torch has against it
        reason = (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0][:200].rstrip(".")
        raise InputError(f"{wanted}, but it is not: {reason}. It runs layer by layer as it is.") from error
    return traced


def _make_graph(module: _Graph, x: Tensor, *, fold: bool) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        traced = torch.jit.trace(module, (x,), check_trace=False)  # type: ignore[no-untyped-call]
        graph = torch.jit.freeze(traced, optimize_numerics=fold)
    doubts = [str(warning.message) for warning in caught if issubclass(warning.category, TracerWarning)]
    if doubts:  # something depends on a value or a shape
        raise InputError(doubts[0])
    return graph


class _Graph(nn.Module):
    """The model with its reductions as a function of one tensor to a fixed number of tensors."""

    def __init__(self, observer: Observer, *, fold: bool, depths: Sequence[int]) -> None:
        super().__init__()
        recorder = observer.recorder
        self._looks = Looks(depths) if depths else None
        self._module = RecordingModule(
            unwrap(recorder.model),
            recorder.layers,
            variance=recorder.variance,
            head=recorder.head,
            behind=fold,
            exits=self._looks,
        )
        if self._looks is not None:
            self._looks.undo = self._module.undo
        self.eval()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return output, means, variances, logits, feature and what the exits left; what is not recorded is empty."""
        if self._looks is not None:
            self._looks.made.clear()
        output, means, *optional = self._module((x,), {}, None)
        main = main_tensor(output)
        if main is None:
            raise InputError("its output holds no tensor")
        variances, feature, logits = (x.new_zeros(0) if tensor is None else tensor for tensor in optional)
        looks = () if self._looks is None else self._looks.made
        return (main, means, variances, logits, feature, *looks)


def _read(parts: tuple[Tensor, ...]) -> tuple[Any, Rows]:
    output, means, *optional = parts[:5]
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
