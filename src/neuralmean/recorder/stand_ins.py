"""What takes the place of calling a layer while a pass is recorded.

That is cheaper than a hook, and than the layer itself, as `lean` tells. It is there for the time of the passes only, in the
place where torch looks for a compiled version of the layer. A layer that has hooks, a `forward` of its own or is in training
mode is called as ever. One recorder at a time does so on a layer: another one, on the same model at the same time, has its hooks.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from neuralmean.recorder.lean import BATCH_NORMS, InSteps, Lean, lean_forward
from neuralmean.recorder.plan import Plan, Slot, Watched

_FLOAT = torch.float32
_CALL = "_compiled_call_impl"  # what `nn.Module.__call__` calls instead, if it is there; not copied with a module


class Pass(Protocol):
    """A pass that is being recorded."""

    stand_ins: StandIns | None
    head: str | None  # name of the layer that gives the logits
    served: frozenset[int]  # layers that are stood in for
    n_hooks: int  # as many as had ever been registered when it began, anywhere
    states: list[int]  # zero for each layer that has not run
    slots: list[Slot | None]  # where its sums go then

    def fill(self, index: int, slot: Slot, activation: Tensor) -> None:
        """Add the plain activation that a slot is for."""

    def filled(self, index: int) -> None:
        """Hear that the sums of a layer are in its slot."""

    def add(self, index: int, activation: Tensor | None) -> None:
        """Add any activation."""

    def hook(self, index: int) -> None:
        """Read a layer by a hook from now on, and not by a stand-in."""


class _Current(threading.local):
    sink: Pass | None = None


current = _Current()  # the pass that this thread is in: the inner one, where one runs inside another


class StandIn:
    """Stands in for a layer in the passes of one recorder.

    Args:
        module: The layer.
        lean: What it does in evaluation mode.
        owner: Who puts it in its place.
    """

    # Small and in one piece: what there is for each layer is far from the processor when the layer's turn comes.
    __slots__ = ("attributes", "call", "lean", "own", "owner")

    def __init__(self, module: nn.Module, lean: Lean, owner: StandIns) -> None:
        self.attributes, self.lean, self.owner = module.__dict__, lean, owner
        self.own: Callable[[Tensor], Any] = module._call_impl
        self.call: Callable[[Tensor], Any] = self.forward

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch's layers call it
        """Run a layer that is not watched."""
        if is_dynamo_compiling() or (sink := current.sink) is None or sink.stand_ins is not self.owner:
            return self.own(input)
        is_plain = RemovableHandle.next_id == sink.n_hooks and not self.is_special()
        output = self.lean(self.attributes, input) if is_plain else None
        return self.own(input) if output is None else output

    def is_special(self) -> Any:
        """Whether the layer does something else than its class does in evaluation mode."""
        return self.attributes["training"] or "forward" in self.attributes

    def has_hooks(self) -> Any:
        """Whether the layer has hooks. Not to be asked for each layer in each pass: these are many places to look at."""
        attributes = self.attributes
        return (
            attributes["_forward_pre_hooks"]
            or attributes["_forward_hooks"]
            or attributes["_backward_pre_hooks"]
            or attributes["_backward_hooks"]
        )


class WatchedStandIn(StandIn):
    """Stands in for a layer that is watched, and tells the pass what it sees there.

    Args:
        watched: The layer.
        lean: What it does in evaluation mode.
        index: Which one of the watched layers it is.
        owner: Who puts it in its place.
    """

    __slots__ = ("in_steps", "index", "reads_input")

    def __init__(self, watched: Watched, lean: Lean, index: int, owner: StandIns) -> None:
        super().__init__(watched.module, lean, owner)
        self.index, self.reads_input = index, watched.reads_input
        self.in_steps: InSteps | None = watched.in_steps
        self.call = self.forward_before if self.reads_input else self.forward_after

    def forward_before(self, input: Tensor) -> Any:  # noqa: A002
        """Run a layer that is read at its input."""
        if is_dynamo_compiling() or (sink := current.sink) is None or sink.stand_ins is not self.owner:
            return self.own(input)
        index, attributes = self.index, self.attributes
        slot = None if sink.states[index] else sink.slots[index]
        # `plan.is_plain` and `is_special`, written out: this runs for every norm of every pass.
        if (
            slot is None
            or type(input) is not Tensor
            or input.shape != slot.shape
            or input.dtype is not _FLOAT
            or RemovableHandle.next_id != sink.n_hooks
            or attributes["training"]
            or "forward" in attributes
        ):
            return self._as_ever(sink, input)
        if slot.step and self.in_steps is not None and not torch.is_grad_enabled():
            output = self.in_steps(attributes, input, slot.step, slot.dims, slot.sums)
            if output is not None:
                sink.filled(index)
                return output
        output = self.lean(attributes, input)
        if output is None:
            return self._as_ever(sink, input)
        sink.fill(index, slot, input)  # behind the layer, which has brought it near the processor
        return output

    def forward_after(self, input: Tensor) -> Any:  # noqa: A002
        """Run a layer that is read at its output."""
        if is_dynamo_compiling() or (sink := current.sink) is None or sink.stand_ins is not self.owner:
            return self.own(input)
        is_plain = RemovableHandle.next_id == sink.n_hooks and not self.is_special()
        output = self.lean(self.attributes, input) if is_plain else None
        if output is None:
            return self._as_ever(sink, input)
        sink.add(self.index, output)
        return output

    def _as_ever(self, sink: Pass, input: Tensor) -> Any:  # noqa: A002
        if self.index not in sink.served:
            return self.own(input)
        if self.has_hooks() or self.is_special():
            sink.hook(self.index)  # the last one, so that it sees what the others made of the activation
            return self.own(input)
        if self.reads_input:
            sink.add(self.index, input)
            return self.own(input)
        output = self.own(input)
        sink.add(self.index, output)
        return output


class StandIns:
    """Stand in for layers while passes of one recorder run, in whichever threads."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._passes: set[Pass] = set()
        self._known: tuple[list[Watched], str | None] = [], None
        self._all: list[StandIn] = []
        self._n_hooks = -1
        # Of the layers that nobody else has hooks on.
        self._attributes: list[dict[str, Any]] = []
        self._calls: list[Callable[[Tensor], Any]] = []
        self._served: frozenset[int] = frozenset()
        self._is_alone = False  # whether all of the stand-ins in their places are ours

    def enter(self, sink: Pass) -> None:
        """Stand in for a pass of this thread, and tell it the watched layers where that is possible."""
        known, n_hooks = (self._plan.watched(), sink.head), RemovableHandle.next_id
        with self._lock:
            if not self._passes:
                self._look_up(known, n_hooks)
            if self._is_new(known) or n_hooks != self._n_hooks:
                return  # something was changed while others run on the model
            self._passes.add(sink)
            self._is_alone = False
            held = list(map(dict.setdefault, self._attributes, repeat(_CALL), self._calls))
            self._is_alone = held == self._calls
            sink.n_hooks, sink.served = n_hooks, self._served
            if not self._is_alone:  # another recorder was there before
                ours = {id(call) for call in held}
                sink.served = _watched(one for one in self._all if id(one.call) in ours)

    def leave(self, sink: Pass) -> None:
        """End what `enter` began; the last pass to leave takes everything away."""
        with self._lock:
            if sink not in self._passes:
                return
            self._passes.discard(sink)
            if self._passes:
                return
            placed = self._attributes
            if not self._is_alone:
                pairs = zip(self._attributes, self._calls, strict=True)
                placed = [attributes for attributes, call in pairs if attributes.get(_CALL) is call]
            deque(map(dict.pop, placed, repeat(_CALL), repeat(None)), maxlen=0)  # without a line of Python for each

    def _look_up(self, known: tuple[list[Watched], str | None], n_hooks: int) -> None:
        """Find out where to stand in, unless all is as it was: layers, head, and no hook was registered anywhere."""
        if self._is_new(known):
            self._known, self._all = known, self._find(*known)
        elif n_hooks == self._n_hooks and len(self._calls) == len(self._all):  # else hooks may have been removed
            return
        all_hooked = _has_any_global_hook()  # type: ignore[no-untyped-call]
        free = [] if all_hooked else [one for one in self._all if not one.has_hooks()]
        self._n_hooks, self._served = n_hooks, _watched(free)
        self._attributes, self._calls = [one.attributes for one in free], [one.call for one in free]

    def _is_new(self, known: tuple[list[Watched], str | None]) -> bool:
        return known[0] is not self._known[0] or known[1] != self._known[1]

    def _find(self, watched: list[Watched], head: str | None) -> list[StandIn]:
        n_names = Counter(id(one.module) for one in watched)
        by_hook = {module for module, count in n_names.items() if count > 1}
        if head is not None:
            by_hook.add(id(self._plan.module(head)))
        found: list[StandIn] = [
            WatchedStandIn(one, one.lean, index, self)
            for index, one in enumerate(watched)
            if one.lean is not None and id(one.module) not in by_hook
        ]
        left_out = {id(self._plan.core), *n_names, *by_hook}
        for module in self._plan.modules():
            # Another batch norm may be given an input of any shape, which it would have to look at.
            is_other = id(module) not in left_out and not isinstance(module, BATCH_NORMS)
            lean = lean_forward(module) if is_other else None
            if lean is not None:
                found.append(StandIn(module, lean, self))
        return found


def _watched(stand_ins: Iterable[StandIn]) -> frozenset[int]:
    return frozenset(one.index for one in stand_ins if isinstance(one, WatchedStandIn))
