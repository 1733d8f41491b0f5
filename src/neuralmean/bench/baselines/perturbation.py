"""What methods that perturb their input share: the step, and a few images of their own to tune it on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neuralmean.bench.baselines.base import View
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.models.evaluate import BATCH
from neuralmean.models.execution import device_of
from neuralmean.stats.metrics import evaluate

VALIDATION = 100  # images of each kind that hyper-parameters are tuned on: few, as each takes dozens of passes
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Rows of a view, cut in two at random: some to tune on, the others to learn from."""

    validation: Rows
    rest: Rows


def hold_out(count: int, *, seed: int, most: int = VALIDATION, share: float = 0.5) -> Parts:
    """Set `share` of `count` rows apart for validation, at most `most` of them and at least one.

    Example:
        >>> parts = hold_out(10, seed=0, share=0.2)
        >>> len(parts.validation), len(parts.rest)
        (2, 8)
    """
    order = np.random.default_rng([seed, count]).permutation(count).astype(np.int64)
    cut = max(1, min(most, int(share * count)))
    return Parts(np.sort(order[:cut]), np.sort(order[cut:]))


def batches_of(trained: TrainedModel, view: View, rows: Rows, size: int = BATCH) -> Iterator[Tensor]:
    """Yield some images of a view, as the model expects them, on the model's device."""
    pixels = view.pixels[rows]
    device = device_of(trained.model.modules())
    for start in range(0, len(pixels), size):
        yield trained.preprocess(pixels[start : start + size]).to(device)


def signs(batch: Tensor, loss: Callable[[Tensor], Tensor], std: Sequence[float]) -> Tensor:
    r"""Sign of the gradient of a summed loss at each pixel, divided by the normalisation's scale.

    Divided so that a step of :math:`\epsilon` is one of :math:`\epsilon` in images scaled to [0, 1], as in the code of
    ODIN's authors.

    Args:
        batch: Normalised images, shape (N, 3, H, W).
        loss: Maps the batch to one number per image, or to their sum.
        std: What the normalisation divides by, per colour.
    """
    with torch.enable_grad():
        images = batch.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(images).sum(), images)
    return gradient.sign() / torch.tensor(std, dtype=batch.dtype, device=batch.device).view(1, -1, 1, 1)


def quality(inliers: Tensor, outliers: Tensor) -> tuple[float, float]:
    """How well scores tell two validation parts apart: TNR at 95 % TPR, as ODIN and Lee et al. tune; then AUROC."""
    figures = evaluate(inliers.numpy(), outliers.numpy())
    return figures.tnr95, figures.auroc
