"""ODIN: temperature and a small step against the loss (Liang et al., ICLR 2018, Eq. 1 to 3)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.perturbation import VALIDATION, batches_of, hold_out, quality, signs
from neuralmean.bench.models import TrainedModel
from neuralmean.errors import NotFittedError

TEMPERATURES = (1.0, 10.0, 100.0, 1000.0)
STEPS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.004)  # in images scaled to [0, 1]; the paper's range


class Odin(Method):
    r"""Scores an image by minus the classifier's confidence after a step that increases it.

    .. math::
        \tilde x = x - \epsilon \, \mathrm{sign}(-\nabla_x \log \max_k S_k(x; T)), \quad
        s(x) = -\max_k S_k(\tilde x; T), \quad S(x; T) = \mathrm{softmax}(f(x) / T)

    Temperature and step are the pair with the best TNR at 95 % TPR on at most 100 images of each kind, drawn from the
    data of the protocol, so the classifier was trained on the ID images. The authors tune on more images, which the
    classifier has not seen. A different draw of the 100 can change an AUROC by several points, which bootstrap
    intervals do not show.
    """

    name = "odin"
    title = "ODIN"
    paper = "Liang et al., Enhancing The Reliability of Out-of-distribution Image Detection, ICLR 2018"
    reads = frozenset({"images"})
    uses_outliers = True
    most_inliers = most_outliers = VALIDATION
    uses_gradients = True
    heavy = True

    def __init__(self) -> None:
        self.temperature, self.step = 1000.0, 0.0014  # the authors' values, until `fit` tunes them
        self._trained: TrainedModel | None = None

    def fit(self, context: Context) -> None:
        """Tune temperature and step on the validation part."""
        trained = self._trained = context.trained
        if context.outliers is None:
            return
        views = (context.inliers, context.outliers)
        rows = [hold_out(len(view), seed=context.seed, share=1.0).validation for view in views]
        grids = [_grid(trained, batches_of(trained, view, part)) for view, part in zip(views, rows, strict=True)]
        pairs = list(itertools.product(TEMPERATURES, STEPS))
        found = [quality(grids[0][number], grids[1][number]) for number in range(len(pairs))]
        self.temperature, self.step = pairs[max(range(len(pairs)), key=found.__getitem__)]

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        trained = self._trained
        if trained is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return torch.cat(
            [odin(trained.model, batch, self.temperature, self.step, trained.std) for batch in examples.batches()]
        )

    def suits(self, trained: TrainedModel) -> bool:
        """Whether the model has classes."""
        return trained.num_classes > 0


def odin(model: nn.Module, batch: Tensor, temperature: float, step: float, std: tuple[float, float, float]) -> Tensor:
    """Score one batch, shape (N,); higher = more OOD.

    Args:
        model: Maps images to logits.
        batch: Normalised images, shape (N, 3, H, W).
        temperature: Divisor of the logits.
        step: Size of the step in images scaled to [0, 1].
        std: Standard deviation of the normalisation, per colour.
    """
    if step > 0:
        batch = batch - step * signs(batch, lambda images: _unsure(model(images), temperature), std)
    with torch.no_grad():
        return softmax_score(model(batch), temperature)


def softmax_score(logits: Tensor, temperature: float) -> Tensor:
    """Minus the largest probability at a temperature, in float64, as probabilities are nearly equal at 1000."""
    return -F.softmax(logits.double() / temperature, dim=1).amax(dim=1)


def _unsure(logits: Tensor, temperature: float) -> Tensor:
    return -F.log_softmax(logits / temperature, dim=1).amax(dim=1)


def _grid(trained: TrainedModel, batches: Iterator[Tensor]) -> Tensor:
    """Scores for each temperature and step, shape (T * S, N)."""
    columns = []
    for batch in batches:
        column = []
        for temperature in TEMPERATURES:
            direction = signs(batch, lambda images, t=temperature: _unsure(trained.model(images), t), trained.std)  # type: ignore[misc]
            with torch.no_grad():
                column += [softmax_score(trained.model(batch - step * direction), temperature) for step in STEPS]
        columns.append(torch.stack(column))
    return torch.cat(columns, dim=1).cpu()
