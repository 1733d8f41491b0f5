"""Early exits of a forward pass that is recorded: when each is asked, and how the pass ends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise

from torch import Tensor

from neuralmean.recording.result import Exits


class Stop(BaseException):  # no `except Exception` of a model may swallow it
    """Ends a forward pass from inside a hook: the innermost one that is recorded, as no other listens."""


class ExitTracker:
    """Asks the exits of one pass, each as soon as all of its layers have been seen.

    Args:
        exits: Whom to ask; None never.
    """

    def __init__(self, exits: Exits | None) -> None:
        self._exits = exits
        self.depths = () if exits is None else tuple(exits.depths)
        self.end = self.depths[-1] if self.depths else 0  # no exit looks at later layers
        self.stopped_at: int | None = None
        self._next, self._waiting = 0, [end - start for start, end in pairwise((0, *self.depths))]

    @property
    def looked_at(self) -> int:
        """How many of the first layers an exit was shown by now."""
        return self.depths[self._next - 1] if self._next else 0

    def look(self, index: int, means: Callable[[int], Tensor]) -> None:
        """Take notice that layer `index` was seen; `means` gives those of so many of the first layers.

        Raises:
            Stop: An exit wants the pass to end.
        """
        depths, exits = self.depths, self._exits
        self._waiting[bisect_right(depths, index)] -= 1
        while exits is not None and self._next < len(depths) and self._waiting[self._next] == 0:
            if exits.should_stop(self._next, means(depths[self._next])):
                self.stopped_at = self._next
                raise Stop
            self._next += 1
