"""Scaled activations (Xu et al., ICLR 2024, Eq. 5)."""

from __future__ import annotations

from neuralmean.bench.baselines.adapter import ShapedFeature


class Scale(ShapedFeature):
    r"""As ASH-S, but without dropping: the whole feature is scaled.

    .. math::
        s(x) = -\log \sum_k \exp f_k\left(h(x) \exp \frac{\sum_i h_i(x)}{\sum_{i \in top} h_i(x)}\right)

    The share of activations outside the top is one of OpenOOD's seven values; without OOD images it is 85 %, the
    paper's choice.
    """

    name = "scale"
    title = "SCALE"
    paper = "Xu et al., Scaling for Training Time and Post-hoc Out-of-distribution Detection Enhancement, ICLR 2024"
    detector = "SCALE"
    percentiles = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    usual = 0.85
