"""The whitened rows of the typicality scorer: their angle to the class means, and their length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from neuralmean.data.table import Blocks
from neuralmean.scorers.statistics import Sketch, class_means, grand_mean, ledoit_wolf


@dataclass(frozen=True)
class Angle:
    """Whitened angle between a row and its nearest class mean; without classes, the whitened distance from the mean.

    Standardised rows are hashed with random signs into at most 512 buckets, centred and whitened by the Ledoit-Wolf
    covariance within classes.
    """

    sketch: Sketch
    offset: Tensor  # (P,)
    whiten: Tensor  # (P, P)
    target: Tensor  # (K, P), of length 1; no rows without classes

    @classmethod
    def of(cls, rows: Blocks, classes: Tensor, n_classes: int, seed: int) -> Angle:
        """Learn from rows (N, D) in float64."""
        sketch = hash_columns(rows.width, seed)
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
        length = torch.linalg.vector_norm(whitened, dim=1)  # a kernel; `norm` is Python
        if not len(self.target):
            return length, length
        return -(whitened @ self.target.T).amax(dim=1) / length.clamp_min(1e-12), length

    def by_column(self, rows: Tensor) -> Tensor:
        """Return the contribution of each column to the term, (N, D): cosine and distance are linear in the columns."""
        whitened = self._whitened(rows)
        direction = -self.target[(whitened @ self.target.T).argmax(dim=1)] if len(self.target) else whitened
        return self._along(rows, whitened, direction)

    def length_by_column(self, rows: Tensor) -> Tensor:
        """Return the contribution of each column to the whitened length of the row, (N, D)."""
        whitened = self._whitened(rows)
        return self._along(rows, whitened, whitened)

    def _along(self, rows: Tensor, whitened: Tensor, direction: Tensor) -> Tensor:
        """Split the inner product of the whitened rows, of length 1, with a direction over the columns."""
        length = whitened.norm(dim=1, keepdim=True).clamp_min(1e-12)
        along = direction / length @ self.whiten.T
        shares: Tensor = rows * self.sketch.sign * along[:, self.sketch.bucket]
        return shares

    def _whitened(self, rows: Tensor) -> Tensor:
        whitened: Tensor = (self.sketch.add_up(rows) - self.offset) @ self.whiten
        return whitened


def hash_columns(width: int, seed: int, buckets: int = 512) -> Sketch:
    """Return random buckets and signs of columns; up to 512 columns have a bucket each."""
    if width <= buckets:
        return Sketch.of(torch.arange(width), torch.ones(width))
    generator = torch.Generator().manual_seed(seed)
    bucket = torch.arange(width)[torch.randperm(width, generator=generator)] % buckets
    sign = torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1.0
    return Sketch.of(bucket, sign)
