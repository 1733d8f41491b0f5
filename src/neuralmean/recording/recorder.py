"""Runs a model and returns the recorded statistics.

No call changes the model: no hook stays on it and its training flags are restored, also when the forward
pass raises. Several threads may record on one model.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from neuralmean.data.batch import Batch, check_input
from neuralmean.models.execution import Modules, device_of, eval_mode, is_compiled, translate_input_errors
from neuralmean.models.layers import Layer, unwrap
from neuralmean.recording.activations import Activations, ActivationSink, Keep
from neuralmean.recording.exits import Stop
from neuralmean.recording.hooks import Hooks
from neuralmean.recording.module import RecordingModule
from neuralmean.recording.plan import Plan
from neuralmean.recording.result import Exits, Recording
from neuralmean.recording.sink import Sink


class Recorder:
    """Runs a model and returns the channel statistics of its watched layers.

    Args:
        model: The model, wrapped (DataParallel, DDP, `torch.compile`) or not.
        layers: The layers to watch.
        variance: Whether to record variances too.
        head: Name of the layer whose input is the penultimate feature and whose output is the logits, if needed.
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
        self._compiled: tuple[Modules, list[Tensor | None], Callable[..., Any]] | None = (
            None  # modules and tensors that the compiled copy was made of
        )
        self._lock = threading.Lock()

    @property
    def modules(self) -> Modules:
        """Every module of the model: the same object until one is added, replaced or removed."""
        return self._plan.modules()

    @property
    def repeated(self) -> frozenset[int]:
        """Indices of the layers that have run more than once in a pass."""
        return self._plan.repeated

    def __call__(self, batch: Batch, *, name: str = "x", exits: Exits | None = None) -> Recording:
        """Run the model on `batch` in evaluation mode and return its output with what was recorded.

        The output carries gradients if the caller has enabled them; the statistics never do.

        Args:
            batch: The inputs.
            name: The argument's name in error messages.
            exits: Where the pass may be stopped; a compiled model always runs to its end.

        Raises:
            LayerNotFiredError: A watched layer took no part in the pass.
            ModelInputError: The input has a shape or type that the model cannot take.
        """
        modules = self.modules
        device = device_of(modules)
        check_input(batch, name, tokens=self.takes_tokens)
        batch = batch.to(device)
        with translate_input_errors(self._core, batch, name):
            return self._run_compiled(batch, modules) if is_compiled(self.model) else self._run(batch, modules, exits)

    def keep_activations(self, batch: Batch, keep: Keep, *, name: str = "x") -> Activations:
        """Run the model eagerly, even if it is compiled, and return the recording and the results of `keep`.

        Args:
            batch: The inputs.
            keep: Called with the index of a watched layer and its activation, which a later layer may overwrite.
            name: The argument's name in error messages.
        """
        modules = self.modules
        check_input(batch, name, tokens=self.takes_tokens)
        batch = batch.to(device_of(modules))
        sink = ActivationSink(self._plan, batch, variance=self.variance, head=self.head, keep=keep)
        with translate_input_errors(self._core, batch, name):
            recording = self._run(batch, modules, None, sink)
        return Activations(recording, sink.kept)

    def _run(self, batch: Batch, modules: Modules, exits: Exits | None, sink: Sink | None = None) -> Recording:
        # A DataParallel model runs on one device here: its replicas run in other threads, where the hooks would not see them.
        is_core = isinstance(self.model, nn.DataParallel) or sink is not None
        model = self._core if is_core else self.model
        sink = sink or Sink(self._plan, batch, variance=self.variance, head=self.head, exits=exits)
        with sink, Hooks(sink.hooks()), eval_mode(modules):
            try:
                output = model(*batch.args, **batch.kwargs)
            except Stop:
                output = None
        return sink.finish(output)

    def _run_compiled(self, batch: Batch, modules: Modules) -> Recording:
        """Run a compiled copy that shares every tensor with the model, so that the reductions are compiled too."""
        with self._lock:
            tensors = modules.tensors()  # `model.to` changes parameters but replaces buffers
            held = self._compiled
            if held is None or held[0] is not modules or not _are_the_same(held[1], tensors):
                twin = RecordingModule(self._core, self.layers, variance=self.variance, head=self.head)
                held = self._compiled = modules, tensors, twin.compiled()
            output, *found = held[2](batch.args, batch.kwargs, batch.mask)
        return Recording(output, self.layers, *found)


def _are_the_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
