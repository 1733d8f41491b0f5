"""Activation shaping, the variant ASH-S (Djurisic et al., ICLR 2023, Alg. 3)."""

from __future__ import annotations

from neuralmean.bench.baselines.adapter import ShapedFeature


class Ash(ShapedFeature):
    r"""Keeps the largest activations, scales them by the share of the sum that was dropped, and takes the energy.

    .. math::
        s(x) = -\log \sum_k \exp f_k\left(h_{top}(x) \exp \frac{\sum_i h_i(x)}{\sum_{i \in top} h_i(x)}\right)

    The share of dropped activations is one of OpenOOD's seven values; without OOD images it is 90 %, the paper's choice
    on ImageNet.
    """

    name = "ash"
    title = "ASH-S"
    paper = "Djurisic et al., Extremely Simple Activation Shaping for Out-of-Distribution Detection, ICLR 2023"
    detector = "ASH"
    percentiles = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
    usual = 0.9
