"""Relative Mahalanobis distance (Ren et al., 2021, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.errors import NotFittedError


class Rmds(Method):
    r"""Scores an image by its distance from the nearest class, less its distance from all inliers together.

    .. math::
        s(x) = \min_k (h - \mu_k)^\top \Sigma^{-1} (h - \mu_k) - (h - \mu_0)^\top \Sigma_0^{-1} (h - \mu_0)

    :math:`\Sigma` is the covariance within classes, :math:`\Sigma_0` that of all inliers, both inverted in float64; in
    directions without any variance (channels that are always 0) there is no distance.
    """

    name = "rmds"
    title = "RMDS"
    paper = "Ren et al., A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection, 2021"
    reads = frozenset({"feature", "labels"})

    def __init__(self) -> None:
        self._means: Tensor | None = None  # (K, F)
        self._centre = self._within = self._total = torch.zeros(0)

    def fit(self, context: Context) -> None:
        """Take class means and both covariances from the inliers."""
        feature, labels = context.inliers.feature.double(), context.inliers.labels
        present, own = torch.unique(labels, return_inverse=True)
        means = torch.stack([feature[own == index].mean(dim=0) for index in range(len(present))])
        self._means, self._centre = means, feature.mean(dim=0)
        self._within = _precision(feature - means[own])
        self._total = _precision(feature - self._centre)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._means is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        feature = examples.feature.double()
        nearest = torch.full((len(feature),), torch.inf, dtype=torch.float64)
        for mean in self._means:
            nearest = torch.minimum(nearest, _distance(feature - mean, self._within))
        return nearest - _distance(feature - self._centre, self._total)


def _precision(centred: Tensor) -> Tensor:
    precision: Tensor = torch.linalg.pinv(centred.T @ centred / len(centred), hermitian=True)
    return precision


def _distance(difference: Tensor, precision: Tensor) -> Tensor:
    return (difference @ precision * difference).sum(dim=1)
