"""What one forward pass shows of the watched layers.

Each activation is reduced inside a hook and let go. A hook only listens to the thread that put it there.

Plain activations are summed up, and all sums are divided at once behind the pass. Whatever is not plain (another type, a mask, a
second call of a layer, variances) is averaged on the spot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from neuralmean.channels import channel_mean, channel_mean_variance, main_tensor
from neuralmean.data import Batch
from neuralmean.errors import InputError, LayerNotFiredError
from neuralmean.layers import Layer
from neuralmean.recorder.hooks import Hooks, first_argument
from neuralmean.recorder.leaving import Leaving
from neuralmean.recorder.plan import Plan
from neuralmean.recording import Exits, Recording

_NOTHING: Mapping[str, Any] = {}
_FLOAT = torch.float32


class _Current(threading.local):
    sink: Sink | None = None


current = _Current()  # the pass that this thread is in: the inner one, where one runs inside another


class Sink:
    """Collects the reduced activations of one pass.

    Args:
        plan: What the passes have in common.
        batch: The inputs; None for a model that is traced, whatever thread runs it: nothing there may depend on a shape.
        variance: Whether to record variances too.
        head: Name of the layer that gives the logits, where those are wanted.
        exits: Where the pass may be stopped.
    """

    served: frozenset[int] = frozenset()  # layers that need no hook, as something else brings their activations,
    served_by: object = None  # which is this

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
            self.mask, self.size, self._device = batch.mask, first.shape[0], first.device
            self._sums_up = not variance and self.mask is None
        self._hooks = Hooks()
        self.clear()

    def clear(self) -> None:
        """Forget what was recorded."""
        self.shapes: list[torch.Size | None] = [None] * len(self.layers)  # of the activations that were summed up
        self.values: list[Tensor | None] = [None] * len(self.layers)  # their sums; of others means, added up over calls
        self.variances: dict[int, Tensor] = {}
        self.calls: dict[int, int] = {}  # of the others
        self.feature: Tensor | None = None
        self.logits: Tensor | None = None
        self._leaving = Leaving(self.exits)
        self._end = self._leaving.end  # of the layers that exits look at

    def attach(self) -> None:
        """Begin to listen: put hooks on the layers, but for those that are served."""
        if self._is_for_thread:
            self._outer, current.sink = current.sink, self
        if len(self.served) < len(self.layers):
            for index in range(len(self.layers)):
                if index not in self.served:
                    self.hook(index)
        if self.head is not None:
            self._hooks.put(self.plan.module(self.head), self._head_hook, before=False)

    def hook(self, index: int) -> None:
        """Read a layer by a hook from now on."""
        self.served -= {index}
        before = self.layers[index].reads_input
        hook = self._input_hook(index) if before else self._output_hook(index)
        self._hooks.put(self.watched[index], hook, before=before)

    def detach(self) -> None:
        """Take away what `attach` put there, whole or in part."""
        self._hooks.take_away()
        if self._is_for_thread and current.sink is self:
            current.sink = self._outer

    def _is_deaf(self) -> bool:
        """Whether a hook was called by a thread, or in a pass inside this one, that it is not for."""
        return self._is_for_thread and current.sink is not self

    def _input_hook(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = _NOTHING) -> None:
            if not self._is_deaf():
                self.add(index, first_argument(args, kwargs))

        return hook

    def _output_hook(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
            if not self._is_deaf():
                self.add(index, main_tensor(rest[-1]))

        return hook

    def _head_hook(self, module: nn.Module, args: tuple[Any, ...], *rest: Any) -> None:
        if self._is_deaf():
            return
        kwargs, output = rest
        feature, logits = first_argument(args, kwargs), main_tensor(output)
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

    def add(self, index: int, activation: Tensor | None, sums: Tensor | None = None) -> None:
        """Add an activation of a layer, and the sums over its positions, (N, C), where they are known."""
        if self._sums_up and self.values[index] is None and type(activation) is Tensor and activation.dtype is _FLOAT:
            shape = activation.shape
            dims = self._dims[index][len(shape)]
            if dims:
                if sums is None:
                    sums = torch.sum(activation.detach() if activation.requires_grad else activation, dims)
                self.shapes[index], self.values[index] = shape, sums
                if index < self._end:
                    self._leaving.look(index, self._means)
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
            if index < self._leaving.looked_at:
                raise InputError(
                    f"Expected layer {layer.name!r} to be done at the early exit behind it, but it ran again. Fit the detector "
                    "on the model as it is now and not compiled, or leave `early_exit` out."
                )
            mean = mean + self._mean(index) * calls
        self.values[index], self.shapes[index], self.calls[index] = mean, None, calls + 1
        if calls == 0 and index < self._end:
            self._leaving.look(index, self._means)

    def _mean(self, index: int) -> Tensor:
        """Return the mean of a layer that has fired, (N, C)."""
        value, shape = cast(Tensor, self.values[index]), self.shapes[index]
        if shape is None:
            return value / self.calls[index] if self.calls[index] > 1 else value
        return value / (shape.numel() // value.numel() if value.numel() else 1)

    def _means(self, depth: int) -> Tensor:
        """Return the means of the first `depth` layers side by side, (N, D'), once they have fired as they should."""
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
        """Return means and variances of the layers side by side, (N, D) each; of the first ones, if the pass was stopped.

        Raises:
            LayerNotFiredError: A layer took no part in the pass.
            InputError: A layer has other rows than the inputs, or its channels elsewhere.
        """
        depth = len(self._seen())
        means = self._means(depth)
        if not self.variance:
            return means, None
        return means, torch.cat([self.variances[index] / self.calls[index] for index in range(depth)], dim=1)

    def finish(self, output: Any) -> Recording:
        """Return what was recorded, behind the pass."""
        means, variances = self.statistics()
        stopped_at = self._leaving.stopped_at
        if self.head is not None and self.feature is None and stopped_at is None:
            raise LayerNotFiredError(
                f"Expected the head {self.head!r} to run in the forward pass, but it did not. Name another layer as `head`."
            )
        if self.calls:
            self.plan.repeated |= {index for index, calls in self.calls.items() if calls > 1}
        return Recording(output, self._seen(), means, variances, self.feature, self.logits, stopped_at)

    def _seen(self) -> tuple[Layer, ...]:
        """Return the layers that count: the first ones if the pass was stopped."""
        stopped_at = self._leaving.stopped_at
        return self.layers if stopped_at is None else self.layers[: self._leaving.depths[stopped_at]]

    def _check(self, depth: int) -> None:
        """Raise unless the first `depth` layers have fired, with as many rows and channels as expected."""
        silent = [layer.name for layer, value in zip(self.layers[:depth], self.values, strict=False) if value is None]
        if silent:
            shown = ", ".join(map(repr, silent[:3])) + (f" and {len(silent) - 3} more" if len(silent) > 3 else "")
            raise LayerNotFiredError(
                f"Expected every watched layer to run in the forward pass, but {shown} did not. It may be used in "
                "training only, bypassed by a fused kernel or inside a compiled submodule; choose others with `layers`."
            )
        if self.size is None:
            return
        for layer, value in zip(self.layers[:depth], self.values, strict=False):
            rows, channels = cast(Tensor, value).shape
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
