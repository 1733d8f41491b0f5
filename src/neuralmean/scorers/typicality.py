"""The default with in-distribution data only: is the input typical of its predicted class?

No crafted data, no OOD data and no weight to tune. The state is small: the class means of the NMD vector are stored at low
rank, everything else in sketches of at most 512 numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks
from neuralmean.errors import InputError
from neuralmean.scorers.angle import Angle, hash_columns
from neuralmean.scorers.base import CrossFittedScorer, Observation
from neuralmean.scorers.folds import folds
from neuralmean.scorers.statistics import (
    class_means,
    distinct_columns,
    explained_share,
    grand_mean,
    k_means,
    low_rank,
    share_weights,
    shrink_means,
)
from neuralmean.stats.moments import Moments

RANK = 32
CLUSTERS = 20
CLUSTERED = (
    0.1  # of the way from the cosine of a random direction to 1: fresh rows must get as far for clusters to be real
)
ROWS_PER_CLUSTER = 10
LEAST_ROWS = 20
LIMIT = 10.0  # deviations at which a channel is clipped: a rarely active one may be thousands away
_GAMMA, _MOST_LIKELY = 0.1, 10  # classes in the generalised entropy; with fewer, all count
LEAST = -3.0  # lower limit of a term in deviations: huge activations may give a huge confidence
ANGLE_FROM = 100  # rows below which the angle to their means is unreliable
TERMS = ("far", "angle", "reach", "doubt")
_REASONS = {
    "angle": f"it takes {ANGLE_FROM} examples",
    "reach": "the model has no classes",
    "doubt": "the model has no classes",
}


class TypicalityScorer(CrossFittedScorer):
    r"""Sums up to four terms, each standardised on in-distribution rows that it was not learnt from.

    With :math:`x` the NMD vector, :math:`l` the logits and :math:`p` the softmax of the logits divided by their usual
    deviation:

    - *far*: :math:`\sum_c a_c |x_c - \sum_k p_k \mu_{kc}| / w_c`, the distance from the channel means of the predicted
      class, in units of the deviation within classes; :math:`a_c` grows with the share of the channel's variance that
      the class explains. Once standardised, it is at least 0: an input nearer than usual does not lower its score (and
      no other term is below -3);
    - *angle*: minus the largest cosine between :math:`x` and a class mean, after whitening;
    - *reach*: :math:`-\log \sum_k \exp l_k` over the length of the whitened :math:`x`;
    - *doubt*: the generalised entropy of the softmax :math:`q` of the logits, :math:`\sum_k q_k^\gamma (1 - q_k)^\gamma` over
      the most likely classes.

    Classes are the model's own predictions: no labels are needed. For a model without classes, clusters of the vectors'
    last columns (those of the deepest layers) replace them, and the terms are *far* and *angle*. If the vectors have
    no such clusters there is one class, and the angle is replaced by the length of the whitened :math:`x`.

    In transformers, the mean over tokens says little about the class of a single channel, and *far* is the length of the
    whitened :math:`x`, a Mahalanobis distance over all layers.

    Args:
        tokens: Whether the channels are means over tokens, as in transformers.
        seed: Seed of the sketches and folds.
    """

    name = "typicality"
    needs = frozenset({"logits"})
    options = ("tokens", "seed")
    learnt = (
        "keep_", "centre_", "within_", "weight_", "left_", "right_", "temperature_", "clusters_",
        "angle_offset_", "angle_whiten_", "angle_target_",
        "term_mean_", "term_std_", "used_",
    )  # fmt: skip

    keep_: Tensor
    clusters_: Tensor
    temperature_: Tensor
    left_: Tensor
    weight_: Tensor
    term_mean_: Tensor
    term_std_: Tensor
    used_: Tensor
    angle_offset_: Tensor

    def __init__(self, *, tokens: bool = False, seed: int = 0) -> None:
        self.tokens, self.seed = tokens, seed
        self._most_clusters = CLUSTERS
        self._takes_length = False  # whether *far* is the whitened length

    def fit_and_score(
        self,
        inliers: Any,
        outliers: Any,
        others: Any,
        origin: Tensor,
        *,
        chosen: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        """Learn from in-distribution inputs alone; see `CrossFittedScorer`."""
        rows = torch.arange(len(inliers)) if chosen is None else chosen
        if len(rows) < LEAST_ROWS:
            raise InputError(
                f"Expected at least {LEAST_ROWS} examples to fit the 'typicality' scorer, but got {len(rows)}."
            )
        self._most_clusters = CLUSTERS
        self._takes_length = self.tokens and len(rows) >= ANGLE_FROM and _count_classes(inliers.logits) > 1
        made, terms = self._cross_fit(inliers, rows, others, origin, whole)
        if len(self.clusters_) and -terms[:, 1].mean() < self._least_cosine():
            self._most_clusters = 1  # fresh rows are no nearer to the clusters' means than to any others
            made, terms = self._cross_fit(inliers, rows, others, origin, whole)
        self._learn(inliers, chosen)
        self.term_mean_, self.term_std_ = terms.mean(dim=0), terms.std(dim=0).clamp_min(1e-12)
        has_classes = self._has_classes(inliers)
        self.used_ = torch.tensor([1.0, float(len(rows) >= ANGLE_FROM), float(has_classes), float(has_classes)])
        return self._standardise(made).sum(dim=1)

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Load what another scorer of the same kind has learnt."""
        super().load_state(state)
        self._takes_length = self.tokens and bool((self.used_[1:3] > 0).all())
        return self

    def _cross_fit(
        self, inliers: Observation, rows: Tensor, others: Observation, origin: Tensor, whole: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the terms of `others` and of rows kept apart, (M, T) and (n, T), by what was learnt from the other folds."""
        values: list[Tensor] = []
        made = torch.full((len(others), len(TERMS)), torch.nan)
        for apart in folds(len(rows), seed=self.seed, whole=whole):
            self._learn(inliers, rows[~apart])
            values.extend(self._terms(block) for block in inliers.blocks(rows[apart]))
            if len(scored := apart[origin].nonzero()[:, 0]):
                made[scored] = torch.cat([self._terms(block) for block in others.blocks(scored)])
        return made, torch.cat(values)

    def _least_cosine(self) -> float:
        """Mean cosine of fresh rows to the nearest cluster from which on there are clusters."""
        count, width = len(self.clusters_) - 1, len(self.angle_offset_)
        chance = min(1.0, math.sqrt(2 * math.log(count) / width))  # of a random direction to the nearest of so many
        return chance + CLUSTERED * (1 - chance)

    def left_out(self) -> dict[str, str]:
        """Return the terms that are left out, each with the reason."""
        self.check_fitted()
        return left_out(self.used_)

    def score(self, vectors: Any) -> Tensor:
        """Score each input of an `Observation`, shape (N,); higher = more OOD."""
        return self.standard_terms(vectors).sum(dim=1)

    def standard_terms(self, vectors: Any) -> Tensor:
        """Return the terms of each input in units of their deviation, shape (N, T), adding up to the score."""
        self.check_fitted()
        return self._standardise(self._terms(vectors))

    def score_batch(self, vectors: Any) -> Tensor:
        r"""Score an `Observation` as one batch; higher = more OOD.

        Residuals are averaged over the batch before their magnitude is taken, the other terms unchanged; each is
        scaled by :math:`\sqrt{N}`, so that an in-distribution batch scores about the same whatever its size.
        """
        self.check_fitted()
        root = len(vectors) ** 0.5
        terms = self._terms(vectors).mean(dim=0)
        scaled = self.term_mean_ + (terms - self.term_mean_) * root
        if not self._takes_length:
            residual = self._residual(self._standardised(vectors), vectors).mean(dim=0) * root
            scaled[0] = (residual.abs() * self.weight_).sum()
        return self._standardise(scaled[None]).sum()

    def contributions(self, vectors: Any) -> Tensor:
        """Return the contribution of each channel to *far* and *angle*, shape (N, D); with `terms` they add up to the score."""
        self.check_fitted()
        standard = self._standardised(vectors)
        if self._takes_length:
            far = self._angle.length_by_column(standard)
        else:
            far = self._residual(standard, vectors).abs() * self.weight_
        inner = far / self.term_std_[0] + self._angle.by_column(standard) * (self.used_[1] / self.term_std_[1])
        shares = torch.zeros_like(vectors.vector, dtype=inner.dtype)
        shares[:, self.keep_.long()] = inner
        return shares

    def terms(self, vectors: Any) -> dict[str, Tensor]:
        """Return the terms of no channel, (N,) each: *reach*, *doubt*, minus their usual values, and a constant."""
        standard = self.standard_terms(vectors)
        named = {name: standard[:, index] for index, name in enumerate(TERMS) if index >= 2}
        # The rest of far and angle: their usual values, and the correction that keeps far at least 0.
        return {**named, "constant": standard[:, :2].sum(dim=1) - self.contributions(vectors).sum(dim=1)}

    def _learn(self, inliers: Observation, chosen: Tensor | None) -> Self:
        """Learn everything but the scale of the terms from the chosen rows, all if None."""
        self.forget_derived()
        vectors = Blocks(inliers.vector, chosen)
        keep = distinct_columns(vectors, seed=self.seed)
        if not len(keep):
            raise InputError(
                "Expected inputs that differ from each other, but all have the same vector. Pass varied examples."
            )
        self.keep_ = keep.int()
        classes, n_classes = self._learn_classes(inliers.logits, vectors, chosen)
        known, classes = torch.unique(
            classes, return_inverse=True
        )  # of a hundred thousand classes only a few may occur
        rows = vectors.then(lambda block: block[:, keep].double())
        means, counts = class_means(rows, classes, len(known))
        within, share = explained_share(rows, means, classes, counts)
        centre = grand_mean(means, counts)
        shrunk = shrink_means(means, centre, counts, within, share)
        left, right = low_rank((shrunk - centre) / within, counts, RANK)
        weight = share_weights(share, len(vectors) - len(known))
        self.centre_, self.within_, self.weight_ = centre.float(), within.float(), weight.float()
        self.left_ = torch.zeros(n_classes, left.shape[1]).index_copy_(0, known, left.float())
        self.right_ = right.float().contiguous()
        angle = Angle.of(rows.then(lambda block: _in_deviations(block, centre, within)), classes, len(known), self.seed)
        for part in ("offset", "whiten", "target"):
            # In the layout of a saved file: the last bit of a product depends on the layout.
            setattr(self, f"angle_{part}_", getattr(angle, part).contiguous())
        return self

    def _learn_classes(self, logits: Tensor | None, vectors: Blocks, chosen: Tensor | None) -> tuple[Tensor, int]:
        """Return the class of each row and the number of classes: the model's predictions, or else clusters."""
        self.clusters_, self.temperature_ = torch.zeros(0, 0), torch.tensor(1.0)
        if logits is None or _count_classes(logits) < 2:
            return self._learn_clusters(vectors)
        outputs = Blocks(logits, chosen)
        self.temperature_ = torch.cat([block.std(dim=1) for block in outputs]).mean().clamp_min(1e-6)
        return torch.cat([block.argmax(dim=1) for block in outputs]), logits.shape[1]

    def _learn_clusters(self, vectors: Blocks) -> tuple[Tensor, int]:
        """Return clusters in place of classes for a model without any; few rows form a single one."""
        count = min(self._most_clusters, len(vectors) // ROWS_PER_CLUSTER)
        if count < 2:
            return torch.zeros(len(vectors), dtype=torch.int64), 1
        columns = self.keep_.long()
        columns = columns[-max(min(32, len(columns)), len(columns) // 8) :]
        last = vectors.then(lambda block: block[:, columns])
        # Centres and rows are compared in units of each column's deviation, the first row of the state.
        scale = Moments.of_blocks(last, len(columns)).std.clamp_min(1e-12)
        centres = k_means(last.then(lambda block: block / scale), count, seed=self.seed)
        self.clusters_ = torch.cat([scale[None], centres]).float()
        return torch.cat([self._nearest_cluster(block) for block in last]), count

    def _nearest_cluster(self, distinct: Tensor) -> Tensor:
        scale, centres = self.clusters_[0], self.clusters_[1:]
        rows = distinct[:, -len(scale) :].to(scale.dtype) / scale
        # The squared distance, minus the row's own length: `cdist` cannot be exported with a dynamic batch.
        return (centres.square().sum(dim=1) - 2 * rows @ centres.T).argmin(dim=1)

    def _membership(self, observation: Observation) -> Tensor | None:
        """Return the membership of each input in each class, (N, K); None if there is only one class."""
        if len(self.clusters_):
            nearest = self._nearest_cluster(self._distinct(observation))
            return torch.nn.functional.one_hot(nearest, len(self.clusters_) - 1).to(self.left_.dtype)
        if observation.logits is None or len(self.left_) < 2:
            return None
        return (observation.logits.float() / self.temperature_).softmax(dim=1)

    @cached_property
    def _angle(self) -> Angle:
        parts = [getattr(self, f"angle_{part}_") for part in ("offset", "whiten", "target")]
        return Angle(hash_columns(len(self.centre_), self.seed), *parts)

    # The state is in single precision, whatever the model computes in.

    def _distinct(self, observation: Observation) -> Tensor:
        return _choose(observation.vector, self.keep_).float()

    def _standardised(self, observation: Observation) -> Tensor:
        """Distance from the usual channel means in units of the within-class deviation, (N, D')."""
        return _in_deviations(self._distinct(observation), self.centre_, self.within_)

    def _residual(self, standard: Tensor, observation: Observation) -> Tensor:
        """The same from the channel means of the input's class, (N, D')."""
        membership = self._membership(observation)
        return standard if membership is None else standard - membership @ self.left_ @ self.right_

    def _terms(self, observation: Observation) -> Tensor:
        """Return the terms of each input, (N, T); one without a signal of the model is 0."""
        standard = self._standardised(observation)
        angle, length = self._angle.with_length(standard)
        far = length if self._takes_length else self._residual(standard, observation).abs() @ self.weight_
        reach = doubt = torch.zeros_like(far)
        if observation.logits is not None and self._has_classes(observation):
            logits = observation.logits.float()
            reach = -logits.logsumexp(dim=1) / length.clamp_min(1e-12)
            doubt = generalised_entropy(logits)
        return torch.stack([far, angle, reach, doubt], dim=1)

    def _has_classes(self, observation: Observation) -> bool:
        return observation.logits is not None and len(self.left_) > 1 and not len(self.clusters_)

    def _standardise(self, terms: Tensor) -> Tensor:
        standard = (terms - self.term_mean_) / self.term_std_ * self.used_
        least = LEAST if self._takes_length else 0.0
        return torch.cat([standard[:, :1].clamp_min(least), standard[:, 1:].clamp_min(LEAST)], dim=1)


def _count_classes(logits: Tensor | None) -> int:
    return 0 if logits is None or logits.dim() != 2 else logits.shape[1]


def left_out(used: Tensor) -> dict[str, str]:
    """Return the terms that are left out, each with the reason, given which count, (T,)."""
    return {name: _REASONS[name] for name, counts in zip(TERMS, used.tolist(), strict=True) if not counts}


def generalised_entropy(logits: Tensor) -> Tensor:
    r"""Return :math:`\sum_k q_k^\gamma (1 - q_k)^\gamma` of the most likely classes of each row, shape (N,).

    Liu, Lochman and Zach, GEN, CVPR 2023: :math:`\gamma = 0.1`, and of many classes the most likely tenth. Computed from
    logarithms: in single precision :math:`1 - q` of a confident prediction would be 0.

    Args:
        logits: Shape (N, K), of at least two classes.
    """
    most = max(_MOST_LIKELY, logits.shape[1] // 10)
    likely = logits.topk(min(most, logits.shape[1]), dim=1)
    total = logits.logsumexp(dim=1, keepdim=True)
    best = likely.indices[:, :1]
    others = logits.scatter(1, best, float("-inf")).logsumexp(dim=1, keepdim=True) - total  # of the most likely class
    log_q = likely.values - total
    log_rest = torch.cat([others, torch.log1p(-log_q[:, 1:].exp())], dim=1)
    return (_GAMMA * (log_q + log_rest)).exp().sum(dim=1)


def _in_deviations(rows: Tensor, centre: Tensor, within: Tensor) -> Tensor:
    return ((rows - centre) / within).clamp(-LIMIT, LIMIT)


def _choose(table: Tensor, columns: Tensor) -> Tensor:
    """Return some columns of a table, given in order: the table itself if all are chosen."""
    return table if table.shape[1] == len(columns) else table.index_select(1, columns)
