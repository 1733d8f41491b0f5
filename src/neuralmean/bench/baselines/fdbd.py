"""Fast decision-boundary distance (Liu & Qin, ICML 2024, Eq. 6)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.heads import LinearHead, read_head
from neuralmean.errors import NotFittedError


class Fdbd(Method):
    r"""Scores an image by its feature's mean distance to the decision boundaries, relative to that from the mean.

    .. math::
        s(x) = -\frac{1}{K - 1} \sum_{k \ne \hat k}
               \frac{f_{\hat k}(x) - f_k(x)}{\lVert w_{\hat k} - w_k \rVert \, \lVert h(x) - \mu \rVert}

    Not taken from pytorch-ood, which holds the differences of all pairs of weights at once: 5 GB for 1,000 classes and
    1,280 features.
    """

    name = "fdbd"
    title = "fDBD"
    paper = "Liu & Qin, Fast Decision Boundary based Out-of-Distribution Detector, ICML 2024"
    reads = frozenset({"feature"})

    def __init__(self) -> None:
        self._head: LinearHead | None = None
        self._mean = self._apart = torch.zeros(0)

    def fit(self, context: Context) -> None:
        """Compute the mean of the inliers' features and the distances between the weights of all pairs of classes."""
        self._head = read_head(context.trained)
        self._mean = context.inliers.feature.double().mean(dim=0)
        weight = self._head.weight
        apart = torch.cdist(weight, weight, compute_mode="donot_use_mm_for_euclid_dist")
        self._apart = apart.fill_diagonal_(1.0)  # for the class itself, the difference of logits is 0

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._head is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        feature = examples.feature.double()
        logits = self._head(feature)
        largest, own = logits.max(dim=1, keepdim=True)
        distances = ((largest - logits) / self._apart[own[:, 0]]).sum(dim=1) / (logits.shape[1] - 1)
        length: Tensor = (feature - self._mean).norm(dim=1)
        return -distances / length.clamp_min(1e-12)
