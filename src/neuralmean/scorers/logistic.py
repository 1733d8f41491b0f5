"""Logistic regression on the standardised vector: the paper's Ours-LR.

This file holds the fit and the choice of the penalty; the optimisation itself is in `logistic_solver`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks, fits_in_memory
from neuralmean.errors import InputError
from neuralmean.scorers.base import VectorScorer, check_two_classes
from neuralmean.scorers.logistic_solver import Effort, Problems, RowBlocks, Spectrum, sketch_spectrum, solve
from neuralmean.scorers.standardise import column_scale

PENALTIES = torch.logspace(-4, 4, 10, dtype=torch.float64)  # sklearn's C: larger values penalise less
FOLDS = 5
_FEW_ROWS = 512  # up to this many rows are rotated into as many columns, in float64

_FOLDS_OF_MANY = Effort(1e-4, 50)  # sklearn's own tolerance; more digits change neither the choice nor the AUROC
_REFIT_OF_MANY = Effort(1e-5, 50)
_FEW = Effort(1e-8, 2000)  # a single row decides between penalties, and an iteration is cheap


class LogisticScorer(VectorScorer):
    r"""Scores an input by the linear part of a logistic regression between in- and out-of-distribution rows.

    .. math::
        s(x) = \sum_c w_c z_c(x), \qquad z_c(x) = (\mathrm{NMD}_c(x) - m_c) / \sigma_c

    with :math:`m_c` and :math:`\sigma_c` of all rows of the fit. The weights are those of sklearn's `LogisticRegressionCV`
    with its defaults: L2 penalty, the one of ten strengths with the best mean accuracy over five stratified folds (the
    strongest of equals), then all rows. The intercept is left out of the score: it is the same for every input, and
    thresholds are calibrated on scores.

    With fewer than five examples of a kind there are as many folds as examples, and with fewer than three C is 1. Columns
    that do not vary get weight 0.

    Attributes (after `fit`):
        weight\_: Weight of each standardised column, (D,). Its magnitude is the column's importance.
        mean\_, scale\_: What columns are standardised with, (D,) each.
        penalty\_: The C that was chosen, a 0-d tensor.
    """

    name = "logistic"
    uses_outliers = True
    learnt = ("weight_", "mean_", "scale_", "penalty_")

    weight_: Tensor
    mean_: Tensor
    scale_: Tensor
    penalty_: Tensor

    def fit(self, inliers: Tensor, outliers: Tensor | None = None, chosen: Tensor | None = None) -> Self:
        """Learn from in-distribution rows (N, D) and out-of-distribution rows (M, D).

        One copy is held in memory; rows too large for that are read repeatedly, see `fit_chunks`.
        """
        outliers = check_two_classes(inliers, outliers, self.name)
        sides = (Blocks(inliers.detach(), chosen), Blocks(outliers.detach()))
        is_ood = torch.arange(sum(map(len, sides))) >= len(sides[0])
        if len(is_ood) > _FEW_ROWS and not fits_in_memory(len(is_ood), inliers.shape[1]):
            kinds = is_ood[: len(sides[0])], is_ood[len(sides[0]) :]
            return self.fit_chunks(lambda: chain(sides[0].beside(kinds[0]), sides[1].beside(kinds[1])))
        table = torch.empty(len(is_ood), inliers.shape[1])
        for side, start in zip(sides, (0, len(sides[0])), strict=True):
            for part in side.parts():
                table[start + part.start : start + part.stop] = side[part]
        self.mean_, self.scale_, varies = column_scale(lambda: [table])
        table.sub_(self.mean_).div_(self.scale_)
        if len(table) <= _FEW_ROWS:
            table, basis = _rotate(table)
            weights = basis @ self._fit_rows(RowBlocks.of(table), is_ood, _FEW, _FEW)
        else:
            weights = self._fit_rows(RowBlocks.of(table), is_ood, _FOLDS_OF_MANY, _REFIT_OF_MANY)
        self.weight_ = weights.float() * varies
        self.forget_derived()
        return self

    def fit_chunks(self, chunks: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> Self:
        """Learn from rows that need not fit in memory, such as a memory-mapped file of float16.

        Held at any time are one chunk and about 2 KB per row, whatever the number of columns. The chunks are read twice
        per iteration of the solver, about 210 times at most.

        Args:
            chunks: Called once per pass; yields rows (n, D) of any float type and which of them are out-of-distribution,
                bool (n,), in the same order each time.

        Example:
            >>> rows, is_ood = torch.tensor([[0.0], [1.0], [4.0], [5.0]]), torch.tensor([False, False, True, True])
            >>> scorer = LogisticScorer().fit_chunks(lambda: zip(rows.split(2), is_ood.split(2)))
            >>> bool(scorer.score(torch.tensor([[9.0]])) > scorer.score(torch.tensor([[0.0]])))
            True
        """
        kinds = [kind.bool() for _, kind in chunks()]
        is_ood = torch.cat(kinds) if kinds else torch.zeros(0, dtype=torch.bool)
        if is_ood.all() or not is_ood.any():
            raise InputError(
                f"Expected examples of both kinds to fit the {self.name!r} scorer, but got {int((~is_ood).sum())} "
                f"in-distribution and {int(is_ood.sum())} OOD rows. Pass chunks that hold both."
            )
        self.mean_, self.scale_, varies = column_scale(lambda: (block.float() for block, _ in chunks()))
        rows = RowBlocks(lambda: (self._standardise(block) for block, _ in chunks()), len(is_ood), len(self.mean_))
        self.weight_ = self._fit_rows(rows, is_ood, _FOLDS_OF_MANY, _REFIT_OF_MANY) * varies
        self.forget_derived()
        return self

    def score(self, vectors: Tensor) -> Tensor:
        """Score each row of (N, D), shape (N,); higher = more OOD."""
        return self.contributions(vectors).sum(dim=1)

    def contributions(self, vectors: Tensor) -> Tensor:
        """Share of each channel in the score, shape (N, D): weight times standardised column."""
        self.check_fitted()
        return (vectors.float() - self.mean_) * self._slope

    @cached_property
    def _slope(self) -> Tensor:
        """Return the weight of each unstandardised column, (D,)."""
        return self.weight_ / self.scale_

    def _standardise(self, vectors: Tensor) -> Tensor:
        return (vectors.float() - self.mean_) / self.scale_

    def _fit_rows(self, rows: RowBlocks, is_ood: Tensor, folds_effort: Effort, refit_effort: Effort) -> Tensor:
        """Choose the penalty and return the weights, shape (D,), for standardised rows."""
        spectrum, dtype = sketch_spectrum(rows), rows.dtype
        sign = torch.where(is_ood, 1.0, -1.0).to(dtype)
        folds = min(FOLDS, int(is_ood.sum()), int((~is_ood).sum()))
        start = torch.zeros(1, rows.columns + 1, dtype=dtype)
        self.penalty_ = torch.tensor(1.0, dtype=torch.float64)
        if folds >= 3:
            best, start = _cross_validate(rows, is_ood, sign, spectrum, fold_of_row(is_ood, folds), folds_effort)
            self.penalty_ = PENALTIES[best].clone()
        problem = Problems(
            sign,
            torch.full((1, rows.count), 1 / rows.count, dtype=dtype),
            (1 / (self.penalty_ * rows.count)).to(dtype).view(1, 1),
        )
        weights, _ = solve(rows, problem, spectrum, start, refit_effort)
        return weights[0, :-1]


def fold_of_row(is_ood: Tensor, folds: int) -> Tensor:
    """Return the fold of each row, shape (N,): those of sklearn's StratifiedKFold, consecutive rows of each kind."""
    fold = torch.empty(len(is_ood), dtype=torch.long)
    first = 0
    for kind in (is_ood[0], ~is_ood[0]):
        members = is_ood == kind
        count = int(members.sum())
        sizes = torch.bincount((first + torch.arange(count)) % folds, minlength=folds)
        fold[members] = torch.repeat_interleave(torch.arange(folds), sizes)
        first += count
    return fold


