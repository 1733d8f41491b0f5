"""Memory of the process: its size, and keeping freed memory for the next forward pass.

glibc returns large blocks to the system as soon as they are freed, and the system clears every page before it hands
them out again. A network frees and allocates such blocks in every layer: on two cores a pass of DenseNet-100 on 64
images spends about half of its time on that, one of ResNet-56 on 128 images a seventh. `keep_freed` makes glibc keep
them.

This setting affects the whole process, so only commands use it, never the library.
"""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from pathlib import Path

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_MOST_KEPT = 2**31 - 1  # bytes at the end of the heap; the largest that mallopt takes
_LARGE = 2**30  # bytes of a block that is still returned
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed() -> bool:
    """Keep freed memory for later use, in this process, from now on; return whether that was possible.

    Has no effect if the user has configured the allocator, with `MALLOC_TRIM_THRESHOLD_`, `LD_PRELOAD` and the like.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_TRIM_THRESHOLD, _MOST_KEPT))


def resident(process: int | str = "self") -> int | None:
    """Return the bytes of memory that a process holds; None if the system does not report it (Linux does)."""
    return _status("VmRSS", process)


def peak(process: int | str = "self") -> int | None:
    """Return the largest memory of a process in bytes since it began, or since `reset_peak`.

    (`getrusage` includes the peak of the parent process.)
    """
    return _status("VmHWM", process)


def release_freed() -> bool:
    """Return freed memory to the system now, including memory kept by `keep_freed`; return whether there was any."""
    if platform.libc_ver()[0] != "glibc":
        return False
    return bool(ctypes.CDLL(None).malloc_trim(0))


def reset_peak() -> bool:
    """Reset the peak of this process; return whether that was possible."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return True
    return False


def _status(field: str, process: int | str) -> int | None:
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None
