"""Early exits of a graph.

A TorchScript graph has no door in its middle. But it may hold an operation that is Python, which looks at the means so far, and
what that raises ends the graph. The operation does nothing unless `run_with_exits` runs the graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from neuralmean.recording import Exits

T = TypeVar("T")

_asking = threading.local()


def run_with_exits(exits: Exits, run: Callable[[], T], ended: Callable[[Tensor], T]) -> T:
    """Run a graph, and return what it returns; where exits ended it, what `ended` makes of the first layers' means, (N, D')."""
    asked, outer = _Asked(exits), getattr(_asking, "now", None)
    _asking.now = asked
    try:
        return run()
    except RuntimeError:  # what TorchScript makes of whatever an operation raises
        if asked.means is None:
            raise
        return ended(asked.means)
    finally:
        _asking.now = outer


class _Asked:
    """The exits of a graph that runs, and what ended it."""

    def __init__(self, exits: Exits) -> None:
        self._exits = exits
        self.means: Tensor | None = None

    def look(self, means: Tensor, index: int) -> None:
        """Raise if the graph is to end at exit `index`."""
        if self._exits.should_stop(index, means):
            self.means = means
            raise _StopError


class Looks:
    """The exits of a graph while it is traced: they stop nothing, and each leaves the operation behind.

    Args:
        depths: How many of the first layers each exit looks at.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        _define()
        self.depths = tuple(depths)
        self.undo: Callable[[Tensor, int], Tensor] | None = None  # makes the layers' means of what was read
        self.made: list[Tensor] = []  # results of the operations: a graph keeps only what it returns

    def should_stop(self, index: int, means: Tensor) -> bool:
        """Put the operation in the graph."""
        undone = means if self.undo is None else self.undo(means, self.depths[index])
        self.made.append(torch.ops.neuralmean.look(undone, index))
        return False


class _StopError(Exception):
    """Ends a graph from inside an operation."""


def _look(means: Tensor, index: int) -> Tensor:
    now: _Asked | None = getattr(_asking, "now", None)
    if now is not None:
        now.look(means, index)
    return means.new_zeros(0)


_library: torch.library.Library | None = None  # the operation is there as long as this is


def _define() -> None:
    """Make the operation known to torch, once."""
    global _library
    if _library is None:
        _library = torch.library.Library("neuralmean", "FRAGMENT")  # type: ignore[no-untyped-call]
        _library.define("look(Tensor means, int index) -> Tensor")  # type: ignore[no-untyped-call]
        _library.impl("look", _look, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
