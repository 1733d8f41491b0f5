"""Estimates when a stream changed, from the gains of the bets on its items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def change_interval(log_gains: Floats, weights: Floats, *, probability: float = 0.9) -> tuple[int, int]:
    """Return the first and the last row at which the change may have happened, by Bayes' rule with a uniform prior.

    Args:
        log_gains: Log gain of each bet on each item after the change, (N, K).
        weights: Prior probability of each bet, (K,).
        probability: Probability that the change is inside the interval, if one of the bets is right.

    Example:
        >>> change_interval(np.array([[-4.0], [-4.0], [4.0], [4.0], [4.0]]), np.ones(1))
        (2, 2)
    """
    since = np.cumsum(log_gains[::-1], axis=0)[::-1]
    log_odds = np.logaddexp.reduce(since + np.log(weights), axis=1)
    chances = np.exp(log_odds - log_odds.max())
    total = np.cumsum(chances / chances.sum())
    low, high = np.searchsorted(total, [(1 - probability) / 2, (1 + probability) / 2])
    return int(min(low, len(total) - 1)), int(min(high, len(total) - 1))
