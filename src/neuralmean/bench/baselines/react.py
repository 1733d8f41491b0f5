"""Rectified activations (Sun et al., NeurIPS 2021, Eq. 1)."""

from __future__ import annotations

from neuralmean.bench.baselines.adapter import ShapedFeature


class React(ShapedFeature):
    r"""Cuts the feature off at a percentile of the inliers' activations, then takes the energy.

    .. math::
        s(x) = -\log \sum_k \exp f_k(\min(h(x), c))

    :math:`c` is the 90th percentile, the paper's choice.
    """

    name = "react"
    title = "ReAct"
    paper = "Sun et al., ReAct: Out-of-distribution Detection With Rectified Activations, NeurIPS 2021"
    detector = "ReAct"

    def percentile(self, width: int) -> float:
        """Return the share of activations below the threshold."""
        return 0.9
