"""Columns with mean 0 and standard deviation 1, as sklearn's StandardScaler makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from neuralmean.errors import InputError

_BLOCK = 1024  # rows summed in float32 before they join the float64 sum
_CONSTANT = 1e-6  # a float32 column that varies by less than this share of its mean contains only rounding errors


def column_scale(blocks: Callable[[], Iterable[Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and standard deviation of each column, float32 (D,) each, and which columns vary, bool (D,).

    The deviation of a constant column is 1. Two passes, so that columns far from zero lose no digits.

    Args:
        blocks: Called once a pass; gives float32 rows, shapes (n, D), at least one row in all.

    Raises:
        InputError: A value is NaN or infinite.
    """
    count, total = 0, torch.zeros((), dtype=torch.float64)
    for part in _parts(blocks):
        count, total = count + len(part), total + part.sum(dim=0).double()
    mean = (total / count).float()
    squares = torch.zeros((), dtype=torch.float64)
    for part in _parts(blocks):
        squares = squares + (part - mean).square_().sum(dim=0).double()
    std = (squares / count).sqrt().float()
    finite = std.isfinite()  # an infinite mean makes an infinite deviation
    if not finite.all():
        bad = (~finite).nonzero()[:, 0].tolist()
        raise InputError(
            f"Expected finite rows to fit on, but got NaN or Inf in {len(bad)} columns, the first is {bad[0]}."
        )
    varies = std > _CONSTANT * mean.abs()
    return mean, torch.where(varies, std, torch.ones_like(std)), varies


def _parts(blocks: Callable[[], Iterable[Tensor]]) -> Iterable[Tensor]:
    return (part for block in blocks() for part in torch.split(block, _BLOCK))
