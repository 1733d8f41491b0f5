"""The paper's Ours-Avg: the mean magnitude of the discrepancy vector."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.scorers.base import VectorScorer


class AverageScorer(VectorScorer):
    r"""Scores an input by the average magnitude of its vector; nothing to learn.

    .. math::
        s(x) = \frac{1}{D} \sum_c |\mathrm{NMD}_c(x)|

    (Dong et al., CVPR 2022, Sec. 3.2, "Ours-Avg".)
    """

    name = "average"

    def fit(self, inliers: Tensor, outliers: Tensor | None = None) -> Self:
        """Return itself: there is nothing to learn."""
        return self

    def score(self, vectors: Tensor) -> Tensor:
        """Score each row of (N, D), shape (N,); higher = more OOD."""
        total: Tensor = torch.linalg.vector_norm(vectors, ord=1, dim=1)  # one kernel; `abs` would be another
        return total / vectors.shape[1]

    def contributions(self, vectors: Tensor) -> Tensor:
        """Return the contribution of each channel, shape (N, D)."""
        return vectors.abs() / vectors.shape[1]
