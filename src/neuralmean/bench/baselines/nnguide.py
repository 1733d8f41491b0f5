"""Nearest-neighbour guidance (Park et al., ICCV 2023, Eq. 4)."""

from __future__ import annotations

from typing import Any

from neuralmean.bench.baselines.adapter import FeatureDetector, detector_class
from neuralmean.bench.baselines.base import Context
from neuralmean.bench.baselines.heads import read_head

NEIGHBOURS = 10  # the paper's choice on ImageNet


class NnGuide(FeatureDetector):
    r"""Scores an image by its energy times its similarity to the nearest inliers, weighted by their energies.

    .. math::
        s(x) = -E(x) \frac1k \sum_{i \le k} E(z_{(i)}) \cos(h(x), h(z_{(i)})), \quad
        E(x) = \log \sum_k \exp f_k(x)
    """

    name = "nnguide"
    title = "NNGuide"
    paper = "Park et al., Nearest Neighbor Guidance for Out-of-Distribution Detection, ICCV 2023"

    def make(self, context: Context) -> Any:
        """Return pytorch-ood's detector with a copy of the head."""
        neighbours = min(NEIGHBOURS, len(context.inliers))
        return detector_class("NNGuide")(None, read_head(context.trained).as_module(), k=neighbours)
