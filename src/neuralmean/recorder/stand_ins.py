"""What takes the place of calling a layer while a pass is recorded.

Recording needs none of this: without it every watched layer has a hook. But a stand-in is cheaper than a hook, and than the
layer itself, as `lean` tells, by about as much as the means cost. It is there for the time of the passes only, in the place
where torch looks for a compiled version of the layer. Whatever is not as usual (hooks, a `forward` of the layer's own, training
mode, another recorder on the same model at the same time) is left to the layer and to hooks.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from itertools import repeat
from typing import Any

from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.utils.hooks import RemovableHandle

from neuralmean.recorder.lean import LARGE, Lean, lean_forward, norm_and_sum
from neuralmean.recorder.plan import Plan
from neuralmean.recorder.sink import Sink, current

_CALL = "_compiled_call_impl"  # what `nn.Module.__call__` calls instead, if it is there; not copied with a module
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class StandIn:
    """Stands in for a layer in the passes of one recorder.

    Args:
        module: The layer.
        lean: What it does in evaluation mode.
        index: Which one of the watched layers it is; -1 if it is none.
        reads_input: Whether it is read at its input, and not at its output.
        owner: Who puts it in its place.
    """

    # Small and in one piece: what there is for each layer is far from the processor when the layer's turn comes.
    __slots__ = ("attributes", "index", "lean", "own", "owner", "reads_input", "sums_input")

    def __init__(self, module: nn.Module, lean: Lean, index: int, owner: StandIns, *, reads_input: bool) -> None:
        self.attributes, self.lean, self.index, self.owner = vars(module), lean, index, owner
        self.own: Callable[[Tensor], Any] = module._call_impl
        self.reads_input = reads_input
        self.sums_input = reads_input and type(module) is nn.BatchNorm2d

    def has_hooks(self) -> bool:
        """Whether the layer has hooks. Not to be asked for each layer in each pass: these are many places to look at."""
        return any(self.attributes[name] for name in _HOOKS)

    def forward(self, input: Tensor) -> Any:  # noqa: A002 - as torch's layers call it
        """Run the layer as it runs in evaluation mode, and tell the pass what there is to see if it is watched."""
        attributes, sums = self.attributes, None
        if (
            is_dynamo_compiling()
            or (sink := current.sink) is None
            or sink.served_by is not self.owner
            or RemovableHandle.next_id != self.owner.n_hooks  # somebody registered a hook, on whatever layer
            or attributes["training"]
            or "forward" in attributes
            or type(input) is not Tensor
        ):
            return self._as_ever(input)
        if self.sums_input and sink.size != 1 and input.numel() > LARGE:
            output, sums = norm_and_sum(attributes, input)
        else:
            output = self.lean(attributes, input)
        if output is None:
            return self._as_ever(input)
        if self.index >= 0:  # what the layer looked at is near the processor now
            sink.add(self.index, input if self.reads_input else output, sums)
        return output

    def _as_ever(self, x: Tensor) -> Any:
        """Call the layer itself, and have it read by a hook if it is watched and nobody else does so."""
        sink = None if is_dynamo_compiling() else current.sink
        if sink is not None and sink.served_by is self.owner and self.index in sink.served:
            sink.hook(self.index)
        return self.own(x)


class StandIns:
    """Stand in for layers while passes of one recorder run, in whichever threads.

    Args:
        plan: Where the layers are.
    """

    def __init__(self, plan: Plan) -> None:
        self.n_hooks = -1  # as many as had ever been registered when the layers were last looked at, anywhere
        self._plan = plan
        self._lock = threading.Lock()
        self._n_passes = 0  # that are served now
        self._known: tuple[list[nn.Module], str | None] = [], None
        self._all: list[StandIn] = []
        # Of the layers that nobody else has hooks on.
        self._attributes: list[dict[str, Any]] = []
        self._calls: list[Callable[[Tensor], Any]] = []
        self._served: frozenset[int] = frozenset()
        self._are_alone = False  # whether no other recorder was there before

    def enter(self, sink: Sink) -> None:
        """Stand in for the layers in a pass of this thread, and tell it which of the watched ones need no hook."""
        known = sink.watched, sink.head
        with self._lock:
            if self._n_passes == 0:
                self._look_up(known)
            elif self._is_new(known):
                return  # a layer was replaced while others run on the model
            sink.served_by, self._n_passes = self, self._n_passes + 1  # first: `leave` then takes away what comes now
            if self._n_passes == 1:
                self._are_alone = False
                held = list(map(dict.setdefault, self._attributes, repeat(_CALL), self._calls))
                self._are_alone = held == self._calls
            if self._are_alone:
                sink.served = self._served

    def leave(self, sink: Sink) -> None:
        """End what `enter` began; the last pass to leave takes everything away."""
        if sink.served_by is not self:
            return
        with self._lock:
            sink.served_by, self._n_passes = None, self._n_passes - 1
            if self._n_passes:
                return
            placed = self._attributes
            if not self._are_alone:
                pairs = zip(self._attributes, self._calls, strict=True)
                placed = [attributes for attributes, call in pairs if attributes.get(_CALL) is call]
            deque(map(dict.pop, placed, repeat(_CALL), repeat(None)), maxlen=0)  # without a line of Python for each

    def _look_up(self, known: tuple[list[nn.Module], str | None]) -> None:
        """Find out where to stand in, unless all is as it was: layers, head, and no hook was registered anywhere."""
        if self._is_new(known):
            self._known, self._all = known, self._find(*known)
        elif self.n_hooks == RemovableHandle.next_id and len(self._calls) == len(self._all):
            return
        self.n_hooks = RemovableHandle.next_id
        all_hooked = _has_any_global_hook()  # type: ignore[no-untyped-call]
        free = [] if all_hooked else [one for one in self._all if not one.has_hooks()]
        self._served = frozenset(one.index for one in free if one.index >= 0)
        self._attributes, self._calls = [one.attributes for one in free], [one.forward for one in free]

    def _is_new(self, known: tuple[list[nn.Module], str | None]) -> bool:
        return known[0] is not self._known[0] or known[1] != self._known[1]

    def _find(self, watched: list[nn.Module], head: str | None) -> list[StandIn]:
        """Make a stand-in for each layer that may have one: not the model itself, nor one that is read in two ways."""
        n_names = Counter(map(id, watched))
        left_out = {id(self._plan.core), *(module for module, count in n_names.items() if count > 1)}
        for module in self._plan.modules():
            if isinstance(module, nn.TransformerEncoderLayer):  # runs as one kernel, unless what is inside has hooks
                left_out |= set(map(id, module.modules()))
        if head is not None:
            left_out.add(id(self._plan.module(head)))
        indices = {id(module): index for index, module in enumerate(watched)}
        found = []
        for module in self._plan.modules():
            lean = None if id(module) in left_out else lean_forward(module)
            if lean is not None:
                index = indices.get(id(module), -1)
                reads_input = index >= 0 and self._plan.layers[index].reads_input
                found.append(StandIn(module, lean, index, self, reads_input=reads_input))
        return found
