"""A recorded pass that runs as a compiled graph where that is correct and faster, and as the model elsewhere."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from neuralmean.data.batch import Batch
from neuralmean.data.probes import SEVERAL, are_close, noise, odd_inputs
from neuralmean.errors import InputError
from neuralmean.models.execution import device_of, is_compiled, shared_copy
from neuralmean.models.layers import unwrap
from neuralmean.models.repeats import check_repeats
from neuralmean.recording.graph.capture import capture
from neuralmean.recording.graph.compiled import Graph, check_compiler, check_wanted, compile_programs
from neuralmean.recording.module import RecordingModule
from neuralmean.recording.observer import ChannelStats, Observer
from neuralmean.recording.result import Exits

_ROUNDS = 7
_FASTER = 0.97  # largest share of the model's time that counts as faster


class FlatRecording(nn.Module):
    """The recording module as a function from one tensor to a flat tuple: outputs, then recorded statistics."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        recorder = observer.recorder
        self.recording = RecordingModule(
            unwrap(recorder.model), recorder.layers, variance=recorder.variance, head=recorder.head
        )
        self.eval()

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the leaves of the model's output, the means and, if recorded, variances, feature and logits."""
        output, *recorded = self.recording(inputs, {}, None)
        return (*pytree.tree_flatten(output)[0], *(part for part in recorded if part is not None))


@dataclass(frozen=True)
class FrozenGraphs:
    """Compiled graphs of one recorded pass."""

    single: Graph | None  # for one input; None if the model is as fast
    several: Graph | None  # for several inputs; None if the model is as fast
    shape: torch.Size  # of one input
    spec: Any  # structure of the model's output


class FrozenObserver(Observer):
    """An observer that runs graphs for inputs like those they were captured with, and the model for all others.

    The model also runs after a layer was added, replaced or removed, after it was moved to another device, and in
    forked processes, where the threads of a graph do not exist.

    Args:
        observer: The observer of the model, whose head is already determined.
        graphs: The result of `freeze`.
    """

    def __init__(self, observer: Observer, graphs: FrozenGraphs) -> None:
        self.layers, self.recorder, self._head_is_open = observer.layers, observer.recorder, False
        self.graphs, self._modules, self._process = graphs, self.recorder.modules, os.getpid()

    def observe(self, batch: Batch, *, name: str = "x", exits: Exits | None = None) -> tuple[Any, ChannelStats]:
        """Return the model's output for a batch and its statistics; see `Observer.observe`."""
        graph = None if exits is not None else self._graph_for(batch)
        if graph is None:
            return super().observe(batch, name=name, exits=exits)
        with torch.no_grad():
            output, stats = self.read(graph([batch.first.contiguous()]))
        self._check_finite(stats.means, name)
        return output, stats

    def _graph_for(self, batch: Batch) -> Graph | None:
        if len(batch.args) != 1 or batch.kwargs or not isinstance(batch.args[0], Tensor):
            return None
        x, modules = batch.args[0], self.recorder.modules
        fits = type(x) is Tensor and x.dtype is torch.float32 and x.shape[1:] == self.graphs.shape
        fits = fits and x.device.type == "cpu" and not x.requires_grad and not torch.is_autocast_enabled("cpu")
        fits = fits and modules is self._modules and device_of(modules).type == "cpu" and os.getpid() == self._process
        graph = self.graphs.single if len(x) == 1 else self.graphs.several
        return graph if fits and len(x) else None

    def read(self, found: list[Tensor]) -> tuple[Any, ChannelStats]:
        """Unpack the result of a graph into output and statistics."""
        n_leaves = self.graphs.spec.num_leaves
        output = pytree.tree_unflatten(found[:n_leaves], self.graphs.spec)
        means, *rest = found[n_leaves:]
        variances = rest.pop(0) if self.recorder.variance else None
        feature, logits = (rest[0], rest[1] if len(rest) > 1 else None) if rest else (None, None)
        return output, ChannelStats(means, variances, logits, feature)


def freeze(observer: Observer, batch: Batch, weights: str) -> FrozenGraphs:
    """Compile the pass of an observer, and check the graphs against the model.

    Args:
        observer: The observer of the model.
        batch: Inputs of the usual shape.
        weights: Digest of the model's weights.

    Raises:
        InputError: The model is not a fixed graph, cannot be compiled, or is as fast without.
    """
    core = unwrap(observer.recorder.model)
    try:
        return _freeze(observer, core, batch, weights)
    except InputError as error:
        reason = str(error).rstrip(".")
        raise InputError(
            f"Expected {type(core).__name__} to be a fixed graph of its input, but {reason}. It runs as it is without one."
        ) from error


def _freeze(observer: Observer, core: nn.Module, batch: Batch, weights: str) -> FrozenGraphs:
    x = batch.first
    if len(batch.args) != 1 or batch.kwargs or x.dtype is not torch.float32 or x.device.type != "cpu":
        raise InputError("only models with one input, in float32 on the CPU, can be frozen")
    if device_of(core.modules()).type != "cpu":
        raise InputError(f"it is on {device_of(core.modules())}, and only models on the CPU can be frozen")
    check_compiler()
    if is_compiled(observer.recorder.model):
        observer = observer.on(shared_copy(core))
    check_repeats(core, lambda: observer.observe(Batch((x[:2].clone(),)))[0])
    with torch.no_grad():
        leaves, spec = pytree.tree_flatten(observer.observe(Batch((x[:2].clone(),)))[0])
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            raise InputError("its output contains something other than tensors")
        module = FlatRecording(observer)
        programs = [capture(module, [noise(size, x)], any_size=size > 1) for size in (1, 3)]
        single, several = compile_programs(programs, weights)
        frozen = FrozenObserver(observer, FrozenGraphs(single, several, x.shape[1:], spec))
        for inputs in odd_inputs(x):
            check_wanted()
            _compare(observer, frozen, inputs)
        kept = [_faster(observer, frozen, noise(n, x), graph) for n, graph in ((1, single), (SEVERAL, several))]
    if kept == [None, None]:
        raise InputError("a compiled graph of it is not faster")
    return FrozenGraphs(kept[0], kept[1], x.shape[1:], spec)


def _compare(observer: Observer, frozen: FrozenObserver, x: Tensor) -> None:
    try:
        expected, rows = observer.observe(Batch((x.clone(),)))
    except InputError:  # not finite: the graph's observer raises too
        return
    found, others = frozen.observe(Batch((x.clone(),)))
    pairs = list(zip(pytree.tree_flatten(expected)[0], pytree.tree_flatten(found)[0], strict=True))
    pairs += [(getattr(rows, part), getattr(others, part)) for part in ("means", "variances", "logits", "feature")]
    if not all(are_close(*pair) for pair in pairs):
        raise InputError("the graph does not reproduce the model's numbers")


def _faster(observer: Observer, frozen: FrozenObserver, x: Tensor, graph: Graph) -> Graph | None:
    """Return the graph if it takes less time than the model."""
    taken: list[list[float]] = [[], []]
    for _ in range(_ROUNDS + 2):
        for times, way in zip(taken, (observer, frozen), strict=True):
            begin = time.perf_counter()
            way.observe(Batch((x,)))
            times.append(time.perf_counter() - begin)
    model, own = (statistics.median(times[2:]) for times in taken)  # the first ones warm up
    return graph if own < _FASTER * model else None
