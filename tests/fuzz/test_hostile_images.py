"""Damaged images and arrays: refused in our own words, or read; never another error, a long wait or a lot of memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import neuralmean

COUNTS = [pytest.param(400, id="400"), pytest.param(10_000, id="10000", marks=pytest.mark.slow)]
HERE = Path(__file__).parent


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_images_and_arrays_do_no_harm(tmp_path, count, record_testsuite_property):
    command = [sys.executable, str(HERE / "images_child.py"), str(count), str(Path(neuralmean.__file__).parent)]
    environment = {**os.environ, "FUZZ_FOLDER": str(tmp_path), "PYTHONPATH": str(HERE)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    record_testsuite_property("images: slowest seconds", round(report["slowest"], 4))
    record_testsuite_property(
        "images: peak memory over that of a good file", round(report["largest"] / max(1, report["good"]), 4)
    )
    record_testsuite_property("images: refused", report["refused"])
    assert report["unexpected"] == []
    assert report["slowest"] < 5.0
    assert report["refused"] > 0.3 * count
