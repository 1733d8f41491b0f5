"""What takes the place of norm layers' `forward` while a pass is recorded.

That is cheaper than a hook, and than the layer itself, as `lean` tells. It is there for the time of the passes only, and one
recorder at a time does so on a layer: another one, on the same model at the same time, has its hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from neuralmean.recorder.lean import Forward
from neuralmean.recorder.plan import Plan, Slot, Watched, is_plain


class Pass(Protocol):
    """A pass that is being recorded."""

    outer: Pass | None  # of the same thread, where one pass runs inside another
    slots: list[Slot | None]  # where sums go, of layers that have not run yet

    def fill(self, index: int, slot: Slot, activation: Tensor) -> None:
        """Add the plain activation that a slot is for."""

    def filled(self, index: int) -> None:
        """Hear that the sums of a layer are in its slot."""

    def add_any(self, index: int, activation: Tensor | None) -> None:
        """Add any other activation."""


class StandIns:
    """Stand in for the `forward` of norm layers while passes of one recorder run, in whichever threads."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._sinks: dict[int, Pass] = {}  # of the passes that run, by thread
        self._watched: list[Watched] = []
        self._all: frozenset[int] = frozenset()  # layers that can be stood in for
        self._forwards: dict[int, tuple[dict[str, Any], Callable[..., Any]]] = {}  # by layer, with its attributes

    def enter(self, sink: Pass) -> frozenset[int]:
        """Stand in for a pass of this thread, and return the layers where that is possible."""
        thread, watched = get_ident(), self._plan.watched()
        with self._lock:
            if watched is not self._watched:
                if self._sinks:
                    return frozenset()  # the model was changed while others run on it
                self._watched = watched
                self._forwards = {
                    index: (one.module.__dict__, self._forward(index, one, one.lean))
                    for index, one in enumerate(watched)
                    if one.lean is not None
                }
                self._all = frozenset(self._forwards)
            sink.outer = self._sinks.get(thread)
            self._sinks[thread] = sink
            taken = [
                index
                for index, (attributes, forward) in self._forwards.items()
                if attributes.setdefault("forward", forward) is not forward
            ]
        return self._all.difference(taken) if taken else self._all

    def leave(self, sink: Pass) -> None:
        """End what `enter` began; the last pass to leave takes everything away."""
        thread = get_ident()
        with self._lock:
            if self._sinks.get(thread) is not sink:
                return
            if sink.outer is None:
                del self._sinks[thread]
            else:
                self._sinks[thread] = sink.outer
            if not self._sinks:
                for attributes, forward in self._forwards.values():
                    if attributes.get("forward") is forward:
                        del attributes["forward"]

    def _forward(self, index: int, watched: Watched, lean: Forward) -> Callable[..., Any]:
        sinks, own, module, in_steps = self._sinks, type(watched.module).forward, watched.module, watched.in_steps

        def forward(input: Tensor) -> Any:  # noqa: A002 - as torch's norm layers call it
            sink = None if is_compiling() else sinks.get(get_ident())
            if sink is None:
                return own(module, input)
            slot = sink.slots[index]
            if slot is None or not is_plain(input, slot):
                sink.add_any(index, input)
                return own(module, input)
            if slot.step and in_steps is not None and not torch.is_grad_enabled():
                output = in_steps(input, slot.step, slot.dims, slot.sums)
                sink.filled(index)
                return output
            output = lean(input)
            sink.fill(index, slot, input)  # behind the layer, which has brought it near the processor
            return output

        return forward
