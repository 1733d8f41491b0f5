"""Bounds on false flags: selecting inputs to review, and bounding how many flags are false.

The p-values of a batch share one held-out set, so they are not independent. If held-out and in-distribution scores are
exchangeable, the joint distribution of their ranks is known nevertheless, and is the same for every score without ties. Ties
only make p-values larger.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_RUNS = 4000  # simulations for the shape of the bound, and as many again for its height
_ROUNDS = 8


def benjamini_hochberg(p_values: Floats, fdr: float) -> NDArray[np.bool_]:
    """Return which inputs to select so that on average at most a share `fdr` of them is false, shape (N,).

    Conformal p-values of in-distribution inputs are positively dependent, for which the procedure holds (Bates, Candès, Lei,
    Romano and Sesia, "Testing for outliers with conformal p-values", Ann. Statist. 51, 2023).

    Example:
        >>> benjamini_hochberg(np.array([0.01, 0.9, 0.04, 0.5]), 0.1).tolist()
        [True, False, True, False]
    """
    n = len(p_values)
    ordered = np.sort(p_values)
    below = np.flatnonzero(ordered * n <= fdr * np.arange(1, n + 1))
    return p_values <= ordered[below[-1]] if len(below) else np.zeros(n, bool)


def most_false_flags(p_values: Floats, n_held_out: int, level: float, confidence: float) -> int:
    """Return an upper bound on the number of false flags among inputs with a p-value of at most `level`; see `most_false`."""
    ranks = np.rint(p_values * (n_held_out + 1)).astype(np.int64)
    flagged = ranks[p_values <= level]
    return most_false(ranks, n_held_out, int(flagged.max()), confidence) if len(flagged) else 0


def most_false(ranks: Ints, n_held_out: int, rank: int, confidence: float) -> int:
    r"""Return an upper bound on the number of false flags among inputs with a rank of at most `rank`, with a confidence.

    The bound holds for all ranks at once, so `rank` may be chosen after looking at the data. For m in-distribution
    inputs among the N, the numbers :math:`V_j` with a rank of at most j are simulated, and :math:`B_j` is a bound on
    all of them together. As :math:`R_j - B_j` of the :math:`R_j` flags are then true, at most :math:`N - \max_j (R_j -
    B_j)` inputs are in-distribution, which begins the next round with a smaller m.

    Args:
        ranks: :math:`p (n + 1)` of each input: 1 for a score above all held-out ones, shape (N,).
        n_held_out: Number of held-out scores.
        rank: Inputs with this rank or a smaller one are flagged.
        confidence: Confidence of the bound.
    """
    grid = _grid(n_held_out)
    flags = np.searchsorted(np.sort(ranks), grid, "right")
    n_flags = int(np.count_nonzero(ranks <= rank))
    n_inliers = len(ranks)
    bounds = np.zeros(len(grid), np.int64)
    for _ in range(_ROUNDS):
        bounds = _bounds(n_held_out, n_inliers, confidence)
        fewer = min(n_inliers, len(ranks) - max(0, int((flags - bounds).max())))
        if fewer == n_inliers or not fewer:
            break
        n_inliers = fewer
    # Between two grid points: everything beyond the previous one may be false, but no more than at the next one.
    at_most = np.where(grid <= rank, bounds + n_flags - flags, bounds)
    return int(min(n_flags, n_inliers, at_most.min(initial=n_flags, where=(grid <= rank) | _next(grid, rank))))


def _next(grid: Ints, rank: int) -> NDArray[np.bool_]:
    """Mark the first grid point at or after a rank."""
    marks: NDArray[np.bool_] = np.arange(len(grid)) == np.searchsorted(grid, rank)
    return marks


@lru_cache(maxsize=16)
def _grid(n_held_out: int) -> Ints:
    """Return ranks from 1 to n, each about a quarter larger than the one before."""
    places: Ints = np.unique(np.rint(np.geomspace(1, n_held_out, 4 * n_held_out.bit_length())).astype(np.int64))
    return places


@lru_cache(maxsize=256)
def _bounds(n_held_out: int, n_inliers: int, confidence: float) -> Ints:
    """Return a bound for each rank of the grid that all counts satisfy at once, with the confidence."""
    grid = _grid(n_held_out)
    shape = np.sort(_counts(n_held_out, n_inliers, grid, 0), axis=0)
    height = _counts(n_held_out, n_inliers, grid, 1)
    # The most extreme quantile of each run among the simulated counts; the real run is exchangeable with them.
    beyond = [_RUNS - np.searchsorted(column, new, "left") for column, new in zip(shape.T, height.T, strict=True)]
    farthest = np.sort(np.stack(beyond).min(axis=0))
    allowed = int((1 - confidence) * (_RUNS + 1))
    limit = int(farthest[allowed - 1]) if allowed else 0
    # At least `limit` simulated counts are as large as the real one, at every place.
    return shape[_RUNS - limit] if limit else np.full(len(grid), n_inliers)


def _counts(n_held_out: int, n_inliers: int, grid: Ints, seed: int) -> Ints:
    """Simulate how many in-distribution inputs have a rank of at most j, for each j of the grid, (runs, grid)."""
    random = np.random.default_rng(seed)
    gaps = random.gamma(np.diff(grid, prepend=0), size=(_RUNS, len(grid)))
    rest = random.gamma(n_held_out + 1 - grid[-1], size=(_RUNS, 1))
    mass = gaps / (gaps.sum(axis=1, keepdims=True) + rest)
    left, room = np.full(_RUNS, n_inliers), np.ones(_RUNS)
    counts = np.empty((_RUNS, len(grid)), np.int64)
    for place in range(len(grid)):
        new = random.binomial(left, np.clip(mass[:, place] / room, 0, 1))
        left, room = left - new, np.maximum(room - mass[:, place], 1e-300)
        counts[:, place] = n_inliers - left
    return counts
