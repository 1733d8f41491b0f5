r"""Trend of means and variances with size: of a box in pixels, or a text in tokens.

A mean over few positions varies more than one over many. The trend is piecewise linear in the logarithm of the size, so
sizes within one range differ too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuralmean.data.table import Blocks

_RATIO = math.sqrt(2.0)  # ratio of the limits of a range
_MOST = 16


def size_edges(least: float, most: float, *, ranges: int = _MOST) -> Tensor:
    """Return the limits of ranges of sizes, float64 (B + 1,), each about 1.4 times the previous one, or more for a wide span.

    Example:
        >>> [round(edge, 3) for edge in size_edges(8.0, 32.0).tolist()]
        [8.0, 11.314, 16.0, 22.627, 32.0]
    """
    least, most = max(least, 1e-9), max(most, least * (1 + 1e-9), 1e-9)
    count = max(1, min(ranges, round(math.log(most / least) / math.log(_RATIO))))
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    return torch.exp(math.log(least) + steps * math.log(most / least))


def range_of(sizes: Tensor, edges: Tensor) -> Tensor:
    """Return the index of the range of each size, (n,); sizes beyond the limits belong to the first and last range."""
    return torch.bucketize(sizes.double(), edges[1:-1].contiguous(), right=True)


@dataclass(frozen=True, eq=False)
class SizeTrend:
    """Mean and variance of each column by size.

    Attributes:
        edges: Limits of the ranges of sizes, float64 (B + 1,).
        mean: In the middle of each range, float64 (B, D).
        log_variance: Logarithm of the variance in the middle of each range, float64 (B, D).
    """

    edges: Tensor
    mean: Tensor
    log_variance: Tensor

    @classmethod
    def of(cls, rows: Blocks, sizes: Tensor, edges: Tensor) -> SizeTrend:
        """Learn from rows (n, D) and the size of each, (n,): least squares for the means, then the residuals in each range."""
        ranges, bases = range_of(sizes, edges), _hats(sizes, edges)
        count = len(edges) - 1
        products = torch.zeros(count, rows.width, dtype=torch.float64)
        for block, base in rows.beside(bases):
            products += base.T @ block.double()
        gram = bases.T @ bases
        # A range without rows takes the values of its neighbours.
        rough = torch.diff(torch.eye(count, dtype=torch.float64), dim=0)
        gram = gram + 1e-6 * len(rows) * (rough.T @ rough) + 1e-9 * torch.eye(count, dtype=torch.float64)
        mean = torch.linalg.solve(gram, products)
        squares, counts = torch.zeros_like(mean), torch.bincount(ranges, minlength=count)
        for part in rows.parts():
            residual = (rows[part].double() - bases[part] @ mean).square()
            squares.index_add_(0, ranges[part], residual)
        overall = squares.sum(dim=0) / max(1, len(rows))
        # The variance of a range with fewer than about ten rows is shrunk towards that of all rows.
        variance = (squares + 4 * overall) / (counts + 4).unsqueeze(1)
        floor = (1e-6 * overall.mean()).clamp_min(1e-24)
        return cls(edges, mean, variance.clamp_min(floor).log())

    def standardised(self, rows: Tensor, sizes: Tensor) -> Tensor:
        """Standardise rows (n, D) by the mean and deviation at their sizes, (n,)."""
        base = _hats(sizes, self.edges)
        return ((rows.double() - base @ self.mean) * torch.exp(base @ self.log_variance / -2)).to(rows.dtype)


def _hats(sizes: Tensor, edges: Tensor) -> Tensor:
    """Return the weight of each range in the trend at each size, float64 (n, B); rows sum to 1."""
    count = len(edges) - 1
    weights = torch.zeros(len(sizes), count, dtype=torch.float64)
    if count == 1:
        return weights + 1
    logs = edges.double().log()
    middles = (logs[1:] + logs[:-1]) / 2
    # The trend is extrapolated by half a range at both ends, and constant beyond.
    places = ((sizes.double().clamp_min(1e-9).log() - middles[0]) / (middles[1] - middles[0])).clamp(-0.5, count - 0.5)
    below = places.floor().clamp(0, count - 2).long()
    share = places - below
    rows = torch.arange(len(sizes))
    weights[rows, below] = 1 - share
    weights[rows, below + 1] = share
    return weights
