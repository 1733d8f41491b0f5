"""Deep nearest neighbours (Sun et al., ICML 2022, Sec. 3)."""

from __future__ import annotations

from typing import Any

from neuralmean.bench.baselines.adapter import FeatureDetector, detector_class
from neuralmean.bench.baselines.base import Context


class Knn(FeatureDetector):
    r"""Scores an image by the distance of its unit-length feature to the k-th nearest one of the inliers.

    .. math::
        s(x) = \lVert z - z_{(k)} \rVert_2, \quad z = h(x) / \lVert h(x) \rVert_2

    The paper takes k = 50 for the 50,000 images of CIFAR-10, 200 for CIFAR-100 and 1,000 for the 1.28 million images of
    ImageNet, and scales k with the share of images used. So does this, but with k at least 5, or the number of images
    per class if that is smaller, so that neighbours of the same class exist.
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
        >>> [neighbours(50_000, 10), neighbours(50_000, 100), neighbours(1_281_167, 1000)]
        [50, 200, 1000]
        >>> neighbours(600, 10), neighbours(1000, 1000)
        (5, 1)
    """
    share = 1000 / 1_281_167 if classes >= 1000 else 200 / 50_000 if classes >= 100 else 50 / 50_000
    least = max(1, min(5, images // max(1, classes)))
    return max(least, round(images * share))
