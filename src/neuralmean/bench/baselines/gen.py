"""Generalised entropy (Liu et al., CVPR 2023, Eq. 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Method, View

GAMMA = 0.1
TOP = 100


class Gen(Method):
    r"""Scores an image by a generalised entropy of its largest probabilities.

    .. math::
        s(x) = \sum_{k \in top\ M} p_k^\gamma (1 - p_k)^\gamma

    :math:`\gamma = 0.1` and M = 100, or all classes if there are fewer: the paper's choices. Computed in float64 from
    logarithms, as pytorch-ood clips probabilities in float32, which gives confident images equal scores.
    """

    name = "gen"
    title = "GEN"
    paper = "Liu et al., GEN: Pushing the Limits of Softmax-Based Out-of-Distribution Detection, CVPR 2023"
    reads = frozenset({"logits"})
    uses_inliers = False

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        return generalised_entropy(examples.logits)


def generalised_entropy(logits: Tensor) -> Tensor:
    """Return the generalised entropy (N,) of the softmax of logits (N, K)."""
    logits = logits.double()
    ordered = logits.sort(dim=1, descending=True).values
    log_p = ordered.log_softmax(dim=1)
    # 1 - p cancels for p near 1, so for the largest p it is computed as the sum of the others.
    rest = log_p[:, 1:].logsumexp(dim=1, keepdim=True)
    log_q = torch.cat([rest, (-log_p[:, 1:].exp()).log1p()], dim=1)
    return (GAMMA * (log_p + log_q)).exp()[:, :TOP].sum(dim=1)
