r"""Densities of p-values after a change, used as bets.

Beta(a, b) densities are for streams that changed as a whole (b > 1 if few inputs are typical), the mirror image for streams that
look too typical, and mixtures :math:`1 - \epsilon + \epsilon\,\mathrm{Beta}(a, b)` for streams of which only some inputs
changed. The same densities serve against a growing reference (as functions of a p-value) and against a fixed one (as
probabilities of its bins).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Bet(NamedTuple):
    """One density: of a share of the inputs, Beta(a, b) in the p-value, or in 1 - p if mirrored; b is a whole number."""

    weight: float
    a: float
    b: int
    share: float = 1.0
    mirrored: bool = False


BETS = (
    Bet(0.58, 0.6, 4),
    Bet(0.08, 0.3, 6),
    Bet(0.06, 0.3, 1),
    Bet(0.04, 0.7, 2),
    Bet(0.04, 0.4, 1, mirrored=True),
    Bet(0.15, 0.25, 8, share=0.05),
    Bet(0.05, 0.25, 4, share=0.15),
)
WEIGHTS: Floats = np.array([bet.weight for bet in BETS])
_SMALLEST = 1e-12  # p-values are above 0, but a rounded one must not give an infinite bet


def log_densities(p_values: Floats) -> Floats:
    """Return the logarithm of each of K densities at p-values (N,), shape (N, K); each density integrates to 1.

    Example:
        >>> np.exp(log_densities(np.array([0.5]))).round(2)[0, :3]
        array([0.25, 0.03, 0.49])
    """
    p, q = np.maximum(p_values, _SMALLEST), np.maximum(1 - p_values, _SMALLEST)
    columns = []
    for bet in BETS:
        one, other = (q, p) if bet.mirrored else (p, q)
        density = (bet.a - 1) * np.log(one) + (bet.b - 1) * np.log(other) - _log_beta(bet.a, bet.b)
        columns.append(density if bet.share == 1 else np.log1p(bet.share * np.expm1(density)))
    return np.stack(columns, axis=1)


def log_bin_probabilities(p_edges: Floats) -> Floats:
    """Return the logarithm of the probability of each of B bins under each density, (B, K), given their falling edges (B + 1,).

    Example:
        >>> np.exp(log_bin_probabilities(np.array([1.0, 0.5, 0.0]))).round(2)[1, :3]
        array([0.97, 1.  , 0.81])
    """
    columns = []
    for bet in BETS:
        below = 1 - _cumulative(1 - p_edges, bet) if bet.mirrored else _cumulative(p_edges, bet)
        columns.append(-np.diff((1 - bet.share) * p_edges + bet.share * below))
    logs: Floats = np.log(np.maximum(np.stack(columns, axis=1), 1e-300))
    return logs


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _cumulative(values: Floats, bet: Bet) -> Floats:
    """Return the probability of at most each value under Beta(a, b), from the expansion of (1 - x)^(b - 1)."""
    terms = [(-1) ** j * math.comb(bet.b - 1, j) * values ** (bet.a + j) / (bet.a + j) for j in range(bet.b)]
    total: Floats = np.clip(sum(terms) / math.exp(_log_beta(bet.a, bet.b)), 0.0, 1.0)
    return total
