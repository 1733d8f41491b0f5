"""Estimates how far apart the items of a stream must be to be nearly independent, from their ranks."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEVELS = (1, 4, 16, 64, 256, 1024)  # every n-th item is used
_REST = 0.1  # largest remaining correlation of neighbours at the chosen level


def spacing(values: Floats, changed_at: int | None = None) -> int:
    """Return the smallest of `LEVELS` at which items are nearly independent, if correlations fall geometrically.

    Correlations are those of ranks, at lags of 1, 4, 16 and so on, and count only if they are larger than chance explains.

    Args:
        values: The scores of the latest items, oldest first.
        changed_at: Position of a possible change. Ranks are computed separately before and after it, as a change would
            look like correlation.

    Example:
        >>> walk = np.cumsum(np.random.default_rng(0).normal(size=500))
        >>> spacing(walk) > 16, spacing(np.random.default_rng(0).normal(size=500))
        (True, 1)
    """
    cut = 0 if changed_at is None else min(max(changed_at, 0), len(values))
    parts = [_centred_ranks(part) for part in (values[:cut], values[cut:]) if len(part) > 2]
    total = sum(float((part**2).sum()) for part in parts)
    needed = 1.0
    for lag in LEVELS:
        pairs = sum(max(0, len(part) - lag) for part in parts)
        if pairs < 8 * lag or not total:
            break
        variance = total / sum(len(part) for part in parts)
        found = sum(float((part[lag:] * part[:-lag]).sum()) for part in parts if len(part) > lag) / (pairs * variance)
        if found > 0.05 + 1.5 / math.sqrt(pairs / lag):
            needed = max(needed, lag * math.log(_REST) / math.log(min(found, 0.9999)))
    return next((level for level in LEVELS if level >= needed), LEVELS[-1])


def _centred_ranks(values: Floats) -> Floats:
    """Return ranks minus their mean; equal values share a rank."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    ranks: Floats = (ends - (counts - 1) / 2)[places]
    centred: Floats = ranks - ranks.mean()
    return centred
