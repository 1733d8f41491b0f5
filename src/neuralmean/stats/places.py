r"""Splits the contribution of each layer to a score over its positions: pure functions of activations.

A channel mean is a sum over positions, so the contribution of a layer to a score can be split over its positions without
a remainder. With :math:`a_{cp}` the activation of channel c at position p and :math:`m_c` its mean over the training data, the
distance of position p in a layer of C channels is

.. math::
    d_p = \sum_c \frac{(a_{cp} - m_c)^4}{\sum_q (a_{cq} - m_c)^4},

and without anything further, position p receives its share of :math:`d_p`. The split that is linear in :math:`a_{cp} - m_c` adds
up just as well, but in it the structure of any natural image hides the unusual place.

Each position of a deep layer has seen most of an image. For images, therefore, :math:`\sqrt[4]{d_p}` is averaged over the
surroundings of each position, and multiplied by how much these surroundings stand out from the rest of the image in the first
layer, which has seen only the place itself. Shares are in proportion to the fourth power of the product: surroundings are wide.

A layer that lowers the score says of no place that it is strange: its contribution is spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

SURROUNDINGS = 1 / 4  # deviation of the surroundings of a position, as a share of an image's shorter side
BLUR = 1 / 16  # the same for the map as a whole: deep layers have few positions
_MOST_PREFIX_TOKENS = 16  # class and register tokens before the patches of a vision transformer
_LEAST_POSITIONS = 4  # for each channel, to learn how the channels of one image vary together
_FARTHEST = 1e8  # distance beyond which all count alike: the fourth power must not overflow
_RIDGE = 1e-4  # added to the correlations of channels, of which some are the same


def distances(activation: Tensor, centre: Tensor, mask: Tensor | None = None, *, channels_last: bool = False) -> Tensor:
    """Return the distance of each position from the training data's channel means, (N, P).

    Args:
        activation: Shape (N, C, ...), or (N, ..., C) with `channels_last`.
        centre: Mean of each channel over the training data, shape (C,).
        mask: Shape (N, P): the positions that count.
        channels_last: Whether the channels are the last dimension.

    Example:
        >>> activation = torch.tensor([[[1.0, 3.0], [0.0, 0.0]]])  # two channels, two positions
        >>> distances(activation, torch.tensor([1.0, 0.0]))
        tensor([[0., 1.]])
    """
    wide = activation.float()
    rows = wide.reshape(len(wide), -1, wide.shape[-1]) if channels_last else wide.reshape(*wide.shape[:2], -1)
    away = rows - (centre if channels_last else centre[:, None])
    powers = away.clamp_(-_FARTHEST, _FARTHEST).square_().square_()
    powers = powers.transpose(1, 2) if channels_last else powers
    if mask is not None:
        powers = powers * mask.unsqueeze(1)
    parts = powers.sum(dim=2).clamp_min_(1e-38).reciprocal_()  # a channel without any distance says nothing of places
    return torch.bmm(parts.unsqueeze(1), powers).squeeze(1)


def standing_out(activation: Tensor) -> Tensor | None:
    """Return how much the surroundings of each position of a layer stand out from the rest of the image, (N, H, W).

    The channels of a position are compared with their mean over the image, in units of how the channels vary over the image
    together (the Mahalanobis distance, as in Reed and Yu, 1990). The eighth power of this distance is averaged over the
    surroundings, so that what stands out most decides. The outermost positions, which convolutions have padded, count as their
    neighbours.

    Args:
        activation: Shape (N, C, H, W).

    Returns:
        Maps that sum to 1 each; None if there are too few positions to tell how the channels vary.
    """
    n, channels, height, width = activation.shape
    if height * width < _LEAST_POSITIONS * channels or min(height, width) < 3:
        return None
    rows = activation.float().flatten(2)
    mean = rows.mean(dim=2, keepdim=True)
    rows = rows - mean
    # Constant channels, up to rounding, and those that overflow say nothing of places.
    least = 1e-6 * mean.abs() + 1e-12
    rows = (rows / rows.square().mean(dim=2, keepdim=True).sqrt().maximum(least)).nan_to_num(0.0, 0.0, 0.0)
    together = rows @ rows.transpose(1, 2) / rows.shape[2] + _RIDGE * torch.eye(channels, device=rows.device)
    whitened = torch.linalg.solve_triangular(torch.linalg.cholesky(together), rows, upper=False)
    powers = whitened.square().sum(dim=1).pow(4).reshape(n, 1, height, width)
    inner = torch.nn.functional.pad(powers[:, :, 1:-1, 1:-1], (1, 1, 1, 1), mode="replicate")[:, 0]
    inner = inner - inner.amin(dim=(1, 2), keepdim=True)  # nothing stands out of an even image
    return _around(_normalised(inner.cpu().double()))


def split_over_positions(
    strange: Tensor, shares: Tensor, mask: Tensor | None = None, place: Tensor | None = None
) -> Tensor:
    """Return the contribution of each position of a layer to the score, float64 (N, *positions); they sum to that of the layer.

    Args:
        strange: Distance of each position, as `distances` returns it, shape (N, *positions).
        shares: Contribution of the layer to the score, shape (N,).
        mask: Shape (N, P): the positions that count.
        place: How much each position stands out, of the same shape.

    Example:
        >>> split_over_positions(torch.tensor([[0.0, 0.5]]), torch.tensor([6.0]))
        tensor([[0., 6.]], dtype=torch.float64)
    """
    weights = strange.double()
    if place is not None:
        weights = (_around(weights.sqrt().sqrt()) * place).square().square()
    even = torch.ones_like(weights) if mask is None else mask.to(weights.dtype)
    weights = torch.where(_total(weights) > 0, weights, even)
    share = shares.double().reshape(-1, *[1] * (weights.dim() - 1))
    return share.clamp_min(0) * _normalised(weights) + share.clamp_max(0) * _normalised(even)


def _around(maps: Tensor) -> Tensor:
    """Spread each position of maps (N, H, W) over its surroundings, keeping the sum of each map."""
    return enlarge(maps, maps.shape[1:], blur=SURROUNDINGS)


def _total(weights: Tensor) -> Tensor:
    """Return the sum of each map, (N, 1, ...)."""
    return weights.reshape(len(weights), -1).sum(dim=1).reshape(-1, *[1] * (weights.dim() - 1))


def _normalised(weights: Tensor) -> Tensor:
    return weights / _total(weights).clamp_min(1e-300)


def enlarge(maps: Tensor, size: Sequence[int], *, blur: float = 0.0) -> Tensor:
    """Enlarge (or reduce) maps (N, *positions) to (N, *size) by linear interpolation that keeps the sum of each map.

    Args:
        maps: The maps.
        size: Positions of the result.
        blur: Deviation, as a share of the shortest side, of a Gaussian that each position is spread by as well.

    Example:
        >>> enlarge(torch.tensor([[1.0, 3.0]]), (4,)).sum().item()
        4.0
    """
    for dim, target in enumerate(size, start=1):
        if maps.shape[dim] != target or blur:
            weights = _interpolation(maps.shape[dim], target, blur * min(size)).to(maps)
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
def _interpolation(source: int, target: int, deviation: float) -> Tensor:
    """Return the weights (source, target) by which each source position is spread; the rows add up to 1."""
    identity = torch.eye(source, dtype=torch.float64).unsqueeze(1)
    if target > source:
        weights = torch.nn.functional.interpolate(identity, size=target, mode="linear", align_corners=False)
    else:
        weights = torch.nn.functional.adaptive_avg_pool1d(identity, target)
    weights = weights.squeeze(1)
    weights = weights / weights.sum(dim=1, keepdim=True)
    return weights @ _gaussian(target, deviation) if deviation else weights


def _gaussian(length: int, deviation: float) -> Tensor:
    """Return the weights (length, length) by which each position is spread over all; the rows add up to 1."""
    places = torch.arange(length, dtype=torch.float64)
    weights = torch.exp(-0.5 * ((places[:, None] - places) / deviation).square())
    return weights / weights.sum(dim=1, keepdim=True)
