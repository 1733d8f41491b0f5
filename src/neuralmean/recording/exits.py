"""Early exits of a recorded forward pass: when each is evaluated, and how the pass ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from neuralmean.recording.result import Exits


class Stop(BaseException):  # not an Exception: a model's `except Exception` must not catch it
    """Ends the innermost recorded forward pass from inside a hook."""


class ExitTracker:
    """Evaluates the exits of one pass, each as soon as all of its layers have run.

    Args:
        exits: The exits.
    """

    def __init__(self, exits: Exits | None) -> None:
        self._exits = exits
        self.depths = () if exits is None else tuple(exits.depths)
        self.end = self.depths[-1] if self.depths else 0  # no exit reads later layers
        self.stopped_at: int | None = None
        self._next, self._waiting = 0, [end - start for start, end in pairwise((0, *self.depths))]

    @property
    def looked_at(self) -> int:
        """Number of first layers that an exit has read so far."""
        return self.depths[self._next - 1] if self._next else 0

    def look(self, index: int, means: Callable[[int], Tensor]) -> None:
        """Record that layer `index` has run; `means` returns the means of a number of first layers.

        Raises:
            Stop: An exit ends the pass.
        """
        depths, exits = self.depths, self._exits
        self._waiting[bisect_right(depths, index)] -= 1
        while exits is not None and self._next < len(depths) and self._waiting[self._next] == 0:
            if exits.should_stop(self._next, means(depths[self._next])):
                self.stopped_at = self._next
                raise Stop
            self._next += 1
