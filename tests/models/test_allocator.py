"""Freed memory stays with the process that asked for it, and with nobody else; what a process holds is its own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from neuralmean.models import allocator as memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")

FAULTS = """
import resource
from neuralmean.models import allocator as memory
if {keep}:
    assert memory.keep_freed()
import numpy as np
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    np.ones(1 << 23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(code, **environment):
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_pages_are_asked_for_once_and_not_every_time():
    # 20 times 64 MB: without the setting every round brings 64 MB of fresh pages, with it the first one only.
    given_back, kept = (int(run(FAULTS.format(keep=keep))) for keep in (False, True))
    assert kept < given_back / 4


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_who_has_set_up_the_allocator_keeps_it(name):
    code = "from neuralmean.models import allocator; print(allocator.keep_freed())"
    assert run(code, **{name: ""}) == "False"


HOLDS = """
from neuralmean.models import allocator as memory
before = memory.resident()
held = b"x" * 200_000_000
held = None
assert memory.peak() - before > 190_000_000, memory.peak()
assert memory.resident() < memory.peak()
assert memory.reset_peak()
print(memory.peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say")
def test_the_peak_is_that_of_the_process_and_begins_anew():
    own = b"x" * 600_000_000  # of which a child must know nothing
    assert memory.peak() > 600_000_000
    assert int(run(HOLDS)) < 150_000_000
    before, named, behind = memory.peak(), memory.peak(os.getpid()), memory.peak()
    assert before <= named <= behind  # asking may itself take a page
    del own


def test_nothing_is_known_of_a_process_that_is_not():
    assert memory.peak(2**31 - 1) is None
    assert memory.resident(2**31 - 1) is None
