"""Cost of fitting and scoring: time, forward passes, memory.

A cached forward pass is counted with the time it took when it ran, so costs do not depend on the state of the cache,
but times may come from another day and another load. The experiment `latency`, which compares times, runs everything
anew.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from neuralmean.models import allocator as memory


@dataclass(frozen=True)
class Cost:
    """Wall seconds, images passed through the model, and the peak increase of the process's memory."""

    seconds: float
    passes: int
    peak_mb: float | None  # None if the system does not report it


class Meter:
    """Accumulates costs inside `metered`."""

    def __init__(self) -> None:
        self._passes = 0
        self._seconds_cached = 0.0
        self._seconds_reading = 0.0
        self._paused = False

    @contextmanager
    def reading(self) -> Generator[None]:
        """Exclude the time of the block, in which features are read or computed for the first time."""
        begun, self._paused = time.perf_counter(), True
        try:
            yield
        finally:
            self._paused = False
            self._seconds_reading += time.perf_counter() - begun

    def count_cached(self, passes: int, seconds: float) -> None:
        """Count forward passes that ran earlier."""
        self._passes += passes
        self._seconds_cached += seconds

    def count(self, images: int) -> None:
        """Count images that pass through the model now."""
        if not self._paused:
            self._passes += images

    def cost(self, wall: float, peak_mb: float | None) -> Cost:
        """Return the total, given the wall time of the whole block."""
        return Cost(max(0.0, wall - self._seconds_reading) + self._seconds_cached, self._passes, peak_mb)


class Stopwatch:
    """The cost of a `metered` block, once it has ended."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.cost = Cost(0.0, 0, None)


@contextmanager
def metered(model: nn.Module) -> Generator[Stopwatch]:
    """Measure the block; copies of `model` made inside count too. The model's hooks are restored."""
    watch = Stopwatch()

    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            watch.meter.count(len(args[0]))

    memory.release_freed()  # memory freed by an earlier method would hide what this one allocates
    base = memory.resident() if memory.reset_peak() else None
    handle = model.register_forward_pre_hook(count)
    begun = time.perf_counter()
    try:
        yield watch
    finally:
        handle.remove()
        wall, peak = time.perf_counter() - begun, memory.peak()
        above = None if base is None or peak is None else max(0.0, (peak - base) / 2**20)
        watch.cost = watch.meter.cost(wall, above)
