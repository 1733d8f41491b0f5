"""Failures at every call of a module in turn: of memory, or of input and output."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any

# Names of what asks the system for something, in the modules under test.
SYSTEM = {
    "open", "fdopen", "fstat", "stat", "read", "readline", "readinto", "write", "flush", "fsync", "truncate", "seek",
    "replace", "rename", "unlink", "close", "flock", "chmod", "access", "is_dir", "realpath",
}  # fmt: skip


class Failing:
    """Makes the n-th call that a module makes fail, in this block.

    Args:
        modules: Whose calls count; also those of Python's own functions.
        n: Which call, from 0.
        make: The error to raise.
        only: Names of functions that count; None counts all.
    """

    def __init__(
        self, modules: list[ModuleType], n: int, make: Callable[[], BaseException], only: set[str] | None = None
    ) -> None:
        self._files = {str(module.__file__) for module in modules}
        self._left, self._make, self._only = n, make, only
        self.reached: str | None = None

    def __enter__(self) -> Failing:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            caller, name = frame, argument.__name__
        elif event == "call" and frame.f_back is not None:
            caller, name = frame.f_back, frame.f_code.co_name
        else:
            return
        if caller.f_code.co_filename not in self._files or (self._only is not None and name not in self._only):
            return
        if self._left == 0:
            sys.setprofile(None)
            self.reached = f"{name} in line {caller.f_lineno}"
            raise self._make()
        self._left -= 1


def no_memory() -> MemoryError:
    return MemoryError("injected")


def no_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def broken_disk() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def each_call(
    modules: list[ModuleType], make: Callable[[], BaseException], only: set[str] | None = None
) -> Iterator[Failing]:
    """Yield a block for each call in turn; the user runs the same work in each of them, until none is reached."""
    for n in range(100_000):
        failing = Failing(modules, n, make, only)
        yield failing
        if failing.reached is None:
            assert n > 0, "the work calls nothing"
            return
