"""A pass that keeps a part of each activation, to trace scores back to positions of the input.

Every other pass releases each activation as soon as its channels are averaged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from neuralmean.data.batch import Batch
from neuralmean.recording.plan import Plan
from neuralmean.recording.result import Recording
from neuralmean.recording.sink import Sink

Keep = Callable[[int, Tensor], Tensor]


class Activations(NamedTuple):
    """The recording of one pass, and the kept parts of its activations."""

    recording: Recording
    kept: list[list[Tensor]]  # by watched layer, in order, one for each call


class ActivationSink(Sink):
    """Collects the reduced activations of one pass, and a part of the activations themselves.

    Args:
        plan: State shared by the passes.
        batch: The inputs.
        variance: Whether to record variances too.
        head: Name of the layer that gives the logits, if needed.
        keep: Returns what to keep, given the index of a layer and an activation, which a later layer may overwrite.
    """

    def __init__(self, plan: Plan, batch: Batch, *, variance: bool, head: str | None, keep: Keep) -> None:
        self._keep = keep
        super().__init__(plan, batch, variance=variance, head=head)

    def clear(self) -> None:
        """Forget what was recorded."""
        super().clear()
        self.kept: list[list[Tensor]] = [[] for _ in self.layers]

    def add(self, index: int, activation: Tensor | None) -> None:
        """Add an activation of a layer."""
        super().add(index, activation)
        if activation is not None:
            self.kept[index].append(self._keep(index, activation.detach()))
