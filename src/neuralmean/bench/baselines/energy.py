"""The energy score without fine-tuning (Liu et al., NeurIPS 2020, Eq. 4)."""

from __future__ import annotations

from torch import Tensor

from neuralmean.bench.baselines.base import Method, View


class Energy(Method):
    r"""Scores an image by its free energy at temperature 1, the paper's choice.

    .. math::
        s(x) = -\log \sum_k \exp f_k(x)
    """

    name = "energy"
    title = "Energy"
    paper = "Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020"
    reads = frozenset({"logits"})
    uses_inliers = False

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        return -examples.logits.double().logsumexp(dim=1)
