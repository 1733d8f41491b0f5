"""Deviations of feature co-occurrences (Sastry & Oore, ICML 2020, Sec. 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from neuralmean.bench.baselines.activations import OUTPUT, Place, capturing, convolutions, stages
from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.perturbation import batches_of, hold_out
from neuralmean.bench.models import TrainedModel
from neuralmean.errors import NotFittedError

POWERS = 10
_TINY = 1e-6


class Gram(Method):
    r"""Scores an image by how far its Gram matrices leave the range of training images of its predicted class.

    .. math::
        G^p_l = (F_l^p {F_l^p}^\top)^{1/p}, \quad
        \delta_l(x) = \sum_{p, i} \delta(\min_{l,p,i,c}, \max_{l,p,i,c}, G^p_{l,i}(x)), \quad
        s(x) = \sum_l \frac{\delta_l(x)}{E[\delta_l]}

    for powers 1 to 10 and every convolution and stage; :math:`c` is the predicted class. As in the authors' code a
    matrix is represented by its row sums, which need no matrix: row :math:`i` of :math:`F F^\top` sums to
    :math:`F_i \cdot \sum_j F_j`. The expected deviation is estimated on a tenth of the images, which are held out from
    the ranges. A fit stores ranges and sums only, so its memory does not grow with the number of images.
    """

    name = "gram"
    title = "Gram"
    paper = "Sastry & Oore, Detecting Out-of-Distribution Examples with Gram Matrices, ICML 2020"
    reads = frozenset({"images"})
    few_shot_inliers = 50  # the paper's exception (Sec. 5.4): it depends on no OOD images
    heavy = True

    def __init__(self) -> None:
        self._trained: TrainedModel | None = None
        self._places: list[Place] = []
        self._low: list[Tensor] = []  # by layer, (K, P * C)
        self._high: list[Tensor] = []
        self._expected = torch.zeros(0)

    def fit(self, context: Context) -> None:
        """Compute the range of every entry per class, and the expected deviation of every layer."""
        trained = self._trained = context.trained
        view = context.inliers
        parts = hold_out(len(view), seed=context.seed, share=0.1, most=len(view))
        example = next(batches_of(trained, view, parts.validation[:1]))
        self._places = list(dict.fromkeys([*convolutions(trained.model, example), *stages(trained.model, example)]))
        self._low, self._high = [], []
        for batch in batches_of(trained, view, parts.rest if len(parts.rest) else parts.validation):
            self._widen(*self._read(batch))
        for low, high in zip(self._low, self._high, strict=True):
            unseen = low.isinf().all(dim=1)  # a class without images gets the range over all images
            low[unseen], high[unseen] = low.amin(dim=0), high.amax(dim=0)
        total = torch.zeros(len(self._places), dtype=torch.float64)
        for batch in batches_of(trained, view, parts.validation):
            total += self._deviations(batch).sum(dim=0)
        mean = total / len(parts.validation)
        self._expected = torch.where(mean > 0, mean, torch.ones_like(mean))

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._trained is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return torch.cat([(self._deviations(batch) / self._expected).sum(dim=1) for batch in examples.batches()])

    def suits(self, trained: TrainedModel) -> bool:
        """Whether the model has classes."""
        return trained.num_classes > 0

    def _read(self, batch: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Predicted classes (N,), and the row sums (N, P * C) of each layer."""
        if self._trained is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        places = [*self._places, OUTPUT]
        with torch.no_grad(), capturing(self._trained.model, places) as run:
            *activations, logits = run(batch)
            return logits.argmax(dim=1).cpu(), [gram_rows(one).cpu() for one in activations]

    def _widen(self, classes: Tensor, rows: list[Tensor]) -> None:
        """Widen the ranges to include these images."""
        if not self._low and self._trained is not None:
            count = self._trained.num_classes
            self._low = [torch.full((count, one.shape[1]), torch.inf) for one in rows]
            self._high = [torch.full((count, one.shape[1]), -torch.inf) for one in rows]
        for low, high, one in zip(self._low, self._high, rows, strict=True):
            where = classes.unsqueeze(1).expand_as(one)
            low.scatter_reduce_(0, where, one, "amin")
            high.scatter_reduce_(0, where, one, "amax")

    def _deviations(self, batch: Tensor) -> Tensor:
        """How far each layer's entries leave their ranges, shape (N, L)."""
        classes, rows = self._read(batch)
        return torch.stack(
            [
                deviation(one, low[classes], high[classes])
                for low, high, one in zip(self._low, self._high, rows, strict=True)
            ],
            dim=1,
        ).double()


def gram_rows(activation: Tensor, powers: int = POWERS) -> Tensor:
    """Row sums of the Gram matrices of powers 1 to `powers`, shape (N, P * C).

    Args:
        activation: Images (N, C, H, W) or tokens (N, T, C).
        powers: The highest power.
    """
    maps = activation.transpose(1, 2) if activation.ndim == 3 else activation.flatten(2)  # (N, C, positions)
    # Scaled to at most 1, as the twentieth power of an activation overflows float32; undone after the root.
    largest = maps.abs().amax(dim=(1, 2), keepdim=True).clamp_min(1e-30)
    scaled = maps / largest
    power, found = torch.ones_like(scaled), []
    for p in range(1, powers + 1):
        power = power * scaled
        sums = (power @ power.sum(dim=1).unsqueeze(2)).squeeze(2)  # (N, C)
        found.append(sums.sign() * sums.abs() ** (1 / p) * largest.squeeze(2) ** 2)
    return torch.cat(found, dim=1)


def deviation(rows: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far rows (N, D) leave the ranges (N, D), relative to the nearer end, summed: shape (N,)."""
    below = (low - rows).clamp_min(0) / (low + _TINY).abs()
    above = (rows - high).clamp_min(0) / (high + _TINY).abs()
    return (below + above).sum(dim=1)
