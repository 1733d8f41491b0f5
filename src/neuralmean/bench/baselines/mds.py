"""Mahalanobis distances of normalised features: MDS++ and RMDS++ (Mueller & Hein, 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.errors import NotFittedError

PAPER = "Mueller & Hein, Mahalanobis++: Improving OOD Detection via Feature Normalization, ICML 2025"


@dataclass(frozen=True)
class NormalisedGaussians:
    """Class means (K, F) of unit-length features and a square root (F, F) of the precision."""

    means: Tensor
    whitening: Tensor

    @classmethod
    def of(cls, feature: Tensor, labels: Tensor) -> Self:
        """Estimate the Gaussians of features (N, F) and labels (N,).

        The covariance is that within classes or, with fewer than two images per class, that of all features. Its
        shrinkage (Ledoit & Wolf, 2004) keeps it regular with few images and vanishes with many.
        """
        from sklearn.covariance import ledoit_wolf

        unit = normalise(feature)
        present, own = torch.unique(labels, return_inverse=True)
        sums = torch.zeros(len(present), unit.shape[1], dtype=torch.float64).index_add_(0, own, unit)
        means = sums / own.bincount(minlength=len(present)).unsqueeze(1)
        few = len(unit) < 2 * len(present)
        covariance, _ = ledoit_wolf((unit - (unit.mean(dim=0) if few else means[own])).numpy(), assume_centered=True)
        values, vectors = torch.linalg.eigh(torch.from_numpy(covariance))
        kept = values > values.amax().clamp_min(0) * len(values) * torch.finfo(torch.float64).eps
        return cls(means, vectors[:, kept] / values[kept].sqrt())

    def nearest(self, feature: Tensor) -> Tensor:
        """Return the squared distance of each feature (N, F) to the nearest class mean, (N,)."""
        centre = self.means.mean(dim=0)
        points, means = ((one - centre) @ self.whitening for one in (normalise(feature), self.means))
        return torch.cdist(points, means).square().amin(dim=1)


class MdsPlus(Method):
    r"""Scores an image by the distance of its unit-length feature to the nearest class.

    .. math::
        s(x) = \min_k (z - \mu_k)^\top \Sigma^{-1} (z - \mu_k), \quad z = h(x) / \lVert h(x) \rVert_2
    """

    name = "mds++"
    title = "MDS++"
    paper = PAPER
    reads = frozenset({"feature", "labels"})

    def __init__(self) -> None:
        self._classes: NormalisedGaussians | None = None

    def fit(self, context: Context) -> None:
        """Estimate class means and covariance from the inliers."""
        self._classes = NormalisedGaussians.of(context.inliers.feature, context.inliers.labels)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._classes is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return self._classes.nearest(examples.feature)


class RmdsPlus(MdsPlus):
    r"""Scores an image by the same distance, less the distance to all inliers together.

    .. math::
        s(x) = \min_k (z - \mu_k)^\top \Sigma^{-1} (z - \mu_k) - (z - \mu_0)^\top \Sigma_0^{-1} (z - \mu_0)
    """

    name = "rmds++"
    title = "RMDS++"

    def __init__(self) -> None:
        super().__init__()
        self._all: NormalisedGaussians | None = None

    def fit(self, context: Context) -> None:
        """Estimate class means and both covariances from the inliers."""
        super().fit(context)
        feature = context.inliers.feature
        self._all = NormalisedGaussians.of(feature, torch.zeros(len(feature), dtype=torch.int64))

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        nearest = super().score(examples)
        if self._all is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return nearest - self._all.nearest(examples.feature)


def normalise(feature: Tensor) -> Tensor:
    """Return features (N, F) scaled to unit length, in float64; all-zero features stay zero."""
    feature = feature.double()
    length: Tensor = feature.norm(dim=1, keepdim=True)
    return feature / length.clamp_min(1e-12)