def _cross_validate(
    rows: RowBlocks, is_ood: Tensor, sign: Tensor, spectrum: Spectrum, fold: Tensor, effort: Effort
) -> tuple[int, Tensor]:
    """Return which penalty is best and weights to start its refit from, shape (1, D + 1)."""
    folds = int(fold.max()) + 1
    held_out = fold == torch.arange(folds)[:, None]  # (F, N)
    trained = (~held_out).sum(dim=1, keepdim=True)
    share = (~held_out / trained).to(sign.dtype).repeat(len(PENALTIES), 1)  # penalty by penalty, fold by fold
    ridge = (1 / (PENALTIES[:, None, None] * trained)).view(-1, 1).to(sign.dtype)
    start = torch.zeros(len(share), rows.columns + 1, dtype=sign.dtype)
    weights, margins = solve(rows, Problems(sign, share, ridge), spectrum, start, effort)
    right = ((margins > 0) == is_ood).view(len(PENALTIES), folds, -1) & held_out
    accuracy = (right.sum(dim=2).double() / held_out.sum(dim=1)).mean(dim=1)
    best = int((accuracy >= accuracy.max() - 1e-9).nonzero()[0])
    return best, weights.view(len(PENALTIES), folds, -1)[best].mean(dim=0, keepdim=True)


def _rotate(table: Tensor) -> tuple[Tensor, Tensor]:
    """Return few rows (N, D) in coordinates of their own span, float64 (N, R), and the span's basis, (D, R)."""
    left, values, right = torch.linalg.svd(table.double(), full_matrices=False)
    kept = values > values[0] * 1e-6
    return left[:, kept] * values[kept], right[kept].T
