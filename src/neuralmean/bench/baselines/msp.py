"""Maximum softmax probability, the paper's "Baseline" (Hendrycks & Gimpel, ICLR 2017)."""

from __future__ import annotations

from torch import Tensor

from neuralmean.bench.baselines.base import Method, View


class Msp(Method):
    r"""Scores an image by minus the classifier's confidence.

    .. math::
        s(x) = -\max_k \mathrm{softmax}_k(f(x))
    """

    name = "msp"
    title = "MSP"
    paper = "Hendrycks & Gimpel, A Baseline for Detecting Misclassified and Out-of-Distribution Examples, ICLR 2017"
    reads = frozenset({"logits"})
    uses_inliers = False

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        # In float64, as many confident images tie at exactly 1 in float32.
        return -examples.logits.double().softmax(dim=1).amax(dim=1)
