"""Scaled activations (Xu et al., ICLR 2024, Eq. 5)."""

from __future__ import annotations

from neuralmean.bench.baselines.adapter import ShapedFeature, at_most


class Scale(ShapedFeature):
    r"""As ASH-S, but nothing is dropped: the whole feature is made larger.

    .. math::
        s(x) = -\log \sum_k \exp f_k\left(h(x) \exp \frac{\sum_i h_i(x)}{\sum_{i \in top} h_i(x)}\right)

    The largest 15 % of the activations count as top, the paper's choice.
    """

    name = "scale"
    title = "SCALE"
    paper = "Xu et al., Scaling for Training Time and Post-hoc Out-of-distribution Detection Enhancement, ICLR 2024"
    uses_inliers = False
    detector = "SCALE"

    def percentile(self, width: int, classes: int) -> float:
        """Return the share of activations that are not among the top."""
        return at_most(0.85, width)
