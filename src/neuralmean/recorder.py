"""Channel means and variances of one forward pass: the only file that registers hooks.

Each activation is reduced inside the hook and let go. The model leaves every call as it came: no hook stays on it and
its training flags are what they were, also when the forward pass raises. Many threads may record on one model: a hook
only listens to the thread that registered it.

Where a norm layer is torch's own, its `forward` is stood in for instead, for the time of the pass: see `stand_ins`.

Reductions write their sums into one (N, D) tensor, which is divided once at the end: no allocation, no division and no
concatenation per layer. Whatever is not plain (another type, a mask, a second call) takes the general way.
"""

from __future__ import annotations

import copy
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, pairwise
from threading import get_ident
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from neuralmean.behind import read_behind
from neuralmean.channels import channel_mean, channel_mean_variance, main_tensor
from neuralmean.data import Batch, check_input
from neuralmean.errors import InputError, LayerNotFiredError, ModelInputError
from neuralmean.layers import Layer, unwrap
from neuralmean.recording import Exits, Memory, Plan, Recording, Slot, is_plain
from neuralmean.running import device_of, evaluating, is_compiled, is_shape_error, shared_copy
from neuralmean.stand_ins import Pass, StandIns

_NOTHING: Mapping[str, Any] = {}
_keys = count(-1, -1)  # of hooks in a module's dicts; torch's own begin at 0 and grow


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
        self._compiled: tuple[RecordingModule, Callable[..., Any]] | None = None
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
        check_input(batch, name, tokens=self.takes_tokens)
        modules = self._plan.modules()
        batch = batch.to(device_of(modules))
        try:
            return self._run_compiled(batch) if is_compiled(self.model) else self._run(batch, modules, exits)
        except RuntimeError as error:
            if not is_shape_error(error):
                raise
            shape, reason = tuple(batch.first.shape), str(error).splitlines()[0].rstrip(".")
            raise ModelInputError(
                f"Expected `{name}` to be an input that {type(self._core).__name__} accepts, but got shape {shape} of "
                f"{batch.first.dtype}: {reason}."
            ) from error

    def _run(self, batch: Batch, modules: list[nn.Module], exits: Exits | None) -> Recording:
        # A DataParallel model runs on one device here: its replicas live in other threads, out of reach of the hooks.
        model = self._core if isinstance(self.model, nn.DataParallel) else self.model
        sink = _Sink(self._plan, batch, self._stand_ins, variance=self.variance, head=self.head, exits=exits)
        with evaluating(self._core, modules):
            try:
                sink.attach()
                output = model(*batch.args, **batch.kwargs)
            except _Stop as stop:
                if stop.sink is not sink:
                    raise
                output = None
            finally:
                sink.detach()
        if sink.called_by_keyword:  # now known, and read with the keywords from here on
            self._plan.by_keyword |= sink.called_by_keyword
            return self._run(batch, modules, exits)
        return sink.finish(output)

    def _run_compiled(self, batch: Batch) -> Recording:
        """Run a compiled twin that shares every tensor with the model, so that the reductions are compiled too."""
        with self._lock:
            if self._compiled is None:
                twin = RecordingModule(self._core, self.layers, variance=self.variance, head=self.head)
                self._compiled = twin, torch.compile(twin)
            twin, compiled = self._compiled
            output, recorded = compiled(batch.args, batch.kwargs, batch.mask)
        return twin.to_recording(output, recorded, len(batch))


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
    with evaluating(core, core.modules()), torch.no_grad():
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


class _Stop(BaseException):  # no `except Exception` of a model may swallow it
    """Ends a forward pass from inside a hook."""

    def __init__(self, sink: _Sink) -> None:
        super().__init__("the forward pass was stopped by neuralmean")
        self.sink = sink


