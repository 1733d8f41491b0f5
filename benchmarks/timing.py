"""Honest timing on a machine that others use too: candidates take turns, and only ratios within a turn are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

clock: Callable[[], float] = time.perf_counter  # `--cpu-time` puts time.process_time here
call_by_call = False  # `--call-by-call` sets it

_PAUSE = 0.02  # seconds; threads that wait for more work have gone to sleep by then


@dataclass(frozen=True)
class Timing:
    """Median seconds of one candidate and its ratio to the baseline, with quartiles."""

    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ({self.ratio_low:.3f}-{self.ratio_high:.3f})"


def interleave(
    candidates: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    seconds: float = 8.0,
    rounds: tuple[int, int] = (7, 600),
    block: float | None = None,
    calls: int = 1,
) -> dict[str, Timing]:
    """Run the candidates in turns, each turn in another order, and compare each with the baseline of the same turn.

    Args:
        candidates: What to run, by name.
        baseline: The name that the ratios refer to.
        seconds: About how long to go on.
        rounds: The least and the most turns.
        block: Seconds that a candidate goes on in its turn, after a pause; the median of its runs, without the first two, counts.
            For candidates with threads of their own, which go on for a while after a run and take a core from the next one.
        calls: How often a candidate is called in its turn, after two calls that do not count if there are several; their median
            counts. A short candidate would else find in the caches what the one before it left there.
    """
    for run in candidates.values():  # caches, lazy initialisation, compilation
        run()
        run()
    names = list(candidates)
    taken: dict[str, list[float]] = {name: [] for name in names}
    start, turn = time.perf_counter(), 0
    while turn < rounds[0] or (turn < rounds[1] and time.perf_counter() - start < seconds):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        for name in order if turn % 2 else reversed(order):
            run = candidates[name]
            taken[name].append(_time_calls(run, calls) if block is None else _time_block(run, block))
        turn += 1
    return {name: _compare(taken[name], taken[baseline]) for name in names}


def in_a_row(size: int) -> int:
    """Return how many calls with batches of `size` a candidate makes in its turn: single inputs come one after the other in use.

    `--call-by-call` has candidates take turns at every call, so that each finds caches full of all the others.
    """
    return 5 if size == 1 and not call_by_call else 1


def _compare(mine: list[float], base: list[float]) -> Timing:
    low, middle, high = statistics.quantiles([a / b for a, b in zip(mine, base, strict=True)], n=4)
    # The ratio of the medians is steadier than the median of the ratios when turns are interrupted.
    ratio = statistics.median(mine) / statistics.median(base)
    return Timing(statistics.median(mine), ratio, min(low, ratio, middle), max(high, ratio, middle), len(mine))


def table(rows: list[dict[str, Any]], columns: list[str]) -> str:
    """Return rows as a Markdown table."""
    cells = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells)
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _time_once(run: Callable[[], object]) -> float:
    begin = clock()
    run()
    return clock() - begin


def _time_calls(run: Callable[[], object], calls: int) -> float:
    if calls > 1:
        run()
        run()
    return statistics.median(_time_once(run) for _ in range(calls))


def _time_block(run: Callable[[], object], seconds: float) -> float:
    time.sleep(_PAUSE)
    run()
    run()
    end, taken = time.perf_counter() + seconds, [_time_once(run)]
    while time.perf_counter() < end:
        taken.append(_time_once(run))
    return statistics.median(taken)
