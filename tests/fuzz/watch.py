"""How long something takes and how much memory it touches at its peak. Imports nothing but the standard library."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def measure(action: Callable[[], None]) -> tuple[float, int | None]:
    """Seconds, and the process's peak of resident memory in bytes meanwhile (None where the system does not say)."""
    known = reset_peak()
    begin = time.perf_counter()
    action()
    seconds = time.perf_counter() - begin
    return seconds, peak() if known else None


def reset_peak() -> bool:
    """Let the peak begin anew (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def peak() -> int:
    """The peak since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
