"""The energy score of a copy that was fine-tuned with OOD images (Liu et al., NeurIPS 2020, Eq. 7 to 9)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from neuralmean.bench.baselines.base import Context
from neuralmean.bench.baselines.finetune import FineTuned, Tuner

WEIGHT = 0.1
HIGHEST_INSIDE, LOWEST_OUTSIDE = -23.0, -5.0  # the authors' margins for CIFAR-10
HIGHEST_INSIDE_MANY = -27.0  # the authors' margins for CIFAR-100


class EnergyFineTuned(FineTuned):
    r"""Fine-tunes so that energies of ID images fall below one margin and those of OOD images rise above another.

    .. math::
        L = E_{id}[-\log p_y(x)] + \lambda \left( E_{id}[\max(0, E(x) - m_{in})^2]
            + E_{ood}[\max(0, m_{out} - E(x'))^2] \right), \quad s(x) = E(x) = -\log \sum_k \exp f_k(x)
    """

    name = "energy-ft"
    title = "Energy-FT"
    paper = "Liu et al., Energy-based Out-of-distribution Detection, NeurIPS 2020"
    uses_outliers = True

    def __init__(self) -> None:
        super().__init__()
        self._inside = HIGHEST_INSIDE

    def fit(self, context: Context) -> None:
        """Train the copy, resuming from its checkpoint if there is one."""
        self._inside = HIGHEST_INSIDE if context.trained.num_classes <= 10 else HIGHEST_INSIDE_MANY
        super().fit(context)

    def loss(self, tuner: Tuner, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Loss of one batch of images in [0, 1], and as many OOD images."""
        outliers = tuner.draw_outliers(len(images), generator)
        logits = tuner.model(tuner.normalise(torch.cat([images, outliers])))
        return energy_loss(logits[: len(images)], labels, logits[len(images) :], self._inside)

    def score_outputs(self, outputs: Tensor) -> Tensor:
        """Score logits (N, K); higher = more OOD."""
        return -outputs.double().logsumexp(dim=1)


def energy_loss(inliers: Tensor, labels: Tensor, outliers: Tensor, inside: float = HIGHEST_INSIDE) -> Tensor:
    """Loss of logits (N, K) with labels (N,), and of logits of OOD images (M, K)."""
    above = (-inliers.logsumexp(dim=1) - inside).clamp_min(0) ** 2
    below = (LOWEST_OUTSIDE + outliers.logsumexp(dim=1)).clamp_min(0) ** 2
    return F.cross_entropy(inliers, labels) + WEIGHT * (above.mean() + below.mean())
