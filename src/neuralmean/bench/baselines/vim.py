"""Virtual-logit matching (Wang et al., CVPR 2022, Eq. 7)."""

from __future__ import annotations

from typing import Any

from neuralmean.bench.baselines.adapter import FeatureDetector, detector_class
from neuralmean.bench.baselines.base import Context
from neuralmean.bench.baselines.heads import read_head


class Vim(FeatureDetector):
    r"""Scores an image by how much of its feature lies outside the inliers' principal space, beside its energy.

    .. math::
        s(x) = \alpha \lVert h(x)^{P^\perp} \rVert - \log \sum_k \exp f_k(x)

    Features are centred where the head's logits are all 0; :math:`\alpha` makes the first term of the inliers as large
    as their largest logit. The principal space has the dimension that the authors take: 1,000 of at least 2,048, 512 of
    at least 768, else half of the feature.
    """

    name = "vim"
    title = "ViM"
    paper = "Wang et al., ViM: Out-Of-Distribution with Virtual-logit Matching, CVPR 2022"

    def make(self, context: Context) -> Any:
        """Return pytorch-ood's detector with the head's weights."""
        head = read_head(context.trained)
        return detector_class("ViM")(None, d=principal_dimension(head.weight.shape[1]), w=head.weight, b=head.bias)


def principal_dimension(width: int) -> int:
    """Return the dimension of the principal space of a feature.

    Example:
        >>> [principal_dimension(width) for width in (64, 768, 2048)]
        [32, 512, 1000]
    """
    return 1000 if width >= 2048 else 512 if width >= 768 else width // 2
