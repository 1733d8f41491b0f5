"""Memory that one forward pass frees is kept for the next one.

glibc gives large blocks back to the system as soon as they are freed, and the system clears every page when it hands them
out again. A network frees and takes such blocks in every layer: on two cores a pass of DenseNet-100 on 64 images spends
about half of its time on that, one of ResNet-56 on 128 images a seventh. This asks glibc to keep them.

It is a setting of the whole process, so only commands make it; a library has no business with it.
"""

from __future__ import annotations

import ctypes
import os
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's mallopt
_MOST_KEPT = 2**31 - 1  # bytes at the end of the heap; the largest that mallopt takes
_LARGE = 2**30  # bytes of a block that still goes back
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed() -> bool:
    """Keep freed memory for later use, in this process, from now on; return whether that was possible.

    Who has set up an allocator of their own, by `MALLOC_TRIM_THRESHOLD_`, `LD_PRELOAD` and the like, keeps it.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in os.environ for name in _OWN_SETTINGS):
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_TRIM_THRESHOLD, _MOST_KEPT))
