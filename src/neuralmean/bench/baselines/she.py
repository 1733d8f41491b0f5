"""Simplified Hopfield energy (Zhang et al., ICLR 2023, Eq. 8)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.errors import NotFittedError


class She(Method):
    r"""Scores an image by the inner product of its feature with the mean feature of its predicted class.

    .. math::
        s(x) = -h(x)^\top S_{\hat k}, \quad S_k = \frac{1}{N_k} \sum_{y_i = \hat y_i = k} h(x_i)

    A class without such an image gets the mean of all inliers. pytorch-ood raises in that case, so it cannot be used
    with one image per class.
    """

    name = "she"
    title = "SHE"
    paper = "Zhang et al., Out-of-Distribution Detection based on In-Distribution Data Patterns Memorization, ICLR 2023"
    reads = frozenset({"feature", "logits", "labels"})

    def __init__(self) -> None:
        self._patterns: Tensor | None = None  # (K, F)

    def fit(self, context: Context) -> None:
        """Compute the mean feature of each class."""
        view = context.inliers
        feature, predicted = view.feature.double(), view.logits.argmax(dim=1)
        patterns = feature.mean(dim=0).repeat(view.logits.shape[1], 1)
        right = predicted == view.labels
        for label in torch.unique(predicted[right]).tolist():
            patterns[label] = feature[right & (predicted == label)].mean(dim=0)
        self._patterns = patterns

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._patterns is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return -(examples.feature.double() * self._patterns[examples.logits.argmax(dim=1)]).sum(dim=1)
