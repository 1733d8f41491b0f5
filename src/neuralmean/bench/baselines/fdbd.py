"""Fast decision-boundary distance (Liu & Qin, ICML 2024, Eq. 6)."""

from __future__ import annotations

from typing import Any

from neuralmean.bench.baselines.adapter import FeatureDetector, detector_class
from neuralmean.bench.baselines.base import Context
from neuralmean.bench.baselines.heads import read_head


class Fdbd(FeatureDetector):
    r"""Scores an image by the distance of its feature to the boundaries of its class, relative to its distance from the mean.

    .. math::
        s(x) = -\frac{1}{K - 1} \sum_{k \ne \hat k}
               \frac{f_{\hat k}(x) - f_k(x)}{\lVert w_{\hat k} - w_k \rVert \, \lVert h(x) - \mu \rVert}
    """

    name = "fdbd"
    title = "fDBD"
    paper = "Liu & Qin, Fast Decision Boundary based Out-of-Distribution Detector, ICML 2024"

    def make(self, context: Context) -> Any:
        """Return pytorch-ood's detector with a copy of the head."""
        return detector_class("fDBD")(None, read_head(context.trained).as_module())
