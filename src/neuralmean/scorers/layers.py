"""For models without classes, such as text encoders: how far each layer is from the training data, all layers counting alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks
from neuralmean.errors import InputError
from neuralmean.scorers.base import VectorScorer
from neuralmean.scorers.statistics import Sketch, ledoit_wolf
from neuralmean.stats.moments import Moments

BUCKETS = 512
LEAST_ROWS = 20
_SEED = 0


class LayersScorer(VectorScorer):
    r"""Mean over the layers of the standardised Mahalanobis distance of a layer's channel means.

    With :math:`d_l` the distance of the means of layer l under the Ledoit-Wolf covariance of that layer (channels beyond 512 are
    hashed with random signs), :math:`m_l` and :math:`s_l` its mean and deviation on rows that it was not learnt from, and L
    layers, the score is :math:`\frac{1}{L} \sum_l (d_l - m_l) / s_l`.

    Args:
        widths: Channels of each layer, in order; none takes all columns as one layer. A detector fills it in.
    """

    name = "layers"
    options = ("widths",)
    learnt = ("centre_", "scale_", "whiten_", "usual_", "spread_")

    centre_: Tensor  # (D,)
    scale_: Tensor  # (D,)
    whiten_: Tensor  # the matrices of all layers, one after the other
    usual_: Tensor  # (L,)
    spread_: Tensor  # (L,)

    def __init__(self, *, widths: Sequence[int] = ()) -> None:
        self.widths = list(widths)

    def fit(self, inliers: Any, outliers: Any = None, chosen: Tensor | None = None) -> Self:
        """Learn from in-distribution vectors (N, D); out-of-distribution ones are not used."""
        rows = torch.arange(len(inliers)) if chosen is None else chosen
        if len(rows) < LEAST_ROWS:
            raise InputError(
                f"Expected at least {LEAST_ROWS} examples to fit the 'layers' scorer, but got {len(rows)}."
            )
        if not self.widths:
            self.widths = [inliers.shape[1]]
        if sum(self.widths) != inliers.shape[1]:
            raise InputError(
                f"Expected vectors with the {sum(self.widths)} columns of `widths`, but got {inliers.shape[1]}."
            )
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(_SEED))]
        half = len(order) // 2
        distances = list[Tensor]()
        for known, apart in ((order[:half], order[half:]), (order[half:], order[:half])):
            self._learn(inliers, known)
            distances.extend(self._distances(block) for block in Blocks(inliers, apart))
        unseen = torch.cat(distances).double()
        self._learn(inliers, chosen)
        self.usual_, self.spread_ = unseen.mean(dim=0).float(), unseen.std(dim=0).clamp_min(1e-12).float()
        return self

    def score(self, vectors: Any) -> Tensor:
        """Score each row of (N, D), shape (N,); higher = more OOD."""
        self.check_fitted()
        scores: Tensor = ((self._distances(vectors) - self.usual_) / self.spread_).mean(dim=1)
        return scores

    def contributions(self, vectors: Any) -> Tensor:
        """Share of each channel, (N, D): a distance is linear in the channels once it is known."""
        self.check_fitted()
        shares = torch.zeros(vectors.shape, dtype=torch.float32)
        weights = 1 / (self.spread_ * len(self.widths))
        for index, (columns, sketch, whiten) in enumerate(self._layers):
            standard = self._standardised(vectors, columns)
            whitened = sketch.add_up(standard) @ whiten
            length = torch.linalg.vector_norm(whitened, dim=1, keepdim=True).clamp_min(1e-12)
            along = (whitened / length) @ whiten.T
            shares[:, columns] = standard * sketch.sign * along[:, sketch.bucket] * weights[index]
        return shares

    def terms(self, vectors: Any) -> dict[str, Tensor]:
        """Return what belongs to no channel: minus the usual distance."""
        constant = -(self.usual_ / self.spread_).mean()
        return {"constant": constant.expand(len(vectors))}

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Take over what another scorer of the same kind has learnt."""
        super().load_state(state)
        known = all(isinstance(width, int) and not isinstance(width, bool) and width > 0 for width in self.widths)
        if not known or sum(self.widths) != len(self.centre_):
            raise InputError(
                f"Expected `widths` that add up to {len(self.centre_)} columns, but got {self.widths[:5]}."
            )
        return self

    def _learn(self, inliers: Tensor, chosen: Tensor | None) -> None:
        self.forget_derived()
        rows = Blocks(inliers, chosen)
        moments = Moments.of_blocks(rows, rows.width)
        scale = moments.std
        self.centre_ = moments.mean.float()
        self.scale_ = scale.clamp_min(1e-3 * scale.mean()).clamp_min(1e-12).float()
        self.whiten_ = torch.cat(
            [self._whitening(rows, columns, sketch).flatten() for columns, sketch in self._parts()]
        )

    def _whitening(self, rows: Blocks, columns: slice, sketch: Sketch) -> Tensor:
        covariance = ledoit_wolf(sketch.add_up(self._standardised(block, columns)).double() for block in rows)
        jitter = 1e-9 * covariance.trace().clamp_min(1e-12) * torch.eye(len(covariance), dtype=torch.float64)
        factor: Tensor = torch.linalg.cholesky(torch.linalg.inv(covariance + jitter))
        return factor.float()

    def _distances(self, vectors: Tensor) -> Tensor:
        """Return the distance of each layer, (N, L)."""
        parts = [
            torch.linalg.vector_norm(sketch.add_up(self._standardised(vectors, columns)) @ whiten, dim=1)
            for columns, sketch, whiten in self._layers
        ]
        return torch.stack(parts, dim=1)

    def _standardised(self, vectors: Tensor, columns: slice) -> Tensor:
        standard: Tensor = (vectors[:, columns].float() - self.centre_[columns]) / self.scale_[columns]
        return standard

    def _parts(self) -> Iterator[tuple[slice, Sketch]]:
        """Yield the columns of each layer, and into which buckets they are hashed."""
        for start, end in pairwise([0, *accumulate(self.widths)]):
            yield slice(start, end), _hash(end - start)

    @cached_property
    def _layers(self) -> list[tuple[slice, Sketch, Tensor]]:
        parts = list(self._parts())
        sides = [min(BUCKETS, columns.stop - columns.start) for columns, _ in parts]
        matrices = torch.split(self.whiten_, [side * side for side in sides])
        return [
            (columns, sketch, matrix.view(side, side))
            for (columns, sketch), side, matrix in zip(parts, sides, matrices, strict=True)
        ]


def _hash(width: int) -> Sketch:
    if width <= BUCKETS:
        return Sketch.of(torch.arange(width), torch.ones(width))
    generator = torch.Generator().manual_seed(_SEED)
    bucket = torch.arange(width)[torch.randperm(width, generator=generator)] % BUCKETS
    return Sketch.of(bucket, torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1.0)
