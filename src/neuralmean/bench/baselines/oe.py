"""Outlier Exposure: a copy learns low confidence on OOD images (Hendrycks et al., ICLR 2019, Sec. 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuralmean.bench.baselines.finetune import FineTuned, Tuner

WEIGHT = 0.5  # the paper's, for images


class OutlierExposure(FineTuned):
    r"""Fine-tunes with cross-entropy towards the uniform distribution on OOD images, and scores by MSP.

    .. math::
        L = E_{id}[-\log p_y(x)] + \lambda E_{ood}[H(U; p(x'))], \quad s(x) = -\max_k p_k(x)

    The OOD images are those of the protocol; the paper uses 80 Million Tiny Images, since withdrawn.
    """

    name = "oe"
    title = "OE"
    paper = "Hendrycks et al., Deep Anomaly Detection with Outlier Exposure, ICLR 2019"
    uses_outliers = True

    def loss(self, tuner: Tuner, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Loss of one batch of images in [0, 1], and as many OOD images."""
        outliers = tuner.draw_outliers(len(images), generator)
        logits = tuner.model(tuner.normalise(torch.cat([images, outliers])))
        return exposure_loss(logits[: len(images)], labels, logits[len(images) :])

    def score_outputs(self, outputs: Tensor) -> Tensor:
        """Score logits (N, K); higher = more OOD."""
        return -F.softmax(outputs.double(), dim=1).amax(dim=1)


def exposure_loss(inliers: Tensor, labels: Tensor, outliers: Tensor) -> Tensor:
    """Loss of logits (N, K) with labels (N,), and of logits of OOD images (M, K)."""
    uniform = -F.log_softmax(outliers, dim=1).mean(dim=1)  # cross-entropy from the uniform distribution
    return F.cross_entropy(inliers, labels) + WEIGHT * uniform.mean()
