"""What a recording is, and what the passes of one recorder share. Nothing here runs a model or sets a hook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from neuralmean.errors import LayerNotFoundError
from neuralmean.layers import Layer
from neuralmean.lean import Forward, lean_forward

_SMALL = 1 << 20  # numbers in a buffer that is kept: 4 MB


@dataclass(frozen=True)
class Recording:
    """What one forward pass showed: the model's own output, and the channels of the watched layers."""

    output: Any  # None if the pass was stopped
    layers: tuple[Layer, ...]  # those of the columns: all of them, or the first ones if the pass was stopped
    mean: Tensor  # (N, D)
    variance: Tensor | None = None  # (N, D), None unless asked for
    feature: Tensor | None = None  # (N, F), the input of the head
    logits: Tensor | None = None  # (N, K), the output of the head
    stopped_at: int | None = None  # index of the exit, if the pass was stopped

    @property
    def means(self) -> dict[str, Tensor]:
        """Channel means by layer, each (N, C)."""
        return _by_layer(self.mean, self.layers)

    @property
    def variances(self) -> dict[str, Tensor]:
        """Channel variances by layer, each (N, C); empty unless asked for."""
        return {} if self.variance is None else _by_layer(self.variance, self.layers)


class Exits(Protocol):
    """Says whether a forward pass can be stopped once its first layers have been seen."""

    @property
    def depths(self) -> Sequence[int]:
        """How many of the first layers each exit looks at, growing."""

    def should_stop(self, index: int, means: Tensor) -> bool:
        """Whether to stop at exit `index`, given the channel means of its layers, (N, D')."""


class Plan:
    """What the passes of one recorder share: where the layers are, and the shapes that were seen in them."""

    def __init__(self, core: nn.Module, layers: Sequence[Layer]) -> None:
        self.core, self.layers = core, tuple(layers)
        self.widths = [layer.channels for layer in layers]
        self.by_keyword: frozenset[int] = frozenset()
        self.repeated: frozenset[int] = frozenset()
        self._seen: dict[tuple[int, torch.device], list[Seen | None]] = {}
        self._latest: list[Seen | None] = [None] * len(self.layers)
        self._memories: dict[tuple[int, torch.device], Memory] = {}
        self._divisors: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self._children: list[Mapping[str, nn.Module | None]] = []
        self._known: list[dict[str, nn.Module | None]] | None = None
        self._modules: list[nn.Module] = []
        self._watched: list[Watched] = []

    def modules(self) -> list[nn.Module]:
        """Every module of the model, looked up again only if one was added, replaced or removed."""
        if self._children != self._known:
            modules = list(self.core.modules())
            self._children = [module._modules for module in modules]
            self._modules, self._watched = modules, []
            self._known = [dict(children) for children in self._children]
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
                Watched(module, layer.reads_input, lean_forward(module) if layer.reads_input else None)
                for module, layer in zip(modules, self.layers, strict=True)
            ]
        return self._watched

    def take_memory(self, size: int, device: torch.device) -> Memory:
        """Return memory for the sums of one pass: fresh, or of an earlier pass."""
        known = self._memories.pop((size, device), None)
        return Memory(size, device, self.widths, self._seen_in(size, device)) if known is None else known

    def give_back(self, memory: Memory) -> None:
        """Keep memory that nobody looks at any more for a later pass, if it is small."""
        if memory.is_small:
            if len(self._memories) > 8:
                self._memories.clear()
            self._memories[memory.size, memory.device] = memory

    def _seen_in(self, size: int, device: torch.device) -> list[Seen | None]:
        """Shapes that the layers have with batches of this size, as far as another size lets expect them; filled on."""
        known = self._seen.get((size, device))
        if known is None:
            if len(self._seen) > 64:
                self._seen.clear()
            known = [None if seen is None else seen.of_size(size) for seen in self._latest]
            self._latest = self._seen[size, device] = known
        return known

    def divisor(self, counts: tuple[int, ...], device: torch.device) -> Tensor:
        """Return how many positions each column of the first layers was summed over, (D,)."""
        if len(self._divisors) > 64:
            self._divisors.clear()
        known = self._divisors.get((counts, device))
        if known is None:
            columns = torch.tensor(counts).repeat_interleave(torch.tensor(self.widths[: len(counts)]))
            known = self._divisors[counts, device] = columns.to(device, torch.float32)
        return known


class Memory:
    """Where the sums of a pass go, (size, D) in all, and the shapes that they are expected to be of.

    Args:
        size: Inputs of the pass.
        device: Where they are.
        widths: Channels of each layer.
        seen: Shape of each layer's activation, where one was seen.
    """

    __slots__ = ("_ends", "_whole", "device", "is_small", "parts", "seen", "size")

    def __init__(self, size: int, device: torch.device, widths: Sequence[int], seen: list[Seen | None]) -> None:
        self.size, self.device, self.seen = size, device, seen
        self._ends = list(accumulate(widths))
        self._whole = torch.empty(size, sum(widths), device=device)
        self.parts = torch.split(self._whole, list(widths), dim=1)
        self.is_small = self._whole.numel() <= _SMALL

    def sums(self, depth: int) -> Tensor:
        """Return the part of the first `depth` layers."""
        return self._whole if depth == len(self._ends) else self._whole[:, : self._ends[depth - 1]]


@dataclass(frozen=True)
class Watched:
    """A layer of the model at hand, how it is read, and the short way through it, where there is one."""

    module: nn.Module
    reads_input: bool
    lean: Forward | None


@dataclass(frozen=True)
class Seen:
    """Shape of a plain activation, the dimensions of its positions, and how many positions there are."""

    shape: torch.Size
    dims: tuple[int, ...]
    count: int

    def of_size(self, size: int) -> Seen:
        """Return what a batch of another size would show."""
        return Seen(torch.Size((size, *self.shape[1:])), self.dims, self.count)


def _by_layer(joined: Tensor, layers: Sequence[Layer]) -> dict[str, Tensor]:
    parts = torch.split(joined, [layer.channels for layer in layers], dim=1)
    return {layer.name: part for layer, part in zip(layers, parts, strict=True)}
