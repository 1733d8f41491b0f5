r"""Splits the contribution of each layer to a score over its positions: pure functions of activations.

A channel mean is a sum over positions, so the contribution of a layer to a score can be split over its positions without
a remainder. With :math:`s` the contribution of a layer of C channels, :math:`a_{cp}` the activation of channel c at position p
and :math:`m_c` its mean over the training data, position p receives

.. math::
    \frac{s}{C} \sum_c \frac{(a_{cp} - m_c)^4}{\sum_q (a_{cq} - m_c)^4}.

A layer that lowers the score says of no place that it is strange: its contribution is spread evenly. The split that is linear
in :math:`a_{cp} - m_c` adds up just as well, but in it the structure of any natural image hides the unusual place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

_MOST_PREFIX_TOKENS = 16  # class and register tokens before the patches of a vision transformer


def position_weights(activation: Tensor, centre: Tensor, *, channels_last: bool = False) -> Tensor:
    """Return the fourth power of the distance of each position from its channel's mean, a new tensor (N, C, P).

    Args:
        activation: Shape (N, C, ...), or (N, ..., C) with `channels_last`.
        centre: Mean of each channel over the training data, shape (C,).
        channels_last: Whether the channels are the last dimension.
    """
    wide = activation.float()
    rows = wide.reshape(len(wide), -1, wide.shape[-1]) if channels_last else wide.reshape(*wide.shape[:2], -1)
    weights = rows - (centre if channels_last else centre[:, None])
    weights = weights.square_().square_()
    return weights.transpose(1, 2) if channels_last else weights


def split_over_positions(weights: Tensor, shares: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the contribution of each position of a layer to the score, float64 (N, P); they sum to that of the layer.

    Args:
        weights: What `position_weights` returned, shape (N, C, P).
        shares: Contribution of the layer to the score, shape (N,).
        mask: Shape (N, P): the positions that count.

    Example:
        >>> activation = torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])  # two channels, two positions
        >>> weights = position_weights(activation, torch.tensor([1.0, 0.0]))
        >>> split_over_positions(weights, torch.tensor([6.0]))
        tensor([[0., 6.]], dtype=torch.float64)
    """
    if mask is not None:
        weights = weights * mask.unsqueeze(1)
    total = weights.sum(dim=2)
    if not bool(total.sum().isfinite()):  # a power overflowed
        weights = weights.masked_fill(~total.isfinite().unsqueeze(2), 0.0)
    # Channels without any distance, or beyond all measure, say nothing of places.
    parts = torch.where(total.isfinite() & (total > 1e-38), 1 / total.clamp_min(1e-38), 0.0)
    strange = torch.bmm(parts.unsqueeze(1), weights).squeeze(1).double()
    even = torch.ones_like(strange) if mask is None else mask.to(strange.dtype)
    strange = torch.where(strange.sum(dim=1, keepdim=True) > 0, strange, even)
    share = shares.double().unsqueeze(1)
    return share.clamp_min(0) * _normalised(strange) + share.clamp_max(0) * _normalised(even)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=1, keepdim=True).clamp_min(1e-300)


def enlarge(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Enlarge (or reduce) maps (N, *positions) to (N, *size) by linear interpolation that keeps the sum of each map.

    Example:
        >>> enlarge(torch.tensor([[1.0, 3.0]]), (4,)).sum().item()
        4.0
    """
    for dim, target in enumerate(size, start=1):
        if maps.shape[dim] != target:
            weights = _interpolation(maps.shape[dim], target).to(maps)
            maps = (maps.movedim(dim, -1) @ weights).movedim(-1, dim)
    return maps


def patch_grid(n_tokens: int, size: Sequence[int]) -> tuple[int, tuple[int, int]] | None:
    """Return the number of tokens before the patches, and the grid of patches of an image of this size.

    None where the tokens form no grid of square patches.

    Example:
        >>> patch_grid(197, (224, 224)), patch_grid(2, (224, 224))
        ((1, (14, 14)), None)
    """
    height, width = size
    for prefix in range(min(_MOST_PREFIX_TOKENS, n_tokens - 1) + 1):
        rows = math.isqrt((n_tokens - prefix) * height // width)
        for candidate in (rows, rows + 1):
            columns = (n_tokens - prefix) // candidate if candidate else 0
            is_grid = columns > 1 and candidate * columns == n_tokens - prefix
            if is_grid and candidate * width == columns * height:
                return prefix, (candidate, columns)
    return None


@lru_cache(maxsize=256)
def _interpolation(source: int, target: int) -> Tensor:
    """Return the weights (source, target) by which each source position is spread; the rows add up to 1."""
    identity = torch.eye(source, dtype=torch.float64).unsqueeze(1)
    if target > source:
        weights = torch.nn.functional.interpolate(identity, size=target, mode="linear", align_corners=False)
    else:
        weights = torch.nn.functional.adaptive_avg_pool1d(identity, target)
    weights = weights.squeeze(1)
    return weights / weights.sum(dim=1, keepdim=True)
