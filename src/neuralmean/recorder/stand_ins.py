"""What takes the place of calling a layer while a pass is recorded.

That is cheaper than a hook, and than the layer itself, as `lean` tells. It is there for the time of the passes only, in the
place where torch looks for a compiled version of the layer. A layer that has hooks, a `forward` of its own or is in training
mode is called as ever. One recorder at a time does so on a layer: another one, on the same model at the same time, has its hooks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

from neuralmean.recorder.lean import BATCH_NORMS, Forward, lean_forward
from neuralmean.recorder.plan import Plan, Slot, Watched, is_plain

_CALL = "_compiled_call_impl"  # what `nn.Module.__call__` calls instead, if it is there; not copied with a module

Place = tuple[dict[str, Any], Callable[[Tensor], Any]]  # attributes of a layer, and its stand-in


class Pass(Protocol):
    """A pass that is being recorded."""

    outer: Pass | None  # of the same thread, where one pass runs inside another
    served: frozenset[int]  # layers that are stood in for
    slots: list[Slot | None]  # where sums go, of layers that have not run yet

    def fill(self, index: int, slot: Slot, activation: Tensor) -> None:
        """Add the plain activation that a slot is for."""

    def filled(self, index: int) -> None:
        """Hear that the sums of a layer are in its slot."""

    def add(self, index: int, activation: Tensor | None) -> None:
        """Add any activation."""

    def hook(self, index: int) -> None:
        """Read a layer by a hook from now on, and not by a stand-in."""


class StandIns:
    """Stand in for layers while passes of one recorder run, in whichever threads."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._sinks: dict[int, Pass] = {}  # of the passes that run, by thread
        self._known: list[Watched] = []
        self._watched: dict[int, Place] = {}
        self._all: frozenset[int] = frozenset()  # watched layers that can be stood in for
        self._others: list[Place] = []

    def enter(self, sink: Pass) -> None:
        """Stand in for a pass of this thread, and tell it the watched layers where that is possible."""
        thread, watched = get_ident(), self._plan.watched()
        with self._lock:
            if watched is not self._known and not self._sinks:
                self._look_up(watched)
            if watched is not self._known or _has_any_global_hook():  # type: ignore[no-untyped-call]
                return  # the model was changed while others run on it, or every layer is looked at by somebody
            sink.outer = self._sinks.get(thread)
            self._sinks[thread] = sink
            taken = [
                index
                for index, (attributes, call) in self._watched.items()
                if attributes.setdefault(_CALL, call) is not call
            ]
            sink.served = self._all.difference(taken) if taken else self._all
            for attributes, call in self._others:
                attributes.setdefault(_CALL, call)

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
                for attributes, call in (*self._watched.values(), *self._others):
                    if attributes.get(_CALL) is call:
                        del attributes[_CALL]

    def _look_up(self, watched: list[Watched]) -> None:
        self._known = watched
        self._watched = {
            index: (one.module.__dict__, self._watched_call(index, one, one.lean))
            for index, one in enumerate(watched)
            if one.lean is not None
        }
        self._all = frozenset(self._watched)
        # Another one may be given an input of any shape, which a batch norm would have to look at.
        left_out = {id(self._plan.core), *(id(one.module) for one in watched)}
        modules = [m for m in self._plan.modules() if id(m) not in left_out and not isinstance(m, BATCH_NORMS)]
        found = ((module, lean_forward(module)) for module in modules)
        self._others = [(module.__dict__, _other_call(module, lean)) for module, lean in found if lean is not None]

    def _watched_call(self, index: int, watched: Watched, lean: Forward) -> Callable[[Tensor], Any]:
        sinks, module, in_steps, reads_input = self._sinks, watched.module, watched.in_steps, watched.reads_input
        attributes = module.__dict__
        own: Forward = module._call_impl

        def as_ever(sink: Pass | None, input: Tensor) -> Any:  # noqa: A002
            if sink is None or index not in sink.served:
                return own(input)
            if _is_special(attributes):
                sink.hook(index)  # the last one, so that it sees what the others made of the activation
                return own(input)
            if reads_input:
                sink.add(index, input)
                return own(input)
            output = own(input)
            sink.add(index, output)
            return output

        def forward_before(input: Tensor) -> Any:  # noqa: A002 - as torch's layers call it
            sink = None if is_compiling() else sinks.get(get_ident())
            if sink is None:
                return own(input)
            slot = sink.slots[index]
            if slot is None or not is_plain(input, slot) or _is_special(attributes):
                return as_ever(sink, input)
            if slot.step and in_steps is not None and not torch.is_grad_enabled():
                output = in_steps(input, slot.step, slot.dims, slot.sums)
                sink.filled(index)
                return output
            output = lean(input)
            sink.fill(index, slot, input)  # behind the layer, which has brought it near the processor
            return output

        def forward_after(input: Tensor) -> Any:  # noqa: A002
            sink = None if is_compiling() else sinks.get(get_ident())
            if sink is None or _is_special(attributes):
                return as_ever(sink, input)
            output = lean(input)
            sink.add(index, output)
            return output

        return forward_before if reads_input else forward_after


def _other_call(module: nn.Module, lean: Forward) -> Callable[[Tensor], Any]:
    attributes = module.__dict__
    own: Forward = module._call_impl

    def forward(input: Tensor) -> Any:  # noqa: A002 - as torch's layers call it
        return own(input) if _is_special(attributes) else lean(input)

    return forward


def _is_special(attributes: dict[str, Any]) -> Any:
    """Whether there is more to do than what a layer of its class does in evaluation mode."""
    return (
        attributes["_forward_pre_hooks"]
        or attributes["_forward_hooks"]
        or attributes["_backward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["training"]
        or "forward" in attributes
    )
