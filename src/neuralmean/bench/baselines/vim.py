"""Virtual-logit matching (Wang et al., CVPR 2022, Eq. 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.heads import LinearHead, read_head
from neuralmean.errors import NotFittedError


class Vim(Method):
    r"""Scores an image by the part of its feature outside the inliers' principal space, and by its energy.

    .. math::
        s(x) = \alpha \lVert h(x)^{P^\perp} \rVert - \log \sum_k \exp f_k(x)

    Features are centred at the point where all logits are 0; :math:`\alpha` scales the first term of the inliers to
    their largest logit. The dimension of the principal space is the authors': 1,000 for at least 2,048 features, 512
    for at least 768, otherwise half of them.

    Not taken from pytorch-ood, which computes in float32: with channels that are 0 for every inlier, its residual is
    rounding noise. This computes in float64 and drops such channels.
    """

    name = "vim"
    title = "ViM"
    paper = "Wang et al., ViM: Out-Of-Distribution with Virtual-logit Matching, CVPR 2022"
    reads = frozenset({"feature"})
    version = 2

    def __init__(self) -> None:
        self._head: LinearHead | None = None
        self._alive = self._origin = self._residual = torch.zeros(0)
        self.alpha = 0.0

    def fit(self, context: Context) -> None:
        """Compute the principal space of the inliers' features and the scale of the residual."""
        head = self._head = read_head(context.trained)
        feature = context.inliers.feature.double()
        self._alive = (feature != feature[0]).any(dim=0)
        self._origin = -(torch.linalg.pinv(head.weight) @ head.bias)[self._alive]
        centred = feature[:, self._alive] - self._origin
        _, vectors = torch.linalg.eigh(centred.T @ centred / len(centred))  # eigenvalues ascend
        dimension = min(principal_dimension(feature.shape[1]), vectors.shape[1] - 1)
        self._residual = vectors[:, : vectors.shape[1] - dimension]
        outside = (centred @ self._residual).norm(dim=1).mean()
        self.alpha = float(head(feature).amax(dim=1).mean() / outside.clamp_min(1e-12))

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._head is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        feature = examples.feature.double()
        outside: Tensor = ((feature[:, self._alive] - self._origin) @ self._residual).norm(dim=1)
        energy: Tensor = self._head(feature).logsumexp(dim=1)
        return self.alpha * outside - energy


def principal_dimension(width: int) -> int:
    """Return the dimension of the principal space of a feature.

    Example:
        >>> [principal_dimension(width) for width in (64, 768, 2048)]
        [32, 512, 1000]
    """
    return 1000 if width >= 2048 else 512 if width >= 768 else width // 2
