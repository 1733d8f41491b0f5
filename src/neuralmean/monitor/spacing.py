"""The spacing of the items of a stream: given by the user, or estimated from the latest scores."""

from __future__ import annotations

from typing import Any

from neuralmean.monitor.checked import whole
from neuralmean.monitor.recent import RecentItems
from neuralmean.stats.correlation import LEVELS, spacing

WARM_UP = 64  # items needed to estimate the correlation
_EVERY = 32  # items between two estimates of a correlated stream


class Spacing:
    """The spacing of a stream, one of `LEVELS`.

    Args:
        every: The user's choice; None estimates it.
    """

    def __init__(self, every: int | None) -> None:
        self.every = every
        self.begin(0)

    def begin(self, n_seen: int) -> None:
        """Restart after this many items: earlier ones may have been different."""
        self.level = next(level for level in LEVELS if level >= (self.every or 1))
        self._begun_at = n_seen
        self._estimated_at = 0

    def go_back(self, count: int) -> None:
        """Move the start of the estimate this many items back."""
        self._begun_at -= count

    def is_known(self, recent: RecentItems, n_seen: int) -> bool:
        """Return whether there are enough items for an estimate."""
        return self.every is not None or self._n_usable(recent, n_seen) >= WARM_UP

    def estimate(self, recent: RecentItems, n_seen: int, changed_at: int) -> None:
        """Estimate the spacing, unless it is given or was estimated just now; `changed_at` is the item of a suspected change."""
        if self.every is not None or (self.level > 1 and n_seen < self._estimated_at + _EVERY):
            return
        scores = recent.scores(self._n_usable(recent, n_seen))
        self.level = spacing(scores, len(scores) - (n_seen - changed_at) - 1)
        self._estimated_at = n_seen

    def _n_usable(self, recent: RecentItems, n_seen: int) -> int:
        return min(len(recent), n_seen - self._begun_at)

    def state(self) -> list[int]:
        """Return the state for `restore`."""
        return [self.level, self._estimated_at, self._begun_at]

    def restore(self, values: list[Any], n_seen: int) -> None:
        """Continue from a `state`.

        Raises:
            ValueError: Values that no `state` could have returned.
        """
        level, *items = values
        self.level = whole(level, "spacing", LEVELS[-1], 1)
        self._estimated_at, self._begun_at = (whole(item, "item", n_seen) for item in items)
