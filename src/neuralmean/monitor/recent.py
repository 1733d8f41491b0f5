"""The latest items of a stream: enough to date a change and to show examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.detector.decision import Decision
from neuralmean.detector.kinds import KINDS

Floats = NDArray[np.float64]


class RecentItem(NamedTuple):
    """The stored values of an item."""

    score: float
    online_p_value: float  # among all earlier items
    bin: float
    log_null: float  # logarithm of the bin's probability
    p_value: float  # among the held-out scores
    flagged: bool
    kind: int  # index in `KINDS`


class RecentItems:
    """The latest items, oldest first.

    Args:
        most: Number of items that are kept.
    """

    def __init__(self, most: int) -> None:
        self._items: deque[RecentItem] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._items)

    def add(self, decision: Decision, scores: Floats, notes: Floats) -> None:
        """Add the next items, given the values of `ItemTests.update`, (N, 3)."""
        columns = scores.tolist(), *notes.T.tolist(), decision.p_value.tolist(), decision.is_ood.tolist()
        self._items.extend(map(RecentItem, *columns, map(KINDS.index, decision.kind)))

    def last(self, count: int, *, without: int = 0) -> list[RecentItem]:
        """Return the latest `count` items, except the last `without` of them."""
        end = len(self._items) - without
        return list(islice(self._items, max(0, len(self._items) - count), max(0, end)))

    def scores(self, count: int) -> Floats:
        """Return the scores of the latest `count` items, (n,)."""
        return np.array([item.score for item in self.last(count)], np.float64)

    def state(self) -> Tensor:
        """Return the state for `restore`, (n, 7)."""
        return torch.tensor(list(self._items), dtype=torch.float64).reshape(-1, len(RecentItem._fields))

    def restore(self, rows: Tensor, n_seen: int, n_bins: int) -> None:
        """Continue from a `state`, given the numbers of items and bins.

        Raises:
            ValueError: Rows that no `state` could have returned.
        """
        rows = rows.reshape(-1, len(RecentItem._fields))
        if len(rows) != min(n_seen, self._items.maxlen or 0) or not bool(torch.isfinite(rows).all()):
            raise ValueError("the items are not the latest ones")
        _, online, place, _, p_value, flagged, kind = rows.unbind(dim=1)
        if not bool(((place >= 0) & (place < n_bins)).all()):
            raise ValueError("an item is in no bin")
        is_share = ((online >= 0) & (online <= 1) & (p_value >= 0) & (p_value <= 1)).all()
        if not bool(is_share and ((flagged == 0) | (flagged == 1)).all() and torch.isin(kind, _NUMBERS).all()):
            raise ValueError("the items do not hold p-values, flags and kinds")
        *numbers, flags, kinds = rows.T.tolist()
        self._items.extend(map(RecentItem, *numbers, map(bool, flags), map(int, kinds)))


_NUMBERS = torch.arange(len(KINDS), dtype=torch.float64)


def count_kinds(items: Sequence[RecentItem]) -> dict[str, int]:
    """Return the number of flagged items of each kind."""
    found = [KINDS[item.kind] for item in items if item.flagged]
    return {name: found.count(name) for name in KINDS if name in found}
