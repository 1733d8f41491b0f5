"""Neuron activation coverage, NAC-UE (Liu et al., ICLR 2024, Eq. 2 to 5), on the penultimate layer."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.heads import LinearHead, read_head
from neuralmean.errors import NotFittedError

STEEPNESS = 100.0
BINS = 50
ENOUGH = 50  # inliers in a bin that make it fully covered


class Nac(Method):
    r"""Scores an image by how rarely its neurons' states occur among the inliers.

    .. math::
        \hat z_i = \sigma\left(\alpha\, h_i \frac{\partial\, KL(u \Vert p)}{\partial h_i}\right), \qquad
        s(x) = -\frac{1}{F} \sum_i \min(O_i(\hat z_i) / r, 1)

    with :math:`O_i` the histogram of neuron i over the inliers. On the penultimate layer the gradient is
    :math:`W^\top (p - u)`: no backward pass is needed. The paper adds up several layers, which needs one; this is its
    last layer alone, with the paper's parameters for it (:math:`\alpha = 100`, 50 bins, r = 50).
    """

    name = "nac"
    title = "NAC (last layer)"
    paper = "Liu et al., Neuron Activation Coverage, ICLR 2024"
    reads = frozenset({"feature"})

    def __init__(self) -> None:
        self._head: LinearHead | None = None
        self._counts = torch.zeros(0)  # (F, BINS)

    def fit(self, context: Context) -> None:
        """Count how often the inliers are in each bin."""
        self._head = read_head(context.trained)
        bins = self._bins(context.inliers.feature, self._head)
        counts = [torch.bincount(column, minlength=BINS) for column in bins.T]
        self._counts = torch.stack(counts).double()

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._head is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        bins = self._bins(examples.feature, self._head)
        covered = (self._counts.gather(1, bins.T) / ENOUGH).clamp_max(1.0)
        return -covered.mean(dim=0)

    def _bins(self, feature: Tensor, head: LinearHead) -> Tensor:
        """Return the bin of every neuron, (N, F)."""
        feature = feature.double()
        probabilities = head(feature).softmax(dim=1)
        gradient = (probabilities - 1 / probabilities.shape[1]) @ head.weight
        state = (STEEPNESS * feature * gradient).sigmoid()
        return (state * BINS).long().clamp_max(BINS - 1)
