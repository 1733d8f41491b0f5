"""Relative Mahalanobis distance (Ren et al., 2021, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.gaussians import Gaussians
from neuralmean.errors import NotFittedError


class Rmds(Method):
    r"""Scores an image by its distance to the nearest class minus its distance to the distribution of all inliers.

    .. math::
        s(x) = \min_k (h - \mu_k)^\top \Sigma^{-1} (h - \mu_k) - (h - \mu_0)^\top \Sigma_0^{-1} (h - \mu_0)

    :math:`\Sigma` is the covariance within classes and :math:`\Sigma_0` that of all inliers, both inverted in float64;
    directions without variance (channels that are always 0) are ignored.
    """

    name = "rmds"
    title = "RMDS"
    paper = "Ren et al., A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection, 2021"
    reads = frozenset({"feature", "labels"})

    version = 2

    def __init__(self) -> None:
        self._classes: Gaussians | None = None
        self._all: Gaussians | None = None

    def fit(self, context: Context) -> None:
        """Estimate class means and both covariances from the inliers."""
        feature, labels = context.inliers.feature, context.inliers.labels
        self._classes = Gaussians.of(feature, labels)
        self._all = Gaussians.of(feature, torch.zeros_like(labels))

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._classes is None or self._all is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return self._classes.distances(examples.feature) - self._all.distances(examples.feature)
