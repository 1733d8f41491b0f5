"""What a fit or a scoring costs: time, forward passes, memory.

A forward pass whose result comes from the cache counts too, with the time that it took when it ran. So costs do not depend
on what happens to be cached, but the clock may be that of another day, with other threads and neighbours. Where times are
compared (the experiment `latency`), every fit and every single image runs now.
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
    """Wall seconds, images sent through the model, and the peak of the process's memory above where it began."""

    seconds: float
    passes: int
    peak_mb: float | None  # None where the system does not tell


class Meter:
    """Adds up what happens inside `metered`."""

    def __init__(self) -> None:
        self._passes = 0
        self._seconds_cached = 0.0
        self._seconds_reading = 0.0
        self._paused = False

    @contextmanager
    def reading(self) -> Generator[None]:
        """Leave out what happens inside the block: features being read, or computed for the first time."""
        begun, self._paused = time.perf_counter(), True
        try:
            yield
        finally:
            self._paused = False
            self._seconds_reading += time.perf_counter() - begun

    def count_cached(self, passes: int, seconds: float) -> None:
        """Count forward passes that ran at some other time."""
        self._passes += passes
        self._seconds_cached += seconds

    def count(self, images: int) -> None:
        """Count images that go through the model now."""
        if not self._paused:
            self._passes += images

    def cost(self, wall: float, peak_mb: float | None) -> Cost:
        """Return the sum, given the wall time of the whole block."""
        return Cost(max(0.0, wall - self._seconds_reading) + self._seconds_cached, self._passes, peak_mb)


class Stopwatch:
    """Holds the cost of a `metered` block once it has ended."""

    def __init__(self) -> None:
        self.meter = Meter()
        self.cost = Cost(0.0, 0, None)


@contextmanager
def metered(model: nn.Module) -> Generator[Stopwatch]:
    """Measure what happens inside the block; copies of `model` made inside count too. The model leaves it as it came."""
    watch = Stopwatch()

    def count(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            watch.meter.count(len(args[0]))

    memory.release_freed()  # blocks that an earlier method freed would hide what this one takes
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
