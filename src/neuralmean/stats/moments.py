"""Streaming mean and variance per channel: float64, and exactly mergeable."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuralmean.errors import InputError


@dataclass(frozen=True, eq=False)
class Moments:
    r"""Count, mean and summed squared deviation of the rows seen so far.

    Two of them are merged by the pairwise rule of Chan, Golub and LeVeque (1983): with :math:`d = m_b - m_a` and
    :math:`n = n_a + n_b`,

    .. math::
        m = m_a + d\, n_b / n, \qquad S = S_a + S_b + d^2 n_a n_b / n

    The state is float64: activations far from zero cancel in float32.

    Example:
        >>> both = Moments.of(torch.tensor([[1.0], [3.0]])) + Moments.of(torch.tensor([[8.0]]))
        >>> both.count, both.mean.item(), both.variance.item()
        (3, 4.0, 8.666666666666666)
    """

    count: int
    mean: Tensor  # (C,)
    m2: Tensor  # (C,)

    @classmethod
    def empty(cls, channels: int) -> Moments:
        """Moments of no rows, the neutral element of `+`."""
        return cls(0, torch.zeros(channels, dtype=torch.float64), torch.zeros(channels, dtype=torch.float64))

    @classmethod
    def of(cls, rows: Tensor) -> Moments:
        """Moments of one batch of rows, shape (N, C)."""
        if rows.dim() != 2:
            raise InputError(f"Expected rows of shape (N, C), but got shape {tuple(rows.shape)}.")
        if len(rows) == 0:
            return cls.empty(rows.shape[1])
        rows = rows.detach().cpu().double()
        mean = rows.mean(dim=0)
        return cls(len(rows), mean, (rows - mean).square().sum(dim=0))

    @classmethod
    def of_blocks(cls, blocks: Iterable[Tensor], channels: int) -> Moments:
        """Moments of rows in blocks of shape (n, C)."""
        return sum(map(cls.of, blocks), cls.empty(channels))

    def __add__(self, other: Moments) -> Moments:
        if not isinstance(other, Moments):
            return NotImplemented
        if self.mean.shape != other.mean.shape:
            raise InputError(
                f"Expected moments of the same channels, but got {len(self.mean)} and {len(other.mean)} of them."
            )
        count = self.count + other.count
        if count == 0:
            return self
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * (other.count / count),
            self.m2 + other.m2 + delta.square() * (self.count * other.count / count),
        )

    def __radd__(self, other: Any) -> Moments:
        return self if other == 0 else NotImplemented  # so that `sum(moments)` works

    @property
    def variance(self) -> Tensor:
        """Population variance per channel, shape (C,)."""
        if self.count == 0:
            raise InputError("Expected moments of at least one row, but got none. Add rows first.")
        return self.m2 / self.count

    @property
    def std(self) -> Tensor:
        """Population standard deviation per channel, shape (C,)."""
        return self.variance.sqrt()
