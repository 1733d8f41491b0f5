"""Pure reductions: from one activation to the mean and variance of each channel of each example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def channel_mean(activation: Tensor, *, channels_last: bool = False, mask: Tensor | None = None) -> Tensor:
    """Mean of each channel of each example, shape (N, C), in float32 or better.

    Args:
        activation: Shape (N, C, ...), or (N, ..., C) with `channels_last`.
        channels_last: Whether the channels are the last dimension.
        mask: Shape (N, T): tokens that count, for an activation of shape (N, T, C).

    Example:
        >>> channel_mean(torch.tensor([[[1.0, 3.0], [10.0, 20.0]]]))
        tensor([[ 2., 15.]])
    """
    if mask is not None:
        weight = mask.to(_wide(activation)).unsqueeze(-1)
        return (activation * weight).sum(1) / weight.sum(1).clamp_min(1)
    dims = positions(activation.dim(), channels_last)
    if not dims:
        return activation.to(_wide(activation), copy=True)  # a later in-place operation must not change it
    return activation.mean(dims, dtype=_wide(activation))


def channel_mean_variance(
    activation: Tensor, *, channels_last: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and population variance of each channel of each example over its positions, each (N, C).

    Arguments are those of `channel_mean`. A channel with a single position has variance 0.
    """
    wide = activation.to(_wide(activation))
    if mask is not None:
        mean = channel_mean(activation, mask=mask)
        return mean, channel_mean((wide - mean.unsqueeze(1)).square(), mask=mask)
    dims = positions(activation.dim(), channels_last)
    if not dims:
        return wide.clone(), torch.zeros_like(wide)
    variance, mean = torch.var_mean(wide, dims, correction=0)
    return mean, variance


def positions(n_dims: int, channels_last: bool) -> tuple[int, ...]:
    """Dimensions over which a channel is averaged: all but the examples and the channels."""
    channel = n_dims - 1 if channels_last else 1
    return tuple(dim for dim in range(1, n_dims) if dim != channel)


def main_tensor(output: Any) -> Tensor | None:
    """Return the main tensor of a model's output: itself, `.logits`, or the first one of a tuple or dict."""
    if isinstance(output, Tensor):
        return output
    if isinstance(getattr(output, "logits", None), Tensor):
        return output.logits  # type: ignore[no-any-return]
    if isinstance(output, Mapping):
        logits = output.get("logits")
        output = [logits] if isinstance(logits, Tensor) else list(output.values())
    if isinstance(output, (tuple, list)):
        return next((part for part in map(main_tensor, output) if part is not None), None)
    return None


def _wide(activation: Tensor) -> torch.dtype:
    return torch.float64 if activation.dtype == torch.float64 else torch.float32
