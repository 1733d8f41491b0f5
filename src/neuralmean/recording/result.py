"""Types of a recording and of exits. Nothing here runs a model or registers a hook."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from neuralmean.models.layers import Layer


class Recording(NamedTuple):
    """Result of one forward pass: the model's output, and the statistics of the watched layers."""

    output: Any  # None if the pass was stopped
    layers: tuple[Layer, ...]  # all watched layers, or the first ones if the pass was stopped
    mean: Tensor  # (N, D)
    variance: Tensor | None = None  # (N, D), None unless requested
    feature: Tensor | None = None  # (N, F), the input of the head
    logits: Tensor | None = None  # (N, K), the output of the head
    stopped_at: int | None = None  # index of the exit, if the pass was stopped

    @property
    def means(self) -> dict[str, Tensor]:
        """Channel means by layer, each (N, C)."""
        return _by_layer(self.mean, self.layers)

    @property
    def variances(self) -> dict[str, Tensor]:
        """Channel variances by layer, each (N, C); empty unless requested."""
        return {} if self.variance is None else _by_layer(self.variance, self.layers)


class Exits(Protocol):
    """Decides whether a forward pass can stop after its first layers."""

    @property
    def depths(self) -> Sequence[int]:
        """Number of first layers that each exit reads, increasing."""

    def should_stop(self, index: int, means: Tensor) -> bool:
        """Whether to stop at exit `index`, given the channel means of its layers, (N, D')."""


def _by_layer(joined: Tensor, layers: Sequence[Layer]) -> dict[str, Tensor]:
    parts = torch.split(joined, [layer.channels for layer in layers], dim=1)
    return {layer.name: part for layer, part in zip(layers, parts, strict=True)}
