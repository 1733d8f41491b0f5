"""Gaussians with one mean per class and one covariance for all: what the Mahalanobis methods share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gaussians:
    """Class means (K, C) and the shared precision (C, C), in float64."""

    means: Tensor
    precision: Tensor

    @classmethod
    def of(cls, features: Tensor, labels: Tensor) -> Gaussians:
        r"""Estimate them from features (N, C) and labels (N,) (Lee et al. 2018, Eq. 1).

        .. math::
            \hat\mu_c = \frac{1}{N_c} \sum_{y_i = c} f(x_i), \quad
            \hat\Sigma = \frac1N \sum_c \sum_{y_i = c} (f(x_i) - \hat\mu_c)(f(x_i) - \hat\mu_c)^\top

        The precision is the pseudo-inverse, as in the authors' code: channels that are the same everywhere, or too few
        images for all channels, are no obstacle. Classes without an image are left out.
        """
        features = features.double()
        classes, where = torch.unique(labels, return_inverse=True)
        sums = torch.zeros(len(classes), features.shape[1], dtype=torch.float64).index_add_(0, where, features)
        means = sums / where.bincount(minlength=len(classes)).unsqueeze(1)
        centred = features - means[where]
        return cls(means, torch.linalg.pinv(centred.T @ centred / len(features), hermitian=True))

    def distances(self, features: Tensor) -> Tensor:
        r"""Squared Mahalanobis distance to the closest class, shape (N,): :math:`-M(x)` of Lee et al. 2018, Eq. 2."""
        centred = features.double().unsqueeze(1) - self.means.to(features.device)  # (N, K, C)
        return ((centred @ self.precision.to(features.device)) * centred).sum(dim=2).amin(dim=1)
