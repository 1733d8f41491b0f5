"""The default where only in-distribution data is at hand: is the input typical of the class the model sees in it?

No crafted data, no OOD data and no weight to tune. State is small: the class means of the NMD vector are kept at low
rank, everything else lives in sketches of at most 512 numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks
from neuralmean.errors import InputError
from neuralmean.scorers.base import Observation, VectorScorer
from neuralmean.scorers.statistics import (
    Sketch,
    class_means,
    distinct_columns,
    explained_share,
    grand_mean,
    k_means,
    ledoit_wolf,
    low_rank,
    shrink_means,
)
from neuralmean.stats.moments import Moments

RANK = 32
CLUSTERS = 20
ROWS_PER_CLUSTER = 10
FOLDS = 5
ONE_FOLD_FROM = 5000
LEAST_ROWS = 20
TERMS = ("far", "angle", "feature", "reach", "energy")


class TypicalityScorer(VectorScorer):
    r"""Adds up to five terms, each standardised on in-distribution rows that it was not learnt from.

    With :math:`x` the NMD vector, :math:`h` the penultimate feature, :math:`l` the logits and :math:`p` the softmax of
    the logits divided by their usual deviation:

    - *far*: :math:`\\sum_c a_c |x_c - \\sum_k p_k \\mu_{kc}| / w_c`, the distance from what the channel means of the predicted
      class are, in units of the deviation within classes; :math:`a_c` is proportional to the share of the channel's
      variance that the class explains;
    - *angle*: minus the largest cosine between :math:`x` and a class mean, after whitening;
    - *feature*: the same of :math:`h`;
    - *reach*: :math:`-\\log \\sum_k \\exp l_k` over the length of the whitened :math:`x`;
    - *energy*: :math:`-\\log \\sum_k \\exp l_k`.

    Classes are the model's own predictions: no labels are needed. For a model without classes, clusters of the vectors'
    last columns (those of the deepest layers) stand in for them, and the terms are *far* and *angle*.

    Args:
        seed: Of the sketches and folds.
    """

    name = "typicality"
    needs = frozenset({"logits", "feature"})
    options = ("seed",)
    learnt = (
        "keep_", "centre_", "within_", "weight_", "left_", "right_", "temperature_", "clusters_",
        "angle_offset_", "angle_whiten_", "angle_target_",
        "feature_keep_", "feature_centre_", "feature_scale_", "feature_offset_", "feature_whiten_", "feature_target_",
        "term_mean_", "term_std_",
    )  # fmt: skip

    keep_: Tensor
    clusters_: Tensor
    temperature_: Tensor
    left_: Tensor
    weight_: Tensor
    term_mean_: Tensor
    term_std_: Tensor

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed

    def fit(self, inliers: Any, outliers: Any = None, chosen: Tensor | None = None) -> Self:
        """Learn from an `Observation` of in-distribution inputs; out-of-distribution ones are not needed and not used."""
        rows = torch.arange(len(inliers)) if chosen is None else chosen
        if len(rows) < LEAST_ROWS:
            raise InputError(
                f"Expected at least {LEAST_ROWS} examples to fit the 'typicality' scorer, but got {len(rows)}."
            )
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed))
        folds = 1 if len(rows) >= ONE_FOLD_FROM else FOLDS
        values: list[Tensor] = []
        for fold in range(folds):
            apart = torch.zeros(len(rows), dtype=torch.bool)
            apart[order[fold::FOLDS]] = True
            self._learn(inliers, rows[~apart])
            values.extend(self._terms(block) for block in inliers.blocks(rows[apart]))
        terms = torch.cat(values)
        self._learn(inliers, chosen)
        self.term_mean_, self.term_std_ = terms.mean(dim=0), terms.std(dim=0).clamp_min(1e-12)
        return self

    def score(self, vectors: Any) -> Tensor:
        """Score each input of an `Observation`, shape (N,); higher = more OOD."""
        self.check_fitted()
        return ((self._terms(vectors) - self.term_mean_) / self.term_std_).sum(dim=1)

    def score_batch(self, vectors: Any) -> Tensor:
        r"""Score an `Observation` as one batch; higher = more OOD.

        Residuals are averaged over the batch before their magnitude is taken, the other terms as they are; each is
        scaled by :math:`\sqrt{N}`, so that an in-distribution batch scores about the same whatever its size.
        """
        self.check_fitted()
        root = len(vectors) ** 0.5
        terms = self._terms(vectors).mean(dim=0)
        scaled = (terms - self.term_mean_) * root
        residual = self._residual(self._standardised(vectors), vectors).mean(dim=0) * root
        scaled[0] = (residual.abs() * self.weight_).sum() - self.term_mean_[0]
        total: Tensor = (scaled / self.term_std_).sum()
        return total

    def contributions(self, vectors: Any) -> Tensor:
        """Share of each channel in *far* and *angle*, shape (N, D); with `terms` they add up to the score."""
        self.check_fitted()
        standard = self._standardised(vectors)
        inner = self._residual(standard, vectors).abs() * self.weight_ / self.term_std_[0]
        inner = inner + self._angle.by_column(standard) / self.term_std_[1]
        shares = torch.zeros_like(vectors.vector, dtype=inner.dtype)
        shares[:, self.keep_.long()] = inner
        return shares

    def terms(self, vectors: Any) -> dict[str, Tensor]:
        """Return what belongs to no channel, (N,) each: *feature*, *reach*, *energy*, less their usual values, and a constant."""
        values = self._terms(vectors) / self.term_std_
        usual = self.term_mean_ / self.term_std_
        constant = -usual[:2].sum().expand(len(values))
        rest = values[:, 1] - self._angle.by_column(self._standardised(vectors)).sum(dim=1) / self.term_std_[1]
        named = {name: values[:, index] - usual[index] for index, name in enumerate(TERMS) if index >= 2}
        return {**named, "constant": constant + rest}

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
        known, classes = torch.unique(classes, return_inverse=True)  # of a hundred thousand, few may ever occur
        rows = vectors.then(lambda block: block[:, keep].double())
        means, counts = class_means(rows, classes, len(known))
        within, share = explained_share(rows, means, classes, counts)
        within = within.clamp_min(1e-12)
        centre = grand_mean(means, counts)
        shrunk = shrink_means(means, centre, counts, within, share)
        left, right = low_rank((shrunk - centre) / within, counts, RANK)
        weight = share / share.sum() if share.sum() > 0 else torch.full_like(share, 1 / len(share))
        self.centre_, self.within_, self.weight_ = centre.float(), within.float(), weight.float()
        self.left_ = torch.zeros(n_classes, left.shape[1]).index_copy_(0, known, left.float())
        self.right_ = right.float().contiguous()
        self._keep_angle("angle", rows, classes, len(known), centre, within)
        self._learn_feature(inliers, chosen, classes, len(known))
        return self

    def _learn_feature(self, inliers: Observation, chosen: Tensor | None, classes: Tensor, n_classes: int) -> None:
        feature = Blocks(torch.zeros(len(inliers), 0) if inliers.feature is None else inliers.feature, chosen)
        keep = distinct_columns(feature, seed=self.seed)
        self.feature_keep_ = keep.int()
        rows = feature.then(lambda block: block[:, keep].double())
        moments = Moments.of_blocks(rows, len(keep))
        middle, scale = moments.mean, moments.std.clamp_min(1e-12)
        self.feature_centre_, self.feature_scale_ = middle.float(), scale.float()
        self._keep_angle("feature", rows, classes, n_classes, middle, scale)

    def _learn_classes(self, logits: Tensor | None, vectors: Blocks, chosen: Tensor | None) -> tuple[Tensor, int]:
        """Return the class of each row and how many there are: the model's own predictions, or else clusters."""
        self.clusters_, self.temperature_ = torch.zeros(0, 0), torch.tensor(1.0)
        if logits is None or logits.dim() != 2 or logits.shape[1] < 2:
            return self._learn_clusters(vectors)
        outputs = Blocks(logits, chosen)
        self.temperature_ = torch.cat([block.std(dim=1) for block in outputs]).mean().clamp_min(1e-6)
        return torch.cat([block.argmax(dim=1) for block in outputs]), logits.shape[1]

    def _learn_clusters(self, vectors: Blocks) -> tuple[Tensor, int]:
        """Let clusters stand in for the classes of a model that has none; of few rows there is only one."""
        count = min(CLUSTERS, len(vectors) // ROWS_PER_CLUSTER)
        if count < 2:
            return torch.zeros(len(vectors), dtype=torch.int64), 1
        columns = self.keep_.long()
        columns = columns[-max(min(32, len(columns)), len(columns) // 8) :]
        last = vectors.then(lambda block: block[:, columns])
        # Centres and rows are compared in units of each column's deviation; the first row of the state is that unit.
        scale = Moments.of_blocks(last, len(columns)).std.clamp_min(1e-12)
        centres = k_means(last.then(lambda block: block / scale), count, seed=self.seed)
        self.clusters_ = torch.cat([scale[None], centres]).float()
        return torch.cat([self._nearest_cluster(block) for block in last]), count

    def _nearest_cluster(self, distinct: Tensor) -> Tensor:
        scale, centres = self.clusters_[0], self.clusters_[1:]
        rows = distinct[:, -len(scale) :].to(scale.dtype) / scale
        # The squared distance, less the row's own length: `cdist` does not go into a graph whose batch is dynamic.
        return (centres.square().sum(dim=1) - 2 * rows @ centres.T).argmin(dim=1)

    def _membership(self, observation: Observation) -> Tensor | None:
        """How much each input belongs to each class, (N, K); None if there is one class only."""
        if len(self.clusters_):
            nearest = self._nearest_cluster(self._distinct(observation))
            return torch.nn.functional.one_hot(nearest, len(self.clusters_) - 1).to(self.left_.dtype)
        if observation.logits is None or len(self.left_) < 2:
            return None
        return (observation.logits.float() / self.temperature_).softmax(dim=1)

    def _keep_angle(
        self, name: str, rows: Blocks, classes: Tensor, n_classes: int, centre: Tensor, scale: Tensor
    ) -> None:
        angle = _Angle.of(rows.then(lambda block: (block - centre) / scale), classes, n_classes, self.seed)
        for part in ("offset", "whiten", "target"):
            # Laid out as a saved file gives it back: the last bit of a product depends on the layout.
            setattr(self, f"{name}_{part}_", getattr(angle, part).contiguous())

    @cached_property
    def _angle(self) -> _Angle:
        return self._make_angle("angle", len(self.centre_))

    @cached_property
    def _feature(self) -> _Angle:
        return self._make_angle("feature", len(self.feature_centre_))

    def _make_angle(self, name: str, width: int) -> _Angle:
        parts = [getattr(self, f"{name}_{part}_") for part in ("offset", "whiten", "target")]
        return _Angle(_hash_columns(width, self.seed), *parts)

    # What is learnt is in single precision, whatever the model computes in.

    def _distinct(self, observation: Observation) -> Tensor:
        return _choose(observation.vector, self.keep_).float()

    def _standardised(self, observation: Observation) -> Tensor:
        """Distance from the usual channel means in units of the within-class deviation, (N, D')."""
        standard: Tensor = (self._distinct(observation) - self.centre_) / self.within_
        return standard

    def _residual(self, standard: Tensor, observation: Observation) -> Tensor:
        """The same from the channel means of the input's class, (N, D')."""
        membership = self._membership(observation)
        return standard if membership is None else standard - membership @ self.left_ @ self.right_

    def _terms(self, observation: Observation) -> Tensor:
        """Return the five terms of each input, (N, 5); one that the model has no signal for is 0."""
        standard = self._standardised(observation)
        far = self._residual(standard, observation).abs() @ self.weight_
        angle, length = self._angle.with_length(standard)
        feature = energy = reach = torch.zeros_like(far)
        if observation.feature is not None and len(self.feature_keep_):
            kept = _choose(observation.feature, self.feature_keep_).float()
            feature = self._feature.with_length((kept - self.feature_centre_) / self.feature_scale_)[0]
        if observation.logits is not None and len(self.left_) > 1 and not len(self.clusters_):
            # Minus the log-sum-exp, by one kernel where `logsumexp` takes ten.
            output = observation.logits.float()
            energy = output.log_softmax(dim=1)[:, 0] - output[:, 0]
            reach = energy / length.clamp_min(1e-12)
        return torch.stack([far, angle, feature, reach, energy], dim=1)


@dataclass(frozen=True)
class _Angle:
    """Whitened angle between a row and its nearest class mean; without classes, the whitened distance from the mean.

    Standardised rows are hashed with random signs into at most 512 buckets, centred and whitened by the Ledoit-Wolf
    covariance within classes.
    """

    sketch: Sketch
    offset: Tensor  # (P,)
    whiten: Tensor  # (P, P)
    target: Tensor  # (K, P), of length 1; no rows without classes

    @classmethod
    def of(cls, rows: Blocks, classes: Tensor, n_classes: int, seed: int) -> _Angle:
        """Learn from rows (N, D) in float64."""
        sketch = _hash_columns(rows.width, seed)
        sketched = rows.then(sketch.add_up)
        means, counts = class_means(sketched, classes, n_classes)
        covariance = ledoit_wolf(block - means[kinds] for block, kinds in sketched.beside(classes))
        jitter = 1e-9 * covariance.trace().clamp_min(1e-12) * torch.eye(len(covariance), dtype=torch.float64)
        whiten = torch.linalg.cholesky(torch.linalg.inv(covariance + jitter))
        offset = grand_mean(means, counts)
        target = ((means - offset) @ whiten)[counts > 0][: 0 if n_classes == 1 else None]
        target = target / target.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return cls(sketch, offset.float(), whiten.float(), target.float())

    def with_length(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the term of each row and the whitened length of the row, (N,) each."""
        whitened = self._whitened(rows)
        length = torch.linalg.vector_norm(whitened, dim=1)  # a kernel, where `norm` is Python
        if not len(self.target):
            return length, length
        return -(whitened @ self.target.T).amax(dim=1) / length.clamp_min(1e-12), length

    def by_column(self, rows: Tensor) -> Tensor:
        """Share of each column in the term, (N, D): cosine and distance are linear in the columns once the length is known."""
        whitened = self._whitened(rows)
        length = whitened.norm(dim=1, keepdim=True).clamp_min(1e-12)
        direction = -self.target[(whitened @ self.target.T).argmax(dim=1)] if len(self.target) else whitened
        along = direction / length @ self.whiten.T
        shares: Tensor = rows * self.sketch.sign * along[:, self.sketch.bucket]
        return shares

    def _whitened(self, rows: Tensor) -> Tensor:
        whitened: Tensor = (self.sketch.add_up(rows) - self.offset) @ self.whiten
        return whitened


def _choose(table: Tensor, columns: Tensor) -> Tensor:
    """Return some columns of a table, given in order: the table itself if these are all."""
    return table if table.shape[1] == len(columns) else table.index_select(1, columns)


def _hash_columns(width: int, seed: int, buckets: int = 512) -> Sketch:
    """Return random buckets and signs of columns; up to 512 columns have a bucket each."""
    if width <= buckets:
        return Sketch.of(torch.arange(width), torch.ones(width))
    generator = torch.Generator().manual_seed(seed)
    bucket = torch.arange(width)[torch.randperm(width, generator=generator)] % buckets
    sign = torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1.0
    return Sketch.of(bucket, sign)
