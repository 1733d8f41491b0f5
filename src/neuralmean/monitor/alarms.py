"""Builds the details of an alarm: since when, which kind, and which items to review."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from neuralmean.monitor.recent import RecentItem, RecentItems, count_kinds
from neuralmean.monitor.status import Alarm, Kind, Test
from neuralmean.monitor.stream_tests import BOTH_WEIGHTS, N_REPEATS, ItemTests
from neuralmean.stats.betting import BETS
from neuralmean.stats.change_point import change_interval

N_EXAMPLES = 12
_PROBABILITY = 0.9  # probability that the change is inside the interval


def change_before(item: int, n_seen: int, recent: RecentItems, tests: ItemTests) -> tuple[int, int]:
    """Return the first and the last item, before `item`, at which the change may have happened."""
    gains = _gains(item, n_seen, recent, tests)
    first, last = change_interval(gains, BOTH_WEIGHTS, probability=_PROBABILITY)
    return item - len(gains) + 1 + first, item - len(gains) + 1 + last


def describe(test: Test, item: int, n_seen: int, recent: RecentItems, tests: ItemTests, n_repeats: int) -> Alarm:
    """Return the alarm that a test raised at an item.

    Args:
        test: The test.
        item: The item.
        n_seen: Items so far.
        recent: The latest items.
        tests: The tests of single items, in their current state.
        n_repeats: Number of consecutive repeats of the input at that item.
    """
    since = (
        (item - n_repeats, item - N_REPEATS + 1) if test == "repeats" else change_before(item, n_seen, recent, tests)
    )
    since = (max(1, since[0]), max(1, since[1]))
    rows = recent.last(n_seen - since[1] + 1, without=n_seen - item)
    order = sorted(range(len(rows)), key=lambda row: (rows[row].p_value, -rows[row].score))
    first = item - len(rows) + 1
    return Alarm(
        item=item,
        test=test,
        since=since,
        kind=_kind(test, _gains(item, n_seen, recent, tests)),
        n_since=len(rows),
        n_flagged=sum(row.flagged for row in rows),
        strangeness=count_kinds(rows),
        examples=tuple(first + row for row in order[:N_EXAMPLES]),
    )


def _gains(item: int, n_seen: int, recent: RecentItems, tests: ItemTests) -> NDArray[np.float64]:
    """Return the gain of each bet on the remembered and tested items, up to `item`."""
    rows: list[RecentItem] = recent.last(min(len(recent), tests.n), without=n_seen - item)
    return tests.gains(np.array([row[1:4] for row in rows], np.float64).reshape(-1, 3))


def _kind(test: Test, gains: NDArray[np.float64]) -> Kind:
    if test != "items":
        return "means" if test == "blocks" else "repeats"
    best = np.cumsum(gains[::-1], axis=0).max(axis=0) + np.log(BOTH_WEIGHTS)
    bet = BETS[int(best.argmax()) % len(BETS)]
    return "too typical" if bet.mirrored else "some inputs" if bet.share < 1 else "most inputs"
