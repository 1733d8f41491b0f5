"""Deep kernel of the paper's statistical table (Table 1; Liu et al., ICML 2020): a Gaussian on the classifier's features."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.errors import NotFittedError

INLIERS = 5000  # most inliers in the sum
_CHUNK = 1000


class DeepKernel(Method):
    r"""Scores an image by minus the log of the summed kernel values to the inliers, as in Sec. 5.1.

    .. math::
        s(x) = -\log \sum_i \kappa(h(x), h(x_i)), \quad \kappa(a, b) = \exp(-\lVert a - b \rVert^2 / 2 \sigma^2)

    The logarithm keeps the order and distinguishes sums too small for a float. The kernel is not trained against
    outliers, as the detector has none: of the median distance between inliers and its halves, :math:`\sigma` is the one
        with the largest leave-one-out likelihood. At most 5,000 inliers are used.

    Args:
        share: If given, the bandwidth as a share of the median distance.
    """

    name = "dk"
    title = "DK"
    paper = "Liu et al., Learning Deep Kernels for Non-Parametric Two-Sample Tests, ICML 2020"
    reads = frozenset({"feature"})
    most_inliers = INLIERS
    version = 2

    def __init__(self, share: float | None = None) -> None:
        self._share = share
        self._inliers: Tensor | None = None
        self.bandwidth = 1.0
        if share is not None:
            self.name, self.title = f"dk-{share:g}", f"DK, bandwidth {share:g}"

    def fit(self, context: Context) -> None:
        """Keep the inliers and choose the bandwidth."""
        order = torch.randperm(len(context.inliers), generator=torch.Generator().manual_seed(context.seed))
        self._inliers = context.inliers.take(order[:INLIERS].numpy()).feature.double()
        rows = self._inliers[:_CHUNK]
        self.bandwidth = likeliest_bandwidth(rows) if self._share is None else self._share * _median_distance(rows)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._inliers is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        chunks = torch.split(examples.feature.double(), _CHUNK)
        return torch.cat([-_log_kernel(chunk, self._inliers, self.bandwidth).logsumexp(dim=1) for chunk in chunks])


def likeliest_bandwidth(rows: Tensor) -> float:
    """Return the bandwidth with the largest leave-one-out likelihood of rows (N, F)."""
    median = _median_distance(rows)

    def likelihood(bandwidth: float) -> float:
        values = _log_kernel(rows, rows, bandwidth).fill_diagonal_(-math.inf)
        mean: float = values.logsumexp(dim=1).mean().item()
        return mean - rows.shape[1] * math.log(bandwidth)

    return max((median * 0.5**halvings for halvings in range(7)), key=likelihood)


def _median_distance(rows: Tensor) -> float:
    return max(float(torch.pdist(rows).median()), 1e-12)


def _log_kernel(first: Tensor, second: Tensor, bandwidth: float) -> Tensor:
    return -torch.cdist(first, second).square() / (2 * bandwidth**2)
