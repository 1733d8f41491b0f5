"""Rectified activations (Sun et al., NeurIPS 2021, Eq. 1)."""

from __future__ import annotations

from neuralmean.bench.baselines.adapter import ShapedFeature


class React(ShapedFeature):
    r"""Clips the feature at a percentile of the inliers' activations, then takes the energy.

    .. math::
        s(x) = -\log \sum_k \exp f_k(\min(h(x), c))

    :math:`c` is a percentile of the inliers' activations, one of OpenOOD's four values.
    """

    name = "react"
    title = "ReAct"
    paper = "Sun et al., ReAct: Out-of-distribution Detection With Rectified Activations, NeurIPS 2021"
    detector = "ReAct"
    percentiles = (0.85, 0.9, 0.95, 0.99)
    usual = 0.9
    prunes = False
    most_inliers = None