class _Sink:
    """Collects the reduced activations of one pass."""

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
        self.outer: Pass | None = None  # of the same thread, where one pass runs inside another
        self.plan, self.layers, self.variance, self.head, self.exits = plan, plan.layers, variance, head, exits
        self.thread: int | None = get_ident()
        self.places: list[tuple[Any, ...]] = []  # keys of the hooks of this pass, each with the dicts it is in
        self.mask, self.size = (None, 0) if batch is None else (batch.mask, len(batch))
        self.memory: Memory | None = None
        self.slots: list[Slot | None]
        self.depths: tuple[int, ...] = () if exits is None else tuple(exits.depths)
        self.exits_end = self.depths[-1] if self.depths else 0  # no exit looks at later layers
        if batch is not None and not variance and self.mask is None:
            self.memory = plan.take_memory(self.size, batch.first.device)
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        # Of plain activations that are still to come.
        self.slots = self.memory.slots.copy() if self.memory else [None] * len(self.layers)
        self.parts: dict[int, Tensor] = {}  # means of the others, added up over the calls of their layers
        self.variances: dict[int, Tensor] = {}
        self.calls: dict[int, int] = {}
        self.called_by_keyword: frozenset[int] = frozenset()
        self.feature: Tensor | None = None
        self.logits: Tensor | None = None
        self.stopped_at: int | None = None
        if self.depths:
            self.next_exit, self.waiting = 0, [end - start for start, end in pairwise((0, *self.depths))]

    def attach(self) -> None:
        """Put the hooks on the layers; where one may be is in `places` before it is there."""
        plan = self.plan
        # Straight into the modules' own dicts: `register_forward_hook` and its handle take ten times as long.
        served = self.stand_ins.enter(self) if self.stand_ins is not None and self.memory else frozenset()
        for index, watched in enumerate(plan.watched() if len(served) < len(self.layers) else ()):
            if index in served:
                continue
            module, key = watched.module, next(_keys)  # one module may have two hooks: watched, and the head
            if watched.reads_input:
                self.places.append((key, module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs))
                if index in plan.by_keyword:
                    module._forward_pre_hooks_with_kwargs[key] = True
                module._forward_pre_hooks[key] = self._input_hook(index)
            else:
                self.places.append((key, module._forward_hooks))
                module._forward_hooks[key] = self._output_hook(index)
        if self.head is not None:
            module, key = plan.module(self.head), next(_keys)
            self.places.append((key, module._forward_hooks, module._forward_hooks_with_kwargs))
            module._forward_hooks_with_kwargs[key] = True
            module._forward_hooks[key] = self._head_hook

    def detach(self) -> None:
        """Take away what `attach` put there, whole or in part."""
        for key, *dicts in self.places:
            for hooks in dicts:
                hooks.pop(key, None)
        if self.stand_ins is not None:
            self.stand_ins.leave(self)

    def _input_hook(self, index: int) -> Callable[..., None]:
        thread, add, keywords = self.thread, self.add, index in self.plan.by_keyword

        # Another thread may call a hook that is half registered or half removed, and then without the keywords.
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
            if thread is not None and get_ident() != thread:
                return
            if args:
                add(index, args[0])
            elif keywords:
                add(index, next(iter(kwargs.values()), None))
            else:
                self.called_by_keyword |= {index}

        return hook

    def _output_hook(self, index: int) -> Callable[..., None]:
        thread, add = self.thread, self.add

        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if thread is None or get_ident() == thread:
                add(index, output if isinstance(output, Tensor) else main_tensor(output))

        return hook

    def _head_hook(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if self.thread is not None and get_ident() != self.thread:
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
        slot = self.slots[index]
        if slot is not None and is_plain(activation, slot):
            self.fill(index, slot, cast(Tensor, activation))
        else:
            self.add_any(index, activation)

    def fill(self, index: int, slot: Slot, activation: Tensor) -> None:
        """Add the plain activation that a slot is for."""
        plain = activation.detach() if activation.requires_grad else activation
        torch.sum(plain, slot.dims, out=slot.sums)
        self.slots[index] = None
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
        """Make a part of what is in the slot of a layer, which nothing goes into any more."""
        slot = self.memory.slots[index] if self.memory else None
        if slot is not None and self.slots[index] is None and index not in self.parts:
            self.parts[index], self.calls[index] = slot.sums / slot.n_positions, 1
        self.slots[index] = None

    def _look_at_exits(self, index: int) -> None:
        """Ask the next exit whether to stop, once all of its layers have been seen."""
        depths, exits = self.depths, cast(Exits, self.exits)
        self.waiting[bisect_right(depths, index)] -= 1
        while self.next_exit < len(depths) and self.waiting[self.next_exit] == 0:
            if exits.should_stop(self.next_exit, self._means(depths[self.next_exit])):
                self.stopped_at = self.next_exit
                raise _Stop(self)
            self.next_exit += 1

    def _is_filled(self, depth: int) -> bool:
        """Whether the sums of the first `depth` layers are in their slots, all of them."""
        memory = self.memory
        return bool(memory and not self.parts and not any(self.slots[:depth]) and all(memory.slots[:depth]))

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
            self._check(depth)
        mean = self._means(depth)
        variance = self._join(self.variances, depth) if self.variance else None
        if self.calls and max(self.calls.values()) > 1:
            self.plan.repeated |= {index for index, calls in self.calls.items() if calls > 1}
        if self.memory:
            self.plan.give_back(self.memory)
        return Recording(output, self.layers[:depth], mean, variance, self.feature, self.logits, self.stopped_at)

    def _check(self, depth: int) -> None:
        """Raise unless the first `depth` layers have fired, with as many rows and channels as expected."""
        layers = self.layers[:depth]
        for index, slot in enumerate(self.slots[:depth]):
            if slot is None:  # not one that is still waiting
                self._take_out(index)
        silent = [layer.name for index, layer in enumerate(layers) if index not in self.parts]
        if silent:
            shown = ", ".join(map(repr, silent[:3])) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
            raise LayerNotFiredError(
                f"Expected every watched layer to run in the forward pass, but {shown} did not. It may be used in "
                "training only, bypassed by a fused kernel or inside a compiled submodule; choose others with `layers`."
            )
        for index, layer in enumerate(layers):
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


class RecordingModule(nn.Module):
    """A copy of a model that shares its tensors and says what it recorded: for compilers and exporters.

    The hooks are on the copy, and stay there. One thread at a time.

    Args:
        core: The model.
        layers: The layers to watch.
        variance: Whether to record variances too.
        head: Name of the layer that gives the logits, where those are wanted.
        behind: Whether to read batch norms behind them, so that they can be folded; means come out of `undo` then.
        exits: What is asked, and must not stop the pass, once its first layers have been seen.
    """

    factor: Tensor
    offset: Tensor

    def __init__(
        self,
        core: nn.Module,
        layers: Sequence[Layer],
        *,
        variance: bool,
        head: str | None,
        behind: bool = False,
        exits: Exits | None = None,
    ) -> None:
        super().__init__()
        self.model = shared_copy(core).eval()
        self._layers = tuple(layers)
        found = read_behind(core, layers) if behind and not variance else None
        self._is_behind = found is not None
        if found is not None:
            device = device_of(core.modules())
            self.register_buffer("factor", found.factor.to(device), persistent=False)
            self.register_buffer("offset", found.offset.to(device), persistent=False)
        plan = Plan(self.model, layers if found is None else found.layers)
        plan.by_keyword = frozenset(range(len(layers)))
        self._sink = _Sink(plan, None, variance=variance, head=head, exits=exits)
        self._sink.thread = None  # a compiler or exporter may run the copy in a thread of its own
        self._sink.attach()

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], mask: Tensor | None) -> Any:
        """Run the copy and return its output and what `to_recording` takes: nothing but tensors and counts."""
        sink = self._sink
        sink.clear()
        sink.mask = mask
        output = self.model(*args, **kwargs)
        found = (
            [part.get(index) for index in range(len(self._layers))] for part in (sink.parts, sink.variances, sink.calls)
        )
        recorded = (*found, sink.feature, sink.logits)
        sink.clear()
        return output, recorded

    def undo(self, means: Tensor, depth: int | None = None) -> Tensor:
        """Return the means of the watched layers, or of the first `depth`, given what was recorded, side by side."""
        if not self._is_behind:
            return means
        if depth is None:
            return means * self.factor + self.offset
        width = sum(layer.channels for layer in self._layers[:depth])
        return means * self.factor[:width] + self.offset[:width]

    def to_recording(self, output: Any, recorded: Any, size: int) -> Recording:
        """Turn what `forward` returned into a recording."""
        sink = copy.copy(self._sink)
        sink.size = size
        sink.parts, sink.variances, sink.calls = (
            {index: value for index, value in enumerate(part) if value is not None} for part in recorded[:3]
        )
        sink.feature, sink.logits = recorded[3:]
        recording = sink.finish(output)
        return replace(recording, layers=self._layers, mean=self.undo(recording.mean))
