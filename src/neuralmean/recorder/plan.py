"""What the passes of one recorder share: where the layers are, and memory for their sums. Nothing here runs a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from neuralmean.channels import positions
from neuralmean.errors import LayerNotFoundError
from neuralmean.layers import Layer
from neuralmean.recorder.lean import InSteps, Lean, lean_forward, lean_in_steps
from neuralmean.running import Modules

_SMALL = 1 << 20  # numbers in memory that is kept: 4 MB
_LARGE = 1 << 23  # numbers in an activation that no cache holds: 32 MB
_STEP = 1 << 21  # numbers of it to be summed up at a time: 8 MB


class Slot(NamedTuple):
    """Where the sums of a layer's activation go, if the activation is a plain one of the shape that is expected."""

    shape: torch.Size
    dims: tuple[int, ...]  # of the positions
    n_positions: int
    sums: Tensor  # (N, C)
    step: int  # rows to be summed up at a time of an activation that no cache holds; else 0


def is_plain(activation: Any, slot: Slot) -> bool:
    """Whether an activation can be summed up in a slot at once."""
    return type(activation) is Tensor and activation.shape == slot.shape and activation.dtype is torch.float32


class Plan:
    """What the passes of one recorder share: where the layers are, and the shapes that were seen in them."""

    def __init__(self, core: nn.Module, layers: Sequence[Layer]) -> None:
        self.core, self.layers = core, tuple(layers)
        self.by_keyword: frozenset[int] = frozenset()
        self.repeated: frozenset[int] = frozenset()
        self.shapes: Sequence[torch.Size | None] = ()  # of the latest pass
        self._modules: Modules | None = None
        self._watched: list[Watched] = []

    def modules(self) -> Modules:
        """Every module of the model, looked up again only if one was added, replaced or removed."""
        if self._modules is None or not self._modules.are_all():
            self._modules, self._watched = Modules(self.core), []
        return self._modules

    def module(self, name: str) -> nn.Module:
        """Return the layer called `name`."""
        try:
            return self.core.get_submodule(name)
        except AttributeError:
            raise LayerNotFoundError(
                f"Expected {type(self.core).__name__} to have the layer {name!r}, but it has not. "
                "Make a new Detector for the model."
            ) from None

    def watched(self) -> list[Watched]:
        """The watched layers in order; call `modules` first."""
        if not self._watched:
            modules = [self.module(layer.name) for layer in self.layers]
            self._watched = [
                Watched(
                    module,
                    layer.reads_input,
                    lean_forward(module) if module is not self.core else None,
                    lean_in_steps(module) if layer.reads_input else None,
                )
                for module, layer in zip(modules, self.layers, strict=True)
            ]
        return self._watched

    def memory(self, size: int, device: torch.device) -> Memory:
        """Return memory for the sums of passes, which expects the shapes of the latest pass."""
        made = Memory(size, device, self.layers)
        for index, shape in enumerate(self.shapes):
            if shape is not None:
                made.expect(index, torch.Size((size, *shape[1:])))
        return made


class Memory:
    """Where the sums of one pass after the other go, (size, D) in all, side by side, and what they are to be divided by.

    Args:
        size: Inputs of a pass.
        device: Where they are.
        layers: The watched layers.
    """

    def __init__(self, size: int, device: torch.device, layers: Sequence[Layer]) -> None:
        self.size, self.device = size, device
        self.shapes: list[torch.Size | None] = [None] * len(layers)  # as far as they are known
        self.slots: list[Slot | None] = [None] * len(layers)  # of layers whose shape is known
        self._layers = layers
        self._ends = list(accumulate(layer.channels for layer in layers))
        with torch.inference_mode(False):  # else later passes outside of that mode could not write into it
            self._whole = torch.empty(size, self._ends[-1], device=device)
            self._parts = torch.split(self._whole, [layer.channels for layer in layers], dim=1)
        self._counts: Tensor | None = None
        self.is_small = self._whole.numel() <= _SMALL

    def expect(self, index: int, shape: torch.Size) -> None:
        """Expect activations of that shape in a layer, if the channels are where they should be."""
        channels_last, sums = self._layers[index].channels_last, self._parts[index]
        dims = positions(len(shape), channels_last)
        if dims and (shape[0], shape[-1 if channels_last else 1]) == tuple(sums.shape):
            is_large = shape.numel() > _LARGE and self.device.type == "cpu"
            step = max(1, _STEP * self.size // shape.numel()) if is_large else 0
            self.slots[index] = Slot(shape, dims, math.prod(shape[dim] for dim in dims), sums, step)
            self.shapes[index], self._counts = shape, None

    def means(self, depth: int) -> Tensor:
        """Return the means of the first `depth` layers, (size, D'), given that their sums are in the slots."""
        end = self._ends[depth - 1]
        if self._counts is None or len(self._counts) < end:
            counts = torch.tensor([slot.n_positions for slot in self.slots[:depth] if slot is not None])
            widths = torch.tensor([layer.channels for layer in self._layers[:depth]])
            self._counts = counts.repeat_interleave(widths).to(self.device, torch.float32)
        if depth == len(self.slots):
            return self._whole / self._counts
        return self._whole[:, :end] / self._counts[:end]


@dataclass(frozen=True)
class Watched:
    """A layer of the model at hand, how it is read, and the short ways through it, where there are any."""

    module: nn.Module
    reads_input: bool
    lean: Lean | None
    in_steps: InSteps | None
