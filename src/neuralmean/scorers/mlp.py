"""A small multilayer perceptron on the standardised vector: the paper's Ours-MLP."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks, parts_of
from neuralmean.errors import InputError
from neuralmean.scorers.base import VectorScorer, check_two_classes
from neuralmean.scorers.standardise import column_scale

HIDDEN = (256, 64)  # on ResNet-56 vectors as good as (512, 128), at half the cost
DROPOUT = 0.5
LEARNING_RATE = 0.001
MOMENTUM = 0.9
MAX_EPOCHS = 60
BATCH = 64
_VALIDATED_FROM = 500  # with fewer rows all are used for training, for all epochs
_VALIDATION_SHARE = 0.1
_PATIENCE = 5  # epochs without a lower validation loss before training ends


class MlpScorer(VectorScorer):
    r"""Scores an input by the logit of three fully connected layers, trained between in- and out-of-distribution rows.

    .. math::
        s(x) = W_3\, \mathrm{relu}(W_2\, \mathrm{relu}(W_1 z(x) + b_1) + b_2) + b_3

    with z the vector whose columns are standardised on the rows of the fit. ReLU after the first two layers, dropout after
    the second, SGD with learning rate 0.001 and momentum 0.9 on the cross-entropy, at most 60 epochs (Dong et al., CVPR
    2022, appendix "Lightweight OOD Detector"). Given at least 500 rows, a tenth of them, drawn by `seed`, decides when to stop:
    training ends after five epochs without a lower loss on it, and the best epoch's weights are kept.

    The global random state of torch is neither read nor changed.

    Args:
        seed: Decides the first weights, the order of rows, dropout and the validation rows.
    """

    name = "mlp"
    uses_outliers = True
    options = ("seed",)
    learnt = ("mean_", "scale_", "weight1_", "bias1_", "weight2_", "bias2_", "weight3_", "bias3_")

    mean_: Tensor
    scale_: Tensor

    def __init__(self, *, seed: int = 0) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InputError(f"Expected `seed` to be an integer of at least 0, but got {seed!r}.")
        self.seed = seed

    def fit(self, inliers: Tensor, outliers: Tensor | None = None, chosen: Tensor | None = None) -> Self:
        """Learn from in-distribution rows (N, D) and out-of-distribution rows (M, D)."""
        outliers = check_two_classes(inliers, outliers, self.name)
        with torch.inference_mode(False), torch.enable_grad():  # whatever the caller's mode
            rows = _Rows(Blocks(inliers.detach(), chosen), Blocks(outliers.detach()))
            target = torch.cat([torch.zeros(len(rows.inliers)), torch.ones(len(outliers))])
            layers = _train(rows, target, torch.Generator().manual_seed(self.seed))
        self.mean_, self.scale_ = rows.mean, rows.scale
        layers[0] = layers[0] * rows.varies  # a constant column has no information
        for name, value in zip(self.learnt[2:], layers, strict=True):
            setattr(self, name, value)
        return self

    def score(self, vectors: Tensor) -> Tensor:
        """Score each row of (N, D), shape (N,); higher = more OOD."""
        self.check_fitted()
        layers: list[Tensor] = [getattr(self, name) for name in self.learnt[2:]]
        return _logit(layers, (vectors.float() - self.mean_) / self.scale_)


class _Rows:
    """Rows of both kinds, the in-distribution ones first, standardised when they are read: no copy is kept."""

    def __init__(self, inliers: Blocks, outliers: Blocks) -> None:
        self.inliers, self.outliers = inliers, outliers
        self.mean, self.scale, self.varies = column_scale(lambda: map(_plain, chain(inliers, outliers)))
        self.shape = (len(inliers) + len(outliers), len(self.mean))

    def __getitem__(self, rows: Tensor) -> Tensor:
        """Return some of the rows, (n, D)."""
        is_ood = rows >= len(self.inliers)
        read = torch.empty(len(rows), self.shape[1])
        read[~is_ood] = _plain(self.inliers[rows[~is_ood]])
        read[is_ood] = _plain(self.outliers[rows[is_ood] - len(self.inliers)])
        return read.sub_(self.mean).div_(self.scale).mul_(self.varies)


def _plain(rows: Tensor) -> Tensor:
    return rows.to("cpu", torch.float32)


def _train(rows: Tensor | _Rows, target: Tensor, generator: torch.Generator) -> list[Tensor]:
    """Return weights and biases, layer by layer, of the epoch with the lowest validation loss."""
    layers = [layer.requires_grad_() for layer in _first_weights(rows.shape[1], generator)]
    optimiser = torch.optim.SGD(layers, lr=LEARNING_RATE, momentum=MOMENTUM)
    order = torch.randperm(len(target), generator=generator)
    aside = int(len(target) * _VALIDATION_SHARE) if len(target) >= _VALIDATED_FROM else 0
    validation, training = order[:aside], order[aside:]
    batch = max(1, min(BATCH, len(training) // 8))  # several steps per epoch even for few rows
    best, best_loss, best_epoch = layers, math.inf, 0
    for epoch in range(MAX_EPOCHS):
        shuffled = training[torch.randperm(len(training), generator=generator)]
        for chosen in torch.split(shuffled, batch):
            loss = F.binary_cross_entropy_with_logits(_logit(layers, rows[chosen], generator), target[chosen])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        if aside:
            value = _validate(layers, rows, target, validation)
            if value < best_loss:
                best, best_loss, best_epoch = [layer.detach().clone() for layer in layers], value, epoch
            elif epoch - best_epoch >= _PATIENCE:
                break
    return [layer.detach() for layer in best]


def _validate(layers: list[Tensor], rows: Tensor | _Rows, target: Tensor, chosen: Tensor) -> float:
    """Return the mean loss on some of the rows."""
    total = 0.0
    with torch.no_grad():
        for part in (chosen[part] for part in parts_of(len(chosen), rows.shape[1])):
            logits = _logit(layers, rows[part])
            total += float(F.binary_cross_entropy_with_logits(logits, target[part], reduction="sum"))
    return total / len(chosen)


def _first_weights(columns: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield weight and bias of each layer, uniform in ±1 / sqrt(inputs) as torch's own linear layers start."""
    for inputs, outputs in ((columns, HIDDEN[0]), HIDDEN, (HIDDEN[1], 1)):
        bound = 1 / math.sqrt(inputs)
        for shape in ((outputs, inputs), (outputs,)):
            yield (2 * torch.rand(shape, generator=generator) - 1) * bound


def _logit(layers: list[Tensor], standardised: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return the network's output, shape (N,); with a generator some of the second layer's units are dropped."""
    weight1, bias1, weight2, bias2, weight3, bias3 = layers
    hidden = F.relu(F.linear(standardised, weight1, bias1))
    hidden = F.relu(F.linear(hidden, weight2, bias2))
    if generator is not None:
        kept = torch.rand(hidden.shape, generator=generator) >= DROPOUT
        hidden = hidden * kept / (1 - DROPOUT)
    return F.linear(hidden, weight3, bias3)[:, 0]
