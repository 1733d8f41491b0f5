r"""Many logistic regressions over the same rows, solved together.

Only the optimisation, independent of folds, standardisation and scorers. Problem k of K minimises,
with labels s_i = ±1, row weights p_ki that add up to 1 and an intercept b_k that is not penalised,

    f_k(w, b) = sum_i p_ki log(1 + exp(-s_i (x_i · w + b))) + ridge_k / 2 |w|²

by L-BFGS. Three things make it fast. Each pass over the rows is one matrix product for all the problems that are not
solved yet. A line search needs no pass, since margins are linear in the step. And every problem starts from the bound
X'X / 4 N + ridge on its Hessian (Böhning 1992), whose leading eigenvectors are shared and found by one sketch of the rows,
so that a few dozen iterations replace hundreds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

CURVATURE_BOUND = 0.25  # p (1 - p) is never larger
MEMORY = 8  # steps that L-BFGS remembers
SKETCH_COLUMNS = 256
SKETCH_ROWS = 8192


class RowBlocks:
    """An (N, D) matrix that is only ever read in blocks of rows, so that it may live on disk.

    Args:
        blocks: Called once per pass; yields the rows in the same order each time, shapes (n, D).
        count: Number of rows, N.
        columns: Number of columns, D.
        dtype: Of the blocks, and of all that is computed from them.
    """

    def __init__(
        self, blocks: Callable[[], Iterable[Tensor]], count: int, columns: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.blocks = blocks
        self.count = count
        self.columns = columns
        self.dtype = dtype

    @classmethod
    def of(cls, table: Tensor) -> RowBlocks:
        """Return the rows of a table that is in memory, shape (N, D)."""
        return cls(lambda: [table], table.shape[0], table.shape[1], table.dtype)

    def margins(self, weights: Tensor) -> Tensor:
        """Return `x_i · w_k + b_k`, shape (K, N), for weights (K, D + 1) whose last column is the intercept."""
        margins = weights.new_empty(len(weights), self.count)
        start = 0
        for block in self.blocks():
            margins[:, start : start + len(block)] = (block @ weights[:, :-1].T).T
            start += len(block)
        return margins.add_(weights[:, -1:])

    def pull_back(self, residuals: Tensor) -> Tensor:
        """Return the sums over rows of residual times (row, 1), shape (K, D + 1), for residuals (K, N)."""
        total = residuals.new_zeros(len(residuals), self.columns + 1)
        start = 0
        for block in self.blocks():
            total[:, :-1] += residuals[:, start : start + len(block)] @ block
            start += len(block)
        total[:, -1] = residuals.sum(dim=1)
        return total

    def second_moment(self, right: Tensor) -> Tensor:
        """Return `X'X right / N`, shape (D, R), estimated on evenly spaced rows where there are very many."""
        stride = max(1, self.count // SKETCH_ROWS)
        total = torch.zeros_like(right)
        used = 0
        for block in self.blocks():
            sample = block[::stride]
            total += sample.T @ (sample @ right)
            used += len(sample)
        return total / used


@dataclass(frozen=True)
class Problems:
    """K problems over the same N rows."""

    sign: Tensor  # (N,) of -1 and 1
    share: Tensor  # (K, N) each row adds up to 1
    ridge: Tensor  # (K, 1)

    def __getitem__(self, chosen: Tensor) -> Problems:
        """Return some of the problems."""
        return Problems(self.sign, self.share[chosen], self.ridge[chosen])

    def gradient(self, rows: RowBlocks, weights: Tensor, margins: Tensor) -> Tensor:
        """Return the gradient at weights (K, D + 1) with signed margins (K, N)."""
        gradient = rows.pull_back(torch.sigmoid(-margins).mul_(self.share).mul_(-self.sign))
        gradient[:, :-1].addcmul_(self.ridge, weights[:, :-1])
        return gradient


@dataclass(frozen=True)
class Spectrum:
    """Leading eigenvectors of X'X / N, and one eigenvalue for all other directions."""

    vectors: Tensor  # (D, R)
    values: Tensor  # (R,)
    rest: Tensor  # ()

    def precondition(self, gradient: Tensor, ridge: Tensor) -> Tensor:
        """Return the Newton step for the bound on the Hessian, shape (K, D + 1)."""
        leading = CURVATURE_BOUND * self.values + ridge
        other = CURVATURE_BOUND * self.rest + ridge
        along = gradient[:, :-1] @ self.vectors
        step = gradient / other
        step[:, :-1] += (along * (1 / leading - 1 / other)) @ self.vectors.T
        step[:, -1] = gradient[:, -1] / CURVATURE_BOUND
        return step


def sketch_spectrum(rows: RowBlocks) -> Spectrum:
    """Find the leading eigenvectors of X'X / N in one pass (Nyström, Tropp et al. 2017, algorithm 3)."""
    generator = torch.Generator().manual_seed(0)
    size = min(SKETCH_COLUMNS, rows.columns)
    test = torch.linalg.qr(torch.randn(rows.columns, size, generator=generator, dtype=rows.dtype))[0]
    image = rows.second_moment(test)
    shift = torch.finfo(rows.dtype).eps * image.norm()
    image = (image + shift * test).double()
    core = test.double().T @ image
    factor = torch.linalg.solve_triangular(torch.linalg.cholesky((core + core.T) / 2), image.T, upper=False)  # (R, D)
    squares, mixed = torch.linalg.eigh(factor @ factor.T)
    squares = squares.clamp_min(float(shift))
    vectors = factor.T @ (mixed / squares.sqrt())
    values = (squares - shift).clamp_min(0)
    return Spectrum(vectors.to(rows.dtype), values.to(rows.dtype), values.min().to(rows.dtype))


