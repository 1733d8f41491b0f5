"""Collects the channel statistics of one forward pass.

Each activation is reduced inside a hook and then released. A hook ignores threads other than the one that registered it.

Plain activations are summed, and all sums are divided once after the pass. All others (another type, a mask, a second
call of a layer, variances) are averaged immediately.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from typing_extensions import Self

from neuralmean.data.batch import Batch
from neuralmean.errors import InputError, LayerNotFiredError
from neuralmean.models.layers import Layer, leave_out
from neuralmean.recording.exits import ExitTracker
from neuralmean.recording.hooks import Hook
from neuralmean.recording.plan import Plan
from neuralmean.recording.result import Exits, Recording
from neuralmean.stats.channels import channel_mean, channel_mean_variance, main_tensor

_FLOAT = torch.float32


class _Current(threading.local):
    sink: Sink | None = None


_current = _Current()  # the pass of this thread; the innermost one if passes are nested


class Sink:
    """Collects the reduced activations of one pass.

    Args:
        plan: State shared by the passes.
        batch: The inputs; None while a model is traced, when nothing may depend on shapes or threads.
        variance: Whether to record variances too.
        head: Name of the layer that gives the logits, if needed.
        exits: Where the pass may be stopped.
    """

    def __init__(
        self, plan: Plan, batch: Batch | None, *, variance: bool, head: str | None, exits: Exits | None = None
    ) -> None:
        self.plan, self.layers, self.variance, self.head, self.exits = plan, plan.layers, variance, head, exits
        self.watched, self._dims = plan.watched, plan.dims
        self.mask: Tensor | None = None
        self.size: int | None = None
        self._is_for_thread = batch is not None
        self._sums_up = False
        if batch is not None:
            first = batch.first
            self.mask, self.size, self._device = batch.mask, len(batch), first.device
            self._sums_up = not variance and self.mask is None
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.shapes: list[torch.Size | None] = [None] * len(self.layers)  # shapes of the summed activations
        self.values: list[Tensor | None] = [None] * len(
            self.layers
        )  # sums of plain activations; means of the others, added over calls
        self.variances: dict[int, Tensor] = {}
        self.calls: dict[int, int] = {}  # number of calls of layers that are averaged
        self.feature: Tensor | None = None
        self.logits: Tensor | None = None
        self._tracker = None if self.exits is None else ExitTracker(self.exits)
        self._end = 0 if self._tracker is None else self._tracker.end  # exits read only layers before this one

    def hooks(self) -> list[Hook]:
        """Return the hooks through which this sink reads the watched layers and the head."""
        hooks = [
            Hook(module, partial(self._on_input if before else self._on_output, index), before)
            for index, (module, before) in enumerate(zip(self.watched, self.plan.reads_input, strict=True))
        ]
        if self.head is not None:
            hooks.append(Hook(self.plan.module(self.head), self._on_head, False))
        return hooks

    def __enter__(self) -> Self:
        self._outer, _current.sink = _current.sink, self
        return self

    def __exit__(self, *_: object) -> None:
        _current.sink = self._outer

    def _is_other_pass(self) -> bool:
        """Return whether a hook was called by another thread, or by a nested pass."""
        return self._is_for_thread and _current.sink is not self

    def _on_input(self, index: int, module: nn.Module, args: tuple[Any, ...], *rest: Mapping[str, Any]) -> None:
        if not self._is_other_pass():
            self.add(index, _first_argument(args, rest[0]))

    def _on_output(self, index: int, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if not self._is_other_pass():
            self.add(index, main_tensor(rest[-1]))

    def _on_head(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if self._is_other_pass():
            return
        kwargs, output = rest
        feature, logits = _first_argument(args, kwargs), main_tensor(output)
        last = isinstance(module, nn.Linear)
        if self.size is not None and feature.shape[0] != self.size:
            raise InputError(
                f"Expected one row for each of the {self.size} inputs at the head {self.head!r}, but got {feature.shape[0]}. "
                "Name another layer as `head`, or pass `head=False`."
            )
        self.feature = channel_mean(feature.detach(), channels_last=last, mask=self._mask_for(feature))
        if logits is not None:
            self.logits = channel_mean(logits.detach(), channels_last=last, mask=self._mask_for(logits))

    def _mask_for(self, activation: Tensor) -> Tensor | None:
        fits = self.mask is not None and activation.dim() == 3 and activation.shape[:2] == self.mask.shape
        return self.mask if fits else None

    def add(self, index: int, activation: Tensor | None) -> None:
        """Add an activation of a layer."""
        if self._sums_up and self.values[index] is None and type(activation) is Tensor and activation.dtype is _FLOAT:
            shape = activation.shape
            dims = self._dims[index][len(shape)]
            if dims:
                self.shapes[index] = shape
                self.values[index] = torch.sum(activation.detach() if activation.requires_grad else activation, dims)
                if index < self._end:
                    self._ask_exits(index)
                return
        self._add_any(index, activation)

    def _add_any(self, index: int, activation: Tensor | None) -> None:
        layer = self.layers[index]
        if activation is None or activation.dim() < 2:
            raise InputError(
                f"Expected layer {layer.name!r} to have a tensor of inputs and channels, but it has none. Leave it out of "
                "`layers`."
            )
        activation = activation.detach()
        mask = self._mask_for(activation) if layer.channels_last else None
        if self.variance:
            mean, variance = channel_mean_variance(activation, channels_last=layer.channels_last, mask=mask)
            self.variances[index] = variance + self.variances[index] if index in self.variances else variance
        else:
            mean = channel_mean(activation, channels_last=layer.channels_last, mask=mask)
        calls = 0 if self.values[index] is None else self.calls.get(index, 1)  # before this one
        if calls:
            if self._tracker is not None and index < self._tracker.looked_at:
                raise InputError(
                    f"Expected layer {layer.name!r} to be done at the early exit after it, but it ran again. Fit the detector "
                    "on this model without compiling it, or leave `early_exit` out."
                )
            mean = mean + self._mean(index) * calls
        self.values[index], self.shapes[index], self.calls[index] = mean, None, calls + 1
        if calls == 0 and index < self._end:
            self._ask_exits(index)

    def _ask_exits(self, index: int) -> None:
        if self._tracker is not None:
            self._tracker.look(index, self._means)

    def _mean(self, index: int) -> Tensor:
        """Return the mean of a layer that has fired, (N, C)."""
        value, shape = cast(Tensor, self.values[index]), self.shapes[index]
        if shape is None:
            return value / self.calls[index] if self.calls[index] > 1 else value
        return value / (shape.numel() // value.numel() if value.numel() else 1)

    def _means(self, depth: int) -> Tensor:
        """Return the means of the first `depth` layers concatenated, (N, D'), after checking that they fired."""
        if self._sums_up:
            shapes = self.shapes[:depth]
            key = self.size, self._device, *shapes
            counts = self.plan.counts.get(key)
            if counts is None and None not in shapes:
                self._check(depth)
                counts = self.plan.count(key, cast(list[torch.Size], shapes), self._device)
            if counts is not None:
                return torch.cat(cast(list[Tensor], self.values[:depth]), dim=1).div_(counts)
        self._check(depth)
        return torch.cat([self._mean(index) for index in range(depth)], dim=1)

    def statistics(self) -> tuple[Tensor, Tensor | None]:
        """Return means and variances of the layers concatenated, (N, D) each; of the first ones, if the pass was stopped.

        Raises:
            LayerNotFiredError: A layer took no part in the pass.
            InputError: A layer has another number of rows than the inputs, or its channels in another dimension.
        """
        depth = len(self._seen())
        means = self._means(depth)
        if not self.variance:
            return means, None
        return means, torch.cat([self.variances[index] / self.calls[index] for index in range(depth)], dim=1)

    def finish(self, output: Any) -> Recording:
        """Return what was recorded, after the pass."""
        means, variances = self.statistics()
        stopped_at = self._stopped_at
        if self.head is not None and self.feature is None and stopped_at is None:
            raise LayerNotFiredError(
                f"Expected the head {self.head!r} to run in the forward pass, but it did not. Name another layer as `head`."
            )
        if self.calls:
            self.plan.repeated |= {index for index, calls in self.calls.items() if calls > 1}
        return Recording(output, self._seen(), means, variances, self.feature, self.logits, stopped_at)

    def _seen(self) -> tuple[Layer, ...]:
        """Return the layers that were read: the first ones if the pass was stopped."""
        if self._tracker is None or self._tracker.stopped_at is None:
            return self.layers
        return self.layers[: self._tracker.depths[self._tracker.stopped_at]]

    @property
    def _stopped_at(self) -> int | None:
        return None if self._tracker is None else self._tracker.stopped_at

    def _check(self, depth: int) -> None:
        """Raise unless the first `depth` layers have fired, with as many rows and channels as expected."""
        layers = self.layers[:depth]
        silent = [layer.name for layer, value in zip(layers, self.values, strict=False) if value is None]
        if silent:
            raise LayerNotFiredError(
                f"Expected every watched layer to run in the forward pass, but {_listed(silent)} did not. It may be used in "
                "training only, bypassed by a fused kernel or inside a compiled submodule; choose others with `layers`, or leave "
                f"it out: `{leave_out(silent, layers)}`."
            )
        if self.size is None:
            return
        shapes = {layer.name: cast(Tensor, value).shape for layer, value in zip(layers, self.values, strict=False)}
        others = [layer.name for layer in layers if shapes[layer.name][1] != layer.channels]
        if others:
            channels = next(layer.channels for layer in layers if layer.name == others[0])
            raise InputError(
                f"Expected {channels} channels in layer {others[0]!r}, but its activation has {shapes[others[0]][1]}. Its "
                f"channels are in another dimension than neuralmean expects; leave it out: `{leave_out(others, layers)}`."
            )
        others = [name for name, shape in shapes.items() if shape[0] != self.size]
        if others:
            raise InputError(
                f"Expected one row for each of the {self.size} inputs in layer {_listed(others)}, but its activation has "
                f"{shapes[others[0]][0]}. neuralmean needs the batch as first dimension; leave the layer out: "
                f"`{leave_out(others, layers)}`."
            )


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a call, positional or not; None if there is none."""
    return args[0] if args else next(iter(kwargs.values()), None)
