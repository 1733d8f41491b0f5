r"""Statistics of held-out data, channel by channel, with which a stream of inputs is compared.

The mean of a channel over n inputs like the held-out data differs by chance, by :math:`1/\sqrt n` of its deviation.
How much a whole layer may differ depends on the correlations of its channels: independent deviations average out, identical
ones do not. The eigenvalues of the correlations measure this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from neuralmean.stats.discrepancy import sum_by_layer
from neuralmean.stats.moments import Moments

_SAMPLE = 256  # rows from which correlations are computed
_DEAD = 1e-3  # relative to the mean deviation of a layer's channels; smaller variation is rounding


@dataclass(frozen=True, eq=False)
class HeldOutProfile:
    r"""Moments of the vectors of held-out data, and how correlated the channels of each layer are.

    With :math:`\lambda_i` the eigenvalues of the correlations of a layer's live channels over their sum:

    Attributes:
        columns: The layer of each column, (D,).
        moments: Moments of the columns, (D,).
        squares: :math:`\sum_i \lambda_i^2` of each layer, (L,): the inverse of its effective number of independent channels.
        largest: A tight upper bound of :math:`\max_i \lambda_i`, (L,).
    """

    columns: Tensor
    moments: Moments
    squares: Tensor
    largest: Tensor

    @classmethod
    def bare(cls, columns: Tensor, moments: Moments, n_layers: int) -> HeldOutProfile:
        """Return a profile with moments only, in which the channels of a layer may be fully correlated."""
        ones = torch.ones(n_layers, dtype=torch.float64)
        return cls(columns, moments, ones, ones)

    def shifts(self, rows: Moments) -> Tensor:
        """Return the squared shift of each channel's mean in standard deviations, (D,); dead channels do not move.

        Example:
            >>> held_out = Moments.of(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
            >>> profile = HeldOutProfile.bare(torch.tensor([0, 0]), held_out, 1)
            >>> profile.shifts(Moments.of(torch.tensor([[5.0, 6.0]])))
            tensor([9., 0.], dtype=torch.float64)
        """
        return torch.where(self._alive, (rows.mean - self.moments.mean) / self.moments.std, 0.0).square()

    def layer_shifts(self, parts: Sequence[Moments]) -> Tensor:
        """Return the mean squared shift of the live channels of each layer, (parts, L)."""
        totals = self._sum(torch.stack([self.shifts(part) for part in parts]))
        return totals / self._sum(self._alive.double()[None]).clamp_min(1)

    @cached_property
    def _alive(self) -> Tensor:
        counts = self._sum(torch.ones_like(self.moments.mean)[None])
        usual = self._sum(self.moments.std[None]) / counts.clamp_min(1)
        return self.moments.std > (_DEAD * usual[0][self.columns]).clamp_min(1e-12)

    def _sum(self, rows: Tensor) -> Tensor:
        return sum_by_layer(rows, self.columns, len(self.squares))

    def limit(self, log_odds: float) -> Tensor:
        r"""Return a bound on the mean squared shift of each layer by chance, in units of that of one channel, (L,).

        It is exceeded with a probability of at most :math:`e^{-x}`, for x = `log_odds` and normal means. The shift is a
        sum of chi-squares with weights :math:`\lambda_i` (Laurent and Massart, Ann. Statist. 28, 2000, Lemma 1), and
        never likelier to be large than a single one:

        .. math::
            \min\Big(2x,\ 1 + 2 \sqrt{x \textstyle\sum_i \lambda_i^2} + 2 x \max_i \lambda_i\Big)
        """
        loose = 1 + 2 * (log_odds * self.squares).sqrt() + 2 * log_odds * self.largest
        return loose.clamp_max(2 * log_odds)


class ProfileBuilder:
    """Builds a `HeldOutProfile` from vectors that arrive in parts, whatever the parts.

    Args:
        columns: The layer of each column, (D,).
        n_layers: How many layers there are.
    """

    def __init__(self, columns: Tensor, n_layers: int) -> None:
        self._columns, self._n_layers = columns, n_layers
        self._moments = Moments.empty(len(columns))
        # The rows with the smallest seeded random keys are a random sample.
        self._random = np.random.default_rng(0)
        self._keys, self._rows = list[Tensor](), list[Tensor]()
        self._n_kept, self._end = 0, math.inf  # rows with larger keys are no longer needed

    def add(self, vectors: Tensor) -> None:
        """Add rows, (N, D)."""
        self._moments += Moments.of(vectors)
        keys = torch.from_numpy(self._random.random(len(vectors)))
        wanted = (keys < self._end).nonzero()[:, 0]
        if len(wanted):
            self._keys.append(keys[wanted])
            self._rows.append(vectors.detach()[wanted.to(vectors.device)].cpu())
            self._n_kept += len(wanted)
        if self._n_kept >= 2 * _SAMPLE:
            self._thin()

    def _thin(self) -> None:
        keys, order = torch.cat(self._keys).sort()
        rows = torch.cat(self._rows)[order[:_SAMPLE]]
        self._keys, self._rows, self._n_kept = [keys[:_SAMPLE]], [rows], len(rows)
        if len(rows) == _SAMPLE:
            self._end = keys[_SAMPLE - 1].item()

    def profile(self) -> HeldOutProfile:
        """Return the profile of the rows so far."""
        self._thin()
        (sample,) = self._rows
        found = [_together(sample[:, self._columns == layer].double()) for layer in range(self._n_layers)]
        squares, largest = (torch.tensor(numbers, dtype=torch.float64) for numbers in zip(*found, strict=True))
        return HeldOutProfile(self._columns, self._moments, squares, largest)


def _together(rows: Tensor) -> tuple[float, float]:
    """Return `squares` and `largest` of a layer, given its rows, (N, C).

    The largest of some numbers is at most the fourth root of the sum of their fourth powers.
    """
    rows = rows - rows.mean(dim=0)
    lengths = rows.norm(dim=0)
    alive = lengths > _DEAD * lengths.mean()
    if not alive.any():
        return 1.0, 1.0
    rows = rows[:, alive] / lengths[alive]
    # The eigenvalues of both are the same, but for zeros.
    products = rows.T @ rows if rows.shape[1] <= len(rows) else rows @ rows.T
    products = products / products.trace()
    square = products.square().sum().item()
    fourth = (products @ products).square().sum().item()
    return min(1.0, square), min(1.0, fourth**0.25)
