"""Gaussians with one mean per class and a shared covariance, for the Mahalanobis methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussians:
    """Class means (K, C) and a matrix (C, R) that whitens the shared covariance, in float64."""

    means: Tensor
    whitening: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor) -> Gaussians:
        r"""Estimate the Gaussians of features (N, C) and labels (N,) (Lee et al. 2018, Eq. 1).

        .. math::
            \hat\mu_c = \frac{1}{N_c} \sum_{y_i = c} f(x_i), \quad
            \hat\Sigma = \frac1N \sum_c \sum_{y_i = c} (f(x_i) - \hat\mu_c)(f(x_i) - \hat\mu_c)^\top

        The inverse is the pseudo-inverse, as in the authors' code, so that constant channels and few images are no
        problem. Classes without images are skipped. With fewer than two images per class, the covariance within classes
        cannot be estimated; that of all features is used.
        """
        features = features.double()
        classes, where = torch.unique(labels, return_inverse=True)
        sums = torch.zeros(len(classes), features.shape[1], dtype=torch.float64).index_add_(0, where, features)
        means = sums / where.bincount(minlength=len(classes)).unsqueeze(1)
        few = len(features) < 2 * len(classes)
        centred = features - (features.mean(dim=0) if few else means[where])
        values, vectors = torch.linalg.eigh(centred.T @ centred / len(features))
        kept = values > values.amax().clamp_min(0) * len(values) * torch.finfo(torch.float64).eps
        return cls(means, vectors[:, kept] / values[kept].sqrt())

    @property
    def precision(self) -> Tensor:
        """Pseudo-inverse of the covariance, shape (C, C)."""
        return self.whitening @ self.whitening.T

    def distances(self, features: Tensor) -> Tensor:
        r"""Squared Mahalanobis distance to the closest class, shape (N,): :math:`-M(x)` of Lee et al. 2018, Eq. 2."""
        centre = self.means.mean(dim=0)  # subtracted first, so that differences of squares keep their digits
        whitening = self.whitening.to(features.device)
        points = (features.double() - centre.to(features.device)) @ whitening  # (N, R)
        means = (self.means - centre).to(features.device) @ whitening  # (K, R)
        squares = (points**2).sum(dim=1, keepdim=True) - 2 * points @ means.T + (means**2).sum(dim=1)
        return squares.clamp_min(0).amin(dim=1)
