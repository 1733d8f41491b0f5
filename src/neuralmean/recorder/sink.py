"""What one forward pass shows of the watched layers: the only file that registers hooks.

Each activation is reduced inside the hook and let go. A hook only listens to the thread that registered it. A layer of
torch's own is stood in for instead, for the time of the pass: see `stand_ins`.

Reductions write their sums into one (N, D) tensor, which is divided once at the end: no allocation, no division and no
concatenation per layer. Whatever is not plain (another type, a mask, a second call) takes the general way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import count, pairwise
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from neuralmean.channels import channel_mean, channel_mean_variance, main_tensor
from neuralmean.data import Batch
from neuralmean.errors import InputError, LayerNotFiredError
from neuralmean.layers import unwrap
from neuralmean.recorder.plan import Memory, Plan, Slot, is_plain
from neuralmean.recorder.stand_ins import Pass, StandIns, current
from neuralmean.recording import Exits, Recording
from neuralmean.running import Modules, device_of, evaluating

_NOTHING: Mapping[str, Any] = {}
_FILLED, _APART = 1, 2  # where the means of a layer are: in its slot, as sums, or among the parts
_keys = count(-1, -1)  # of hooks in a module's dicts; torch's own begin at 0 and grow


class Stop(BaseException):  # no `except Exception` of a model may swallow it
    """Ends a forward pass from inside a hook."""

    def __init__(self, sink: Sink) -> None:
        super().__init__("the forward pass was stopped by neuralmean")
        self.sink = sink


class Sink:
    """Collects the reduced activations of a pass, and then of others like it; without `stand_ins` it listens to any thread."""

    outer: Pass | None = None  # of the same thread, where one pass runs inside another
    served: frozenset[int] = frozenset()  # layers that are stood in for
    n_hooks = -1  # see `Pass`
    called_by_keyword: frozenset[int] = frozenset()
    feature: Tensor | None = None
    logits: Tensor | None = None
    stopped_at: int | None = None
    mask: Tensor | None = None
    size = 0
    memory: Memory | None = None

    def __init__(
        self,
        plan: Plan,
        batch: Batch | None,
        stand_ins: StandIns | None = None,
        *,
        variance: bool,
        head: str | None,
        exits: Exits | None = None,
    ) -> None:
        self.stand_ins = stand_ins
        self.plan, self.layers, self.variance, self.head = plan, plan.layers, variance, head
        self.places: list[tuple[Any, ...]] = []  # keys of the hooks of this pass, each with the dicts it is in
        if batch is not None:
            first = batch.first
            self.mask, self.size = batch.mask, first.shape[0]
            if not variance and self.mask is None:
                self.memory = plan.memory(self.size, first.device)
        self.clear(exits)

    def clear(self, exits: Exits | None) -> None:
        """Forget what was recorded, before a pass that may be stopped at `exits`."""
        self.slots: list[Slot | None] = self.memory.slots if self.memory else [None] * len(self.layers)
        self.states = [0] * len(self.layers)  # `_FILLED` or `_APART` once it has run
        self.parts: dict[int, Tensor] = {}  # means of the others, added up over the calls of their layers
        self.variances: dict[int, Tensor] = {}
        self.calls: dict[int, int] = {}
        self.feature = self.logits = self.stopped_at = None
        self.served = frozenset()
        self.exits, self.exits_end = exits, 0
        if exits is not None:
            self.depths: tuple[int, ...] = tuple(exits.depths)
            self.exits_end = self.depths[-1] if self.depths else 0  # no exit looks at later layers
            self.next_exit, self.waiting = 0, [end - start for start, end in pairwise((0, *self.depths))]

    def attach(self) -> None:
        """Put stand-ins and hooks on the layers; where a hook may be is in `places` before it is there."""
        if self.stand_ins is not None:
            self.outer, current.sink = current.sink, self
            if self.memory:
                self.stand_ins.enter(self)
        if len(self.served) < len(self.layers):
            for index in range(len(self.layers)):
                if index not in self.served:
                    self.hook(index)
        if self.head is not None:
            module, key = self.plan.module(self.head), next(_keys)
            self.places.append((key, module._forward_hooks, module._forward_hooks_with_kwargs))
            module._forward_hooks_with_kwargs[key] = True
            module._forward_hooks[key] = self._head_hook

    def hook(self, index: int) -> None:
        """Read a layer by a hook from now on, and not by a stand-in."""
        self.served -= {index}
        watched = self.plan.watched()[index]
        # Straight into the module's own dicts: `register_forward_hook` and its handle take ten times as long.
        module, key = watched.module, next(_keys)  # one module may have two hooks: watched, and the head
        if watched.reads_input:
            self.places.append((key, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs))
            if index in self.plan.by_keyword:
                module._forward_pre_hooks_with_kwargs[key] = True
            module._forward_pre_hooks[key] = self._input_hook(index)
        else:
            self.places.append((key, module._forward_hooks))
            module._forward_hooks[key] = self._output_hook(index)

    def detach(self) -> None:
        """Take away what `attach` put there, whole or in part."""
        for key, *dicts in self.places:
            for hooks in dicts:
                hooks.pop(key, None)
        self.places.clear()
        if self.stand_ins is not None:
            self.stand_ins.leave(self)
            if current.sink is self:
                current.sink = self.outer

    def _input_hook(self, index: int) -> Callable[..., None]:
        add, always, keywords = self.add, self.stand_ins is None, index in self.plan.by_keyword

        # Another thread may call a hook that is half registered or half removed, and then without the keywords.
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
            if not always and current.sink is not self:
                return
            if args:
                add(index, args[0])
            elif keywords:
                add(index, next(iter(kwargs.values()), None))
            else:
                self.called_by_keyword |= {index}

        return hook

    def _output_hook(self, index: int) -> Callable[..., None]:
        add, always = self.add, self.stand_ins is None

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if always or current.sink is self:
                add(index, output if isinstance(output, Tensor) else main_tensor(output))

        return hook

    def _head_hook(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if self.stand_ins is not None and current.sink is not self:
            return
        kwargs, output = rest
        feature, logits = args[0] if args else next(iter(kwargs.values())), main_tensor(output)
        last = isinstance(module, nn.Linear)
        self.feature = channel_mean(feature.detach(), channels_last=last, mask=self._mask_for(feature))
        if logits is not None:
            self.logits = channel_mean(logits.detach(), channels_last=last, mask=self._mask_for(logits))

    def _mask_for(self, activation: Tensor) -> Tensor | None:
        fits = self.mask is not None and activation.dim() == 3 and activation.shape[:2] == self.mask.shape
        return self.mask if fits else None

    def add(self, index: int, activation: Tensor | None) -> None:
        """Add an activation of a layer."""
        slot = None if self.states[index] else self.slots[index]
        if slot is not None and is_plain(activation, slot):
            self.fill(index, slot, cast(Tensor, activation))
        else:
            self.add_any(index, activation)

    def fill(self, index: int, slot: Slot, activation: Tensor) -> None:
        """Add the plain activation that a slot is for."""
        plain = activation.detach() if activation.requires_grad else activation
        torch.sum(plain, slot.dims, out=slot.sums)
        self.filled(index)

    def filled(self, index: int) -> None:
        """Hear that the sums of a layer are in its slot."""
        self.states[index] = _FILLED
        if index < self.exits_end:
            self._look_at_exits(index)

    def add_any(self, index: int, activation: Tensor | None) -> None:
        """Add an activation of any kind, and expect its like from now on."""
        layer = self.layers[index]
        if activation is None:
            raise InputError(
                f"Expected layer {layer.name!r} to have a tensor, but it has none. Leave it out of `layers`."
            )
        activation = activation.detach()
        mask = self._mask_for(activation) if layer.channels_last else None
        if self.variance:
            mean, variance = channel_mean_variance(activation, channels_last=layer.channels_last, mask=mask)
            self.variances[index] = variance + self.variances[index] if index in self.variances else variance
        else:
            mean = channel_mean(activation, channels_last=layer.channels_last, mask=mask)
        self._take_out(index)
        first = index not in self.parts
        self.parts[index] = mean if first else self.parts[index] + mean
        self.calls[index] = self.calls.get(index, 0) + 1
        if first and self.memory and mean.device == self.memory.device:
            self.memory.expect(index, activation.shape)
        if first and index < self.exits_end:
            self._look_at_exits(index)

    def _take_out(self, index: int) -> None:
        """Make a part of what is in the slot of a layer, if anything is, which nothing goes into any more."""
        if self.states[index] == _FILLED:
            slot = cast(Slot, cast(Memory, self.memory).slots[index])
            self.parts[index], self.calls[index] = slot.sums / slot.n_positions, 1
        self.states[index] = _APART

    def _look_at_exits(self, index: int) -> None:
        """Ask the next exit whether to stop, once all of its layers have been seen."""
        depths, exits = self.depths, cast(Exits, self.exits)
        self.waiting[bisect_right(depths, index)] -= 1
        while self.next_exit < len(depths) and self.waiting[self.next_exit] == 0:
            if exits.should_stop(self.next_exit, self._means(depths[self.next_exit])):
                self.stopped_at = self.next_exit
                raise Stop(self)
            self.next_exit += 1

    def _is_filled(self, depth: int) -> bool:
        """Whether the sums of the first `depth` layers are in their slots, all of them."""
        return self.states[:depth].count(_FILLED) == depth

    def _means(self, depth: int) -> Tensor:
        """Return the means of the first `depth` layers side by side, all of which have fired."""
        if self.memory and self._is_filled(depth):
            return self.memory.means(depth)
        for index in range(depth):
            self._take_out(index)
        return self._join(self.parts, depth)

    def _join(self, parts: Mapping[int, Tensor], depth: int) -> Tensor:
        calls = [self.calls[index] for index in range(depth)]
        return torch.cat([parts[i] / n if n > 1 else parts[i] for i, n in enumerate(calls)], dim=1)

    def finish(self, output: Any) -> Recording:
        """Return the recording, once every layer has fired with one row for each of the inputs."""
        depth = len(self.layers) if self.stopped_at is None else self.depths[self.stopped_at]
        if not self._is_filled(depth):
            self.check_fired(depth)
            self.check_shapes(depth)
        mean, variance = self.statistics(depth)
        if self.calls:
            self.plan.repeated |= {index for index, calls in self.calls.items() if calls > 1}
            if self.memory:
                self.plan.shapes = self.memory.shapes
        return Recording(output, self.layers[:depth], mean, variance, self.feature, self.logits, self.stopped_at)

    def statistics(self, depth: int) -> tuple[Tensor, Tensor | None]:
        """Return means and variances of the first `depth` layers side by side, all of which have fired."""
        return self._means(depth), self._join(self.variances, depth) if self.variance else None

    def check_fired(self, depth: int) -> None:
        """Raise unless the first `depth` layers have fired."""
        silent = [layer.name for layer, state in zip(self.layers[:depth], self.states, strict=False) if not state]
        if silent:
            shown = ", ".join(map(repr, silent[:3])) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
            raise LayerNotFiredError(
                f"Expected every watched layer to run in the forward pass, but {shown} did not. It may be used in "
                "training only, bypassed by a fused kernel or inside a compiled submodule; choose others with `layers`."
            )

    def check_shapes(self, depth: int) -> None:
        """Raise unless the first `depth` layers, all of which have fired, had as many rows and channels as expected."""
        for index, layer in enumerate(self.layers[:depth]):
            if self.states[index] == _FILLED:
                continue  # of the shape that its slot is for
            rows, channels = self.parts[index].shape
            if channels != layer.channels:
                raise InputError(
                    f"Expected {layer.channels} channels in layer {layer.name!r}, but its activation has {channels}. "
                    "Its channels are not where neuralmean looks for them; leave it out of `layers`."
                )
            if rows != self.size:
                raise InputError(
                    f"Expected one row for each of the {self.size} inputs in layer {layer.name!r}, but its activation has "
                    f"{rows}. neuralmean needs the batch as first dimension; leave the layer out of `layers`."
                )


def find_head(model: nn.Module, batch: Batch) -> str | None:
    """Return the name of the linear layer whose output is the model's output, or None where there is no such layer."""
    core = unwrap(model)
    outputs: dict[str, Tensor] = {}
    thread = get_ident()

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            if get_ident() == thread and isinstance(output, Tensor):
                outputs[name] = output

        return hook

    handles: list[RemovableHandle] = []
    with evaluating(Modules(core)), torch.no_grad():
        try:
            for name, module in core.named_modules():
                if isinstance(module, nn.Linear):
                    handles.append(module.register_forward_hook(keep(name)))
            moved = batch.to(device_of(core.modules()))
            result = main_tensor(core(*moved.args, **moved.kwargs))
        finally:
            for handle in handles:
                handle.remove()
    if result is None:
        return None
    # A squeeze or a view of the layer's output is still the layer's output: same memory, as many numbers.
    same = [
        name
        for name, output in outputs.items()
        if output.data_ptr() == result.data_ptr() and output.numel() == result.numel()
    ]
    return same[-1] if same else None
