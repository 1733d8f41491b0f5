"""Class-conditional statistics for the typicality scorer, and its sketch of columns: pure functions of tensors.

Rows are read in blocks and summed in float64, so that they need not fit in memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from neuralmean.data.table import Blocks

PRIOR_ROWS = (
    10  # how many rows the overall deviation of a column counts as, beside those that show the one within classes
)


def distinct_columns(rows: Blocks, *, seed: int = 0) -> Tensor:
    """Return the indices of the columns of (N, D) that vary and do not repeat an earlier one, shape (D',).

    Networks that concatenate (DenseNet) normalise the same channel repeatedly. Two columns are the same if they
    differ by a constant only; they are told apart by a few random projections of their shape over the rows.
    """
    rows = rows.then(Tensor.double)
    total = torch.zeros(rows.width, dtype=torch.float64)
    size = torch.full_like(total, 1e-30)
    for block in rows:
        total += block.sum(dim=0)
        size = size.maximum(block.abs().amax(dim=0))
    centred = rows.then(lambda block: block - total / len(rows))
    probes = torch.randn(4, len(rows), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    scale, projected = torch.zeros_like(total), torch.zeros(4, len(total), dtype=torch.float64)
    for block, probe in centred.beside(probes.T):
        scale += block.square().sum(dim=0)
        projected += probe.T @ block
    scale = scale.sqrt()
    varies = (scale / size > 1e-6 * len(rows) ** 0.5).nonzero().squeeze(1)
    signature = (projected[:, varies] / scale[varies]).mul(1e3).round().T.contiguous()
    _, inverse = torch.unique(signature, dim=0, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1 if len(inverse) else 0,), len(varies), dtype=torch.int64)
    first.scatter_reduce_(0, inverse, torch.arange(len(varies)), "amin")
    kept: Tensor = varies[first.sort().values]
    return kept


def class_means(rows: Blocks, classes: Tensor, n_classes: int) -> tuple[Tensor, Tensor]:
    """Return the mean row of each class, float64 (K, D), and how many rows it has, (K,); the grand mean where it has none."""
    counts = torch.bincount(classes, minlength=n_classes)
    sums = torch.zeros(n_classes, rows.width, dtype=torch.float64)
    for block, kinds in rows.beside(classes):
        sums.index_add_(0, kinds, block.double())
    means = sums / counts.clamp_min(1).unsqueeze(1)
    means[counts == 0] = sums.sum(dim=0) / len(rows)
    return means, counts


def grand_mean(means: Tensor, counts: Tensor) -> Tensor:
    """Return the mean of all rows, (D,), given that of each class and how many rows it has."""
    return counts.to(means.dtype) @ means / counts.sum()


def explained_share(rows: Blocks, means: Tensor, classes: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the within-class deviation of each column and the share of its variance that the class explains.

    Both are estimated as if `PRIOR_ROWS` more rows had shown the overall deviation :math:`s`, since few rows, or classes of one
    row each, say little about the deviation within classes:

    .. math::
        w^2 = \frac{\sum_i (x_i - \mu_{k(i)})^2 + m s^2}{N - K + m}.

    With :math:`b` the variance of the class means, the variance between classes is
    :math:`\tau^2 = \max(b - w^2 (K - 1) / N, 0)` (the means of finite classes scatter even where the classes are alike), and the
    share is :math:`\tau^2 / (\tau^2 + w^2)`.
    """
    n, present = len(rows), int((counts > 0).sum())
    squares = torch.zeros_like(means[0])
    for block, kinds in rows.beside(classes):
        squares += (block - means[kinds]).square().sum(dim=0)
    weight = (counts.to(means.dtype) / n).unsqueeze(1)
    between = (weight * (means - grand_mean(means, counts)).square()).sum(dim=0)
    overall = (squares / n + between) * (n / max(n - 1, 1))
    within = (squares + PRIOR_ROWS * overall) / (n - present + PRIOR_ROWS)
    tau = (between - within * ((present - 1) / n)).clamp_min(0)
    total = tau + within
    return within.sqrt(), torch.where(total > 0, tau / total.clamp_min(1e-30), torch.zeros_like(total))


def share_weights(share: Tensor, freedom: int) -> Tensor:
    """Return the weight of each column, (D,), adding up to 1: larger for larger shares, and more equal if few rows estimate them.

    Args:
        share: Share of each column's variance that the class explains, (D,).
        freedom: Rows minus classes.
    """
    weight = freedom * share + PRIOR_ROWS
    return weight / weight.sum()


def shrink_means(means: Tensor, centre: Tensor, counts: Tensor, within: Tensor, share: Tensor) -> Tensor:
    r"""Shrink class means towards the grand mean by their noise: empirical Bayes, column by column.

    A mean of :math:`n_k` rows is kept by :math:`\tau^2 / (\tau^2 + w^2 / n_k)`.
    """
    tau = within.square() * share / (1 - share).clamp_min(1e-6)
    kept = tau / (tau + within.square() / counts.clamp_min(1e-9).unsqueeze(1) + 1e-30)
    return centre + kept * (means - centre)


def ledoit_wolf(residuals: Iterable[Tensor]) -> Tensor:
    r"""Return the Ledoit-Wolf covariance of centred rows, given in blocks (n, P), as (P, P).

    :math:`(1 - \delta) S + \delta \mu I` with the shrinkage :math:`\delta` of Ledoit and Wolf (2004), which is the best
    mixture in expected squared error and needs no tuning.
    """
    n, sample, fourth = 0, torch.zeros(()), torch.zeros(())
    for block in residuals:
        n, sample = n + len(block), sample + block.T @ block
        fourth = fourth + block.square().sum(dim=1).square().sum()
    sample, p = sample / n, len(sample)
    mu = sample.trace() / p
    spread = (sample.square().sum() / p - mu.square()).clamp_min(1e-30)
    noise = ((fourth / n - sample.square().sum()) / (n * p)).clamp_min(0)
    delta = (noise / spread).clamp(max=1)
    return (1 - delta) * sample + delta * mu * torch.eye(p, dtype=sample.dtype)


def low_rank(matrix: Tensor, counts: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return `left` (K, R) and `right` (R, D) whose product approximates `matrix` best, rows weighted by their counts."""
    rank = min(rank, *matrix.shape)
    weight = counts.to(matrix.dtype).sqrt().unsqueeze(1)
    # Through the small Gram matrix of the classes, because there are many columns; `eigh` fails on its repeated zeros.
    weighted = matrix * weight
    basis = torch.linalg.svd(weighted @ weighted.T)[0][:, :rank]
    return torch.where(weight > 0, basis / weight.clamp_min(1e-12), 0.0), basis.T @ weighted


def k_means(rows: Blocks, clusters: int, *, seed: int = 0, iterations: int = 30) -> Tensor:
    """Return the centres of that many clusters, (K, D): Lloyd's algorithm from a k-means++ start, seeded."""
    generator = torch.Generator().manual_seed(seed)
    centres = rows[torch.randint(len(rows), (1,), generator=generator)].double()
    distances = rows.then(lambda block: torch.cdist(block.double(), centres))
    for _ in range(clusters - 1):
        weight = torch.cat([block.amin(dim=1) for block in distances]).square().clamp_min(1e-30)
        centres = torch.cat([centres, rows[torch.multinomial(weight, 1, generator=generator)].double()])
    for _ in range(iterations):
        nearest = torch.cat([block.argmin(dim=1) for block in distances])
        moved, counts = class_means(rows, nearest, clusters)
        moved[counts == 0] = centres[counts == 0]
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres


@dataclass(frozen=True)
class Sketch:
    """Columns hashed with signs into fewer buckets, which preserves inner products in expectation: a count sketch."""

    bucket: Tensor  # (D,) int64, of each column
    sign: Tensor  # (D,)
    members: Tensor  # (m, P) int64, columns of each bucket; the first column where a bucket has fewer than m
    weight: Tensor  # (m, P), their signs, and 0 for padding

    @classmethod
    def of(cls, bucket: Tensor, sign: Tensor) -> Sketch:
        """Make a sketch of the bucket and the sign of each column, (D,) each.

        Example:
            >>> Sketch.of(torch.tensor([0, 1, 0]), torch.tensor([1.0, 1.0, -1.0])).add_up(torch.tensor([[1.0, 2.0, 5.0]]))
            tensor([[-4.,  2.]])
        """
        counts = torch.bincount(bucket)
        order = torch.argsort(bucket, stable=True)
        place = torch.arange(len(bucket)) - (counts.cumsum(0) - counts)[bucket[order]]
        shape = int(counts.max()) if len(counts) else 1, len(counts)
        members, weight = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=sign.dtype)
        members[place, bucket[order]] = order
        weight[place, bucket[order]] = sign[order]
        return cls(bucket, sign, members, weight)

    def add_up(self, rows: Tensor) -> Tensor:
        """Sum the signed columns of each bucket, (N, D) to (N, P): the rows themselves if each column has a bucket.

        Columns are gathered, not scattered: onnxruntime adds scattered columns in several threads without locks and loses some.
        """
        if len(self.members) == 1:
            return rows
        gathered = rows.index_select(1, self.members.flatten()).view(-1, *self.members.shape)
        return (gathered * self.weight.to(rows.dtype)).sum(dim=1)
