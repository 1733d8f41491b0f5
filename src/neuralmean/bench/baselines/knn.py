"""Deep nearest neighbours (Sun et al., ICML 2022, Sec. 3)."""

from __future__ import annotations

from typing import Any

from neuralmean.bench.baselines.adapter import FeatureDetector, detector_class
from neuralmean.bench.baselines.base import Context


class Knn(FeatureDetector):
    r"""Scores an image by the distance of its unit-length feature to the k-th nearest one of the inliers.

    .. math::
        s(x) = \lVert z - z_{(k)} \rVert_2, \quad z = h(x) / \lVert h(x) \rVert_2

    The paper takes k = 50 of 50,000 images for CIFAR-10 and 200 for CIFAR-100, and k in proportion where only a part of
    the images is used; so does this, but not below 5, where there are as many.
    """

    name = "knn"
    title = "KNN"
    paper = "Sun et al., Out-of-Distribution Detection with Deep Nearest Neighbors, ICML 2022"

    def make(self, context: Context) -> Any:
        """Return pytorch-ood's detector with k for the number of inliers."""
        return detector_class("KNN")(None, k=neighbours(len(context.inliers), context.trained.num_classes))


def neighbours(images: int, classes: int) -> int:
    """Return k.

    Example:
        >>> neighbours(50_000, 10), neighbours(50_000, 100), neighbours(25, 10)
        (50, 200, 5)
    """
    per_image = 200 / 50_000 if classes >= 100 else 50 / 50_000
    return max(min(5, images), round(images * per_image))
