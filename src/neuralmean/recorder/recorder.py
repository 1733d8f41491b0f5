"""Runs a model and brings back what was recorded.

The model leaves every call as it came: no hook stays on it and its training flags are what they were, also when the forward
pass raises. Many threads may record on one model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from neuralmean.data import Batch, check_input
from neuralmean.errors import ModelInputError
from neuralmean.layers import Layer, unwrap
from neuralmean.recorder.module import RecordingModule
from neuralmean.recorder.plan import Plan
from neuralmean.recorder.sink import Sink, Stop
from neuralmean.recorder.stand_ins import StandIns
from neuralmean.recording import Exits, Recording
from neuralmean.running import Modules, device_of, evaluating, is_compiled, is_shape_error

_Kind = tuple[torch.Size, torch.dtype, torch.device]


class Recorder:
    """Runs a model and brings back the channel statistics of its watched layers.

    Args:
        model: The model, wrapped (DataParallel, DDP, `torch.compile`) or not.
        layers: The layers to watch.
        variance: Whether to record variances too.
        head: Name of the layer whose input is the penultimate feature and whose output the logits, where those are wanted.
    """

    def __init__(
        self, model: nn.Module, layers: Sequence[Layer], *, variance: bool = False, head: str | None = None
    ) -> None:
        self.model = model
        self.layers = tuple(layers)
        self.variance = variance
        self.head = head
        self._core = unwrap(model)
        self.takes_tokens = any(isinstance(module, (nn.Embedding, nn.EmbeddingBag)) for module in self._core.modules())
        self._plan = Plan(self._core, self.layers)
        self._stand_ins = StandIns(self._plan)
        self._compiled: tuple[Modules, Callable[..., Any]] | None = None  # and of which modules
        self._idle: dict[_Kind, Sink] = {}  # of earlier passes, by the kind of their inputs
        self._lock = threading.Lock()

    @property
    def repeated(self) -> frozenset[int]:
        """Indices of the layers that ran more than once in some pass so far."""
        return self._plan.repeated

    def __call__(self, batch: Batch, *, name: str = "x", exits: Exits | None = None) -> Recording:
        """Run the model on `batch` in evaluation mode and return its output with what was recorded.

        Gradients are recorded or not as the caller has set them; the statistics never carry any.

        Args:
            batch: The inputs.
            name: What the caller calls them, for error messages.
            exits: Where the pass may be stopped; a compiled model always runs to its end.

        Raises:
            LayerNotFiredError: A watched layer took no part in the pass.
            ModelInputError: The input has a shape or type that the model cannot take.
        """
        modules = self._plan.modules()
        if not self._is_known(batch, modules):
            check_input(batch, name, tokens=self.takes_tokens)
            batch = batch.to(device_of(modules))
        try:
            return self._run_compiled(batch, modules) if is_compiled(self.model) else self._run(batch, modules, exits)
        except RuntimeError as error:
            if not is_shape_error(error):
                raise
            shape, reason = tuple(batch.first.shape), str(error).splitlines()[0].rstrip(".")
            raise ModelInputError(
                f"Expected `{name}` to be an input that {type(self._core).__name__} accepts, but got shape {shape} of "
                f"{batch.first.dtype}: {reason}."
            ) from error

    def _run(self, batch: Batch, modules: Modules, exits: Exits | None) -> Recording:
        # A DataParallel model runs on one device here: its replicas live in other threads, out of reach of the hooks.
        model = self._core if isinstance(self.model, nn.DataParallel) else self.model
        kind = _kind(batch.first)
        sink = self._take(kind, batch, exits)
        with evaluating(modules):
            try:
                sink.attach()
                output = model(*batch.args, **batch.kwargs)
            except Stop as stop:
                if stop.sink is not sink:
                    raise
                output = None
            finally:
                sink.detach()
        if sink.called_by_keyword:  # now known, and read with the keywords from here on
            self._plan.by_keyword |= sink.called_by_keyword
            return self._run(batch, modules, exits)
        recording = sink.finish(output)
        self._keep(kind, sink)
        return recording

    def _is_known(self, batch: Batch, modules: Modules) -> bool:
        """Whether a batch is a single tensor, and one like it was looked at before."""
        if batch.kwargs or len(batch.args) != 1 or type(batch.args[0]) is not Tensor:
            return False
        kind = _kind(batch.args[0])
        return kind in self._idle and kind[2] == device_of(modules)

    def _take(self, kind: _Kind, batch: Batch, exits: Exits | None) -> Sink:
        """Return a sink for a pass: of an earlier one with inputs of the same kind, or new."""
        sink = self._idle.pop(kind, None) if batch.mask is None else None
        if sink is None:
            return Sink(self._plan, batch, self._stand_ins, variance=self.variance, head=self.head, exits=exits)
        sink.head = self.head
        sink.clear(exits)
        return sink

    def _keep(self, kind: _Kind, sink: Sink) -> None:
        """Keep the sink of a pass for a later one, if it is small."""
        if sink.memory is not None and sink.memory.is_small:
            if len(self._idle) > 8:
                self._idle.clear()
            self._idle[kind] = sink

    def _run_compiled(self, batch: Batch, modules: Modules) -> Recording:
        """Run a compiled twin that shares every tensor with the model, so that the reductions are compiled too."""
        with self._lock:
            if self._compiled is None or self._compiled[0] is not modules:
                twin = RecordingModule(self._core, self.layers, variance=self.variance, head=self.head)
                self._compiled = modules, twin.compiled()
            output, *found = self._compiled[1](batch.args, batch.kwargs, batch.mask)
        return Recording(output, self.layers, *found)


def _kind(x: Tensor) -> _Kind:
    return x.shape, x.dtype, x.device
