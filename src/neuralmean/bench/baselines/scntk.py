"""The shift-invariant convolutional neural tangent kernel (Jia et al., ICML 2021) of ConvNet-4, computed exactly.

Reconstructed from the paper's abstract, as its code is not public: a shift-invariant kernel (a function of the
difference of two patches) comes from periodic activations, whose dual is the Gaussian kernel. The paper approximates it
by random features to be linear in the number of images; here it is exact, on a subset of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.cntk import LAYERS, Cntk, tangent_kernel


class Scntk(Cntk):
    r"""Scores an image by minus the sum of its kernel values with in-distribution images.

    .. math::
        s(x) = -\sum_i \kappa(x, x_i)

    The kernel is that of ConvNet-4 with :math:`\sqrt 2 \cos(z + b)`, :math:`b` uniform, instead of ReLU.
    """

    name = "scntk"
    title = "SCNTK"
    paper = "Jia et al., Efficient Statistical Tests: A Neural Tangent Kernel Approach, ICML 2021"

    def kernel(self, left: Tensor, right: Tensor) -> Tensor:
        """Kernel values of images (N, 3, H, W) with images (M, 3, H, W), shape (N, M)."""
        return tangent_kernel(left, right, cosine_dual, LAYERS)


def cosine_dual(covariance: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    r"""Gaussian kernel of the difference, for both value and derivative.

    .. math::
        E[2 \cos(u + b) \cos(v + b)] = E[2 \sin(u + b) \sin(v + b)] = e^{-(\Sigma_{uu} + \Sigma_{vv} - 2 \Sigma_{uv})/2}
    """
    value = torch.exp(covariance - (left + right) / 2)
    return value, value
