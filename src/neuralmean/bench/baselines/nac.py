"""Neuron activation coverage, NAC-UE (Liu et al., ICLR 2024, Eq. 2 to 5), on the penultimate layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.heads import LinearHead, read_head
from neuralmean.bench.baselines.perturbation import hold_out
from neuralmean.errors import NotFittedError
from neuralmean.stats.metrics import evaluate

STEEPNESS = (1.0, 10.0, 100.0, 1000.0)
BINS = (50, 500)
ENOUGH = (5, 50, 500)
TUNED_ON = 1000  # most images of each kind


class Nac(Method):
    r"""Scores an image by how rare its neurons' states are among the inliers.

    .. math::
        \hat z_i = \sigma\left(\alpha\, h_i \frac{\partial\, KL(u \Vert p)}{\partial h_i}\right), \qquad
        s(x) = -\frac{1}{F} \sum_i \min(O_i(\hat z_i) / r, 1)

    with :math:`O_i` the histogram of neuron i over the inliers. On the penultimate layer the gradient is
    :math:`W^\top (p - u)`: no backward pass is needed. The paper sums several layers, which needs one; this is its last
    layer alone. As in the paper, :math:`\alpha`, the number of bins and r are chosen by validation AUROC: outliers of
    the protocol against a fifth of the inliers, held out from the histograms, with at most 1,000 random images of each
    kind.
    """

    name = "nac"
    title = "NAC (last layer)"
    paper = (
        "Liu et al., Neuron Activation Coverage: Rethinking Out-of-distribution Detection and Generalization, ICLR 2024"
    )
    reads = frozenset({"feature"})
    uses_outliers = True
    most_outliers = TUNED_ON
    version = 2

    def __init__(self) -> None:
        self._head: LinearHead | None = None
        self.coverage: Coverage | None = None

    def fit(self, context: Context) -> None:
        """Choose the parameters, then count the inliers in each bin."""
        head = self._head = read_head(context.trained)
        inliers = pull(context.inliers.feature, head)
        chosen = (100.0, 50, 50)  # without outliers, the paper's choice for the last layer
        if context.outliers is not None:
            rows = hold_out(len(context.outliers), seed=context.seed, most=TUNED_ON, share=1.0).validation
            chosen = _choose(inliers, pull(context.outliers.take(rows).feature, head), context.seed)
        self.coverage = Coverage.of(inliers, *chosen)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._head is None or self.coverage is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return self.coverage.score(pull(examples.feature, self._head))


@dataclass(frozen=True)
class Coverage:
    """Histogram of every neuron's state, (F, bins), and its parameters."""

    counts: Tensor
    steepness: float
    enough: int

    @classmethod
    def of(cls, pulls: Tensor, steepness: float, bins: int, enough: int) -> Coverage:
        """Count the states of `pulls` (N, F)."""
        columns = _bins(pulls, steepness, bins).T
        return cls(torch.stack([torch.bincount(one, minlength=bins) for one in columns]).double(), steepness, enough)

    def score(self, pulls: Tensor) -> Tensor:
        """Return minus the mean coverage of the states of `pulls`, (N,)."""
        bins = _bins(pulls, self.steepness, self.counts.shape[1])
        return -(self.counts.gather(1, bins.T) / self.enough).clamp_max(1.0).mean(dim=0)


def pull(feature: Tensor, head: LinearHead) -> Tensor:
    """Return feature times gradient of KL(u || p) with respect to it, (N, F)."""
    feature = feature.double()
    probabilities = head(feature).softmax(dim=1)
    return feature * ((probabilities - 1 / probabilities.shape[1]) @ head.weight)


def _choose(inliers: Tensor, outliers: Tensor, seed: int) -> tuple[float, int, int]:
    parts = hold_out(len(inliers), seed=seed, most=TUNED_ON, share=0.2)
    apart, rest = (inliers[torch.from_numpy(rows)] for rows in (parts.validation, parts.rest))

    def quality(parameters: tuple[float, int, int]) -> float:
        coverage = Coverage.of(rest, *parameters)
        return evaluate(coverage.score(apart).numpy(), coverage.score(outliers).numpy()).auroc

    return max(product(STEEPNESS, BINS, ENOUGH), key=quality)


def _bins(pulls: Tensor, steepness: float, bins: int) -> Tensor:
    return ((steepness * pulls).sigmoid() * bins).long().clamp_max(bins - 1)
