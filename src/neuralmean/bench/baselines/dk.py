"""Deep kernel, of the paper's statistical table (Table 1; kernel of Liu et al., ICML 2020, on the classifier's features)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.errors import NotFittedError

INLIERS = 5000  # summed over at most
_CHUNK = 1000


class DeepKernel(Method):
    r"""Scores an image by minus the sum of kernel values to the inliers, as all methods of that table do (Sec. 5).

    .. math::
        s(x) = -\sum_i \kappa(h(x), h(x_i)), \quad \kappa(a, b) = \exp(-\lVert a - b \rVert^2 / 2 \sigma^2)

    :math:`\sigma` is the median distance between inliers: the kernel is not trained against a set of outliers, which the
    protocol has none of. The sum is given as a mean, and over at most 5,000 inliers.
    """

    name = "dk"
    title = "DK"
    paper = "Liu et al., Learning Deep Kernels for Non-Parametric Two-Sample Tests, ICML 2020"
    reads = frozenset({"feature"})

    def __init__(self) -> None:
        self._inliers: Tensor | None = None
        self._bandwidth = 1.0

    def fit(self, context: Context) -> None:
        """Keep inliers and take the bandwidth from them."""
        feature = context.inliers.feature.double()
        order = torch.randperm(len(feature), generator=torch.Generator().manual_seed(context.seed))
        self._inliers = feature[order[:INLIERS]]
        self._bandwidth = max(float(torch.pdist(self._inliers[:_CHUNK]).median()), 1e-12)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._inliers is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        found = []
        for chunk in torch.split(examples.feature.double(), _CHUNK):
            squared = torch.cdist(chunk, self._inliers).square()
            found.append(-(-squared / (2 * self._bandwidth**2)).exp().mean(dim=1))
        return torch.cat(found)
