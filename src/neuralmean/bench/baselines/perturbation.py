"""Shared code of the methods that perturb their input: the step, and the validation images to tune it on."""

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

VALIDATION = 100  # images of each kind to tune on; few, as each takes dozens of passes
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """Rows of a view, split at random: some to tune on, the rest to learn from."""

    validation: Rows
    rest: Rows


def hold_out(count: int, *, seed: int, most: int = VALIDATION, share: float = 0.5) -> Parts:
    """Hold out a share of `count` rows for validation, at least one and at most `most`.

    Example:
        >>> parts = hold_out(10, seed=0, share=0.2)
        >>> len(parts.validation), len(parts.rest)
        (2, 8)
    """
    order = np.random.default_rng([seed, count]).permutation(count).astype(np.int64)
    cut = max(1, min(most, int(share * count)))
    return Parts(np.sort(order[:cut]), np.sort(order[cut:]))


def batches_of(trained: TrainedModel, view: View, rows: Rows, size: int = BATCH) -> Iterator[Tensor]:
    """Yield images of a view, preprocessed, on the model's device."""
    pixels = view.pixels[rows]
    device = device_of(trained.model.modules())
    for start in range(0, len(pixels), size):
        yield trained.preprocess(pixels[start : start + size]).to(device)


def signs(batch: Tensor, loss: Callable[[Tensor], Tensor], std: Sequence[float]) -> Tensor:
    r"""Sign of the gradient of a summed loss at each pixel, divided by the normalisation's scale.

    After the division, a step of :math:`\epsilon` changes images scaled to [0, 1] by :math:`\epsilon`, as in the code
    of ODIN's authors.

    Args:
        batch: Normalised images, shape (N, 3, H, W).
        loss: Maps the batch to one number per image, or to their sum.
        std: Standard deviation of the normalisation, per colour.
    """
    with torch.enable_grad():
        images = batch.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(images).sum(), images)
    return gradient.sign() / torch.tensor(std, dtype=batch.dtype, device=batch.device).view(1, -1, 1, 1)


def quality(inliers: Tensor, outliers: Tensor) -> tuple[float, float]:
    """Quality of scores on the validation parts: TNR at 95 % TPR, as in ODIN and Lee et al., then AUROC."""
    figures = evaluate(inliers.numpy(), outliers.numpy())
    return figures.tnr95, figures.auroc