@dataclass(frozen=True)
class Effort:
    """When to stop: a problem is solved if no gradient entry is larger than `tolerance`; an iteration reads the rows twice."""

    tolerance: float
    max_iterations: int


def solve(
    rows: RowBlocks, problems: Problems, spectrum: Spectrum, start: Tensor, effort: Effort
) -> tuple[Tensor, Tensor]:
    """Solve all problems from `start`; those not solved after the last iteration stay as they are.

    Args:
        rows: The rows, shape (N, D).
        problems: The K problems.
        spectrum: Of these rows, for the first guess of every Hessian.
        start: Weights to start from, shape (K, D + 1), the intercept last.
        effort: When to stop.

    Returns:
        Weights, shape (K, D + 1), and the margins `x_i · w_k + b_k` of all rows, shape (K, N).
    """
    solution = start.clone()
    solved_margins = rows.margins(start).mul_(problems.sign)
    live = torch.arange(len(start))
    weights, margins = solution.clone(), solved_margins.clone()
    gradient = problems.gradient(rows, weights, margins)
    history = _History([], [])
    for _ in range(effort.max_iterations):
        unsolved = gradient.abs().amax(dim=1) > effort.tolerance
        if not unsolved.all():
            solution[live], solved_margins[live] = weights, margins
            live, weights, margins, gradient = (part[unsolved] for part in (live, weights, margins, gradient))
            problems, history = problems[unsolved], history[unsolved]
        if not len(live):
            break
        direction = history.direction(gradient, problems.ridge, spectrum)
        along = rows.margins(direction).mul_(problems.sign)
        step = _search(problems, weights, margins, direction, along, (gradient * direction).sum(dim=1, keepdim=True))
        move = step * direction
        weights, margins = weights + move, margins.addcmul_(step, along)
        before, gradient = gradient, problems.gradient(rows, weights, margins)
        history.add(move, gradient - before)
    solution[live], solved_margins[live] = weights, margins
    return solution, solved_margins.mul_(problems.sign)


@dataclass(frozen=True)
class _History:
    """The last steps of L-BFGS and how the gradient changed over them, each (K, D + 1)."""

    moves: list[Tensor]
    changes: list[Tensor]

    def __getitem__(self, chosen: Tensor) -> _History:
        return _History([part[chosen] for part in self.moves], [part[chosen] for part in self.changes])

    def add(self, move: Tensor, change: Tensor) -> None:
        """Remember a step; forget the oldest one when there are too many."""
        self.moves.append(move)
        self.changes.append(change)
        if len(self.moves) > MEMORY:
            del self.moves[0], self.changes[0]

    def direction(self, gradient: Tensor, ridge: Tensor, spectrum: Spectrum) -> Tensor:
        """Return the descent direction (two-loop recursion, Nocedal and Wright 2006, algorithm 7.4)."""
        inverse_curvatures = [_safe_divide(torch.ones_like(ridge), _dot(*pair)) for pair in self._pairs()]
        rest = -gradient
        parts = []
        for (move, change), inverse in zip(reversed(self._pairs()), reversed(inverse_curvatures), strict=True):
            parts.append(inverse * _dot(move, rest))
            rest = rest - parts[-1] * change
        result = spectrum.precondition(rest, ridge)
        if self.moves:
            move, change = self._pairs()[-1]
            scale = _safe_divide(_dot(move, change), _dot(change, spectrum.precondition(change, ridge)))
            result *= torch.where(scale > 0, scale, torch.ones_like(scale))
        for (move, change), inverse, part in zip(self._pairs(), inverse_curvatures, reversed(parts), strict=True):
            result = result + (part - inverse * _dot(change, result)) * move
        return result

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.moves, self.changes, strict=True))


def _dot(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum(dim=1, keepdim=True)


def _safe_divide(above: Tensor, below: Tensor) -> Tensor:
    """Divide where the divisor is positive; 0 elsewhere."""
    return torch.where(below > 0, above / below, torch.zeros_like(above))


def _search(
    problems: Problems, weights: Tensor, margins: Tensor, direction: Tensor, along: Tensor, first_slope: Tensor
) -> Tensor:
    """Return step lengths (K, 1) that leave at most half of the slope: safeguarded Newton on a convex function of one number."""
    inner = problems.ridge * _dot(weights[:, :-1], direction[:, :-1])
    square = problems.ridge * _dot(direction[:, :-1], direction[:, :-1])
    pulled = problems.share * along
    low, high = torch.zeros_like(first_slope), torch.full_like(first_slope, torch.inf)
    step = torch.ones_like(first_slope)
    for _ in range(12):
        wrong = torch.sigmoid(-(margins + step * along))
        slope = inner + step * square - _dot(pulled, wrong)
        off = slope.abs() > 0.5 * first_slope.abs()
        if not off.any():
            break
        curvature = square + _dot(pulled * along, wrong * (1 - wrong))
        low, high = torch.where(slope < 0, step, low), torch.where(slope < 0, high, step)
        newton = (step - _safe_divide(slope, curvature)).minimum(4 * step)
        fallback = torch.where(high.isinf(), 2 * step, (low + high) / 2)
        step = torch.where(off, torch.where((newton > low) & (newton < high), newton, fallback), step)
    return step
