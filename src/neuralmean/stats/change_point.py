"""Since when a stream has been different: an interval, from the gains of the bets on its items."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def change_interval(log_gains: Floats, weights: Floats, *, probability: float = 0.9) -> tuple[int, int]:
    """Return the first and the last row at which the change may have come, by Bayes' rule with all rows equally likely.

    Args:
        log_gains: What each bet gains on each item, if the change has come by then, (N, K).
        weights: How likely each bet is the right one, (K,).
        probability: Of the change to have come within the interval, if one of the bets is right.

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
