r"""What held-out data looks like, channel by channel: what a stream of inputs is compared with.

Of n inputs that are like the held-out data, the mean of a channel lies off by chance, by :math:`1/\sqrt n` of its deviation.
How far a whole layer may lie off depends on how its channels move: many independent ones even each other out, channels that all
say the same do not. The eigenvalues of their correlations tell.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from neuralmean.moments import Moments

_SAMPLE = 256  # rows that correlations are taken from, at least, where there are as many


@dataclass(frozen=True, eq=False)
class Baseline:
    r"""Moments of the vectors of held-out data, and how much the channels of each layer move together.

    With :math:`\lambda_i` the eigenvalues of the correlations of a layer's channels over their sum:

    Attributes:
        moments: Of the columns, (D,).
        squares: :math:`\sum_i \lambda_i^2` of each layer, (L,): 1 over how many independent channels it is worth.
        largest: At least :math:`\max_i \lambda_i`, and hardly more, (L,).
    """

    moments: Moments
    squares: Tensor
    largest: Tensor

    @classmethod
    def bare(cls, moments: Moments, n_layers: int) -> Baseline:
        """Return a baseline of which only moments are known: the channels of a layer might all move as one."""
        ones = torch.ones(n_layers, dtype=torch.float64)
        return cls(moments, ones, ones)

    def limit(self, log_odds: float) -> Tensor:
        r"""Return how large the mean square move of each layer may be by chance, in units of that of one channel, (L,).

        It is larger with a probability of at most :math:`e^{-x}`, for x = `log_odds`. The move is a sum of chi-squares with
        weights :math:`\lambda_i` (Laurent and Massart, Ann. Statist. 28, 2000, Lemma 1), and never likelier to be large than a
        single one:

        .. math::
            \min\Big(2x,\ 1 + 2 \sqrt{x \textstyle\sum_i \lambda_i^2} + 2 x \max_i \lambda_i\Big)

        Example:
            >>> Baseline(Moments.empty(4), torch.tensor([1.0, 0.25]), torch.tensor([1.0, 0.25])).limit(9.0)
            tensor([18.0000,  8.5000])
        """
        loose = 1 + 2 * (log_odds * self.squares).sqrt() + 2 * log_odds * self.largest
        return loose.clamp_max(2 * log_odds)


class Seen:
    """Makes a `Baseline` of vectors as they come.

    Args:
        columns: The layer of each column, (D,).
        n_layers: How many layers there are.
    """

    def __init__(self, columns: Tensor, n_layers: int) -> None:
        self._columns, self._n_layers = columns, n_layers
        self._moments = Moments.empty(len(columns))
        self._sample: list[Tensor] = []  # every `_step`-th row
        self._step = 1

    def add(self, vectors: Tensor) -> None:
        """Take more rows in, (N, D)."""
        start = -self._moments.count % self._step
        self._moments += Moments.of(vectors)
        self._sample.append(vectors[start :: self._step].detach().cpu().clone())
        while sum(map(len, self._sample)) >= 2 * _SAMPLE:
            self._sample, self._step = [torch.cat(self._sample)[::2].clone()], 2 * self._step

    def baseline(self) -> Baseline:
        """Return what was seen."""
        sample = torch.cat(self._sample)
        found = [_together(sample[:, self._columns == layer].double()) for layer in range(self._n_layers)]
        squares, largest = (torch.tensor(numbers, dtype=torch.float64) for numbers in zip(*found, strict=True))
        return Baseline(self._moments, squares, largest)


def _together(rows: Tensor) -> tuple[float, float]:
    """Return what a `Baseline` has of the eigenvalues of a layer, given its rows, (N, C).

    The largest of some numbers is at most the fourth root of the sum of their fourth powers.
    """
    rows = rows - rows.mean(dim=0)
    lengths = rows.norm(dim=0)
    rows = rows / torch.where(lengths > 0, lengths, math.inf)  # dead channels are 0
    products = (
        rows.T @ rows if rows.shape[1] <= len(rows) else rows @ rows.T
    )  # whose eigenvalues are the same, but for zeros
    total = products.trace().item()
    if total <= 0:
        return 1.0, 1.0
    products = products / total
    square = products.square().sum().item()
    fourth = (products @ products).square().sum().item()
    return min(1.0, square), min(1.0, fourth**0.25)
