"""Bad days of a Ray cluster: the driver is killed, a node is lost. Minutes long; `make slow`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from neuralmean.jobs import cluster as distributed
from tests.conftest import make_trained
from tests.faults import actors

pytest.importorskip("ray", reason="ray is not installed")
scale = pytest.importorskip("benchmarks.scale", reason="needs the benchmarks folder")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc"),
]

ROOT = Path(__file__).parent.parent.parent
DRIVER = """
import sys
from neuralmean.jobs import cluster as distributed
from tests.conftest import make_trained
from tests.faults import actors
artefact, folder, out, workers, *address = sys.argv[1:]
where = {"workers": int(workers), "address": address[0] if address else None}
distributed.score(artefact, folder, out=out, model=make_trained, preprocessing=actors.HOW, chunk_size=8, **where)
"""


@pytest.fixture
def job(tmp_path):
    """A detector, a folder of images, and the output of an undisturbed run in one process."""
    folder, artefact, whole = tmp_path / "images", tmp_path / "x.nmd", tmp_path / "whole.jsonl"
    folder.mkdir()
    for i in range(600):
        Image.effect_noise((12, 12), 20 + i / 4).convert("RGB").save(folder / f"{i:04}.png")
    actors.fit_and_save(str(artefact), 1)
    actors.score(str(artefact), str(folder), str(whole))
    return artefact, folder, whole


def _drive(*arguments):
    """A driver in a process of its own."""
    command = [sys.executable, "-c", DRIVER, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def _lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_driver_that_is_killed_leaves_no_process_and_the_next_one_goes_on(job, tmp_path):
    artefact, folder, whole = job
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    driver = _drive(artefact, folder, out, 1)
    _wait_until(lambda: _lines(partial) > 10)
    below = scale.descendants(driver.pid)
    driver.kill()
    driver.wait()
    assert not out.exists()
    _wait_until(lambda: not [pid for pid in below if Path(f"/proc/{pid}/exe").exists()])
    outcome = distributed.score(
        artefact, folder, out=out, model=make_trained, preprocessing=actors.HOW, workers=0, chunk_size=8
    )
    assert outcome.n_resumed >= 80
    assert out.read_bytes() == whole.read_bytes()


def test_a_node_that_is_lost_costs_nothing_but_time(job, tmp_path):
    artefact, folder, whole = job
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    with scale._nodes(2) as (address, nodes):
        driver = _drive(artefact, folder, out, 2, address)
        _wait_until(lambda: _lines(partial) > 2)
        scale.end_node(nodes[1], signal.SIGKILL)
        assert not out.exists()  # there was work left when the node went
        assert driver.wait() == 0
    assert len({json.loads(line)["path"] for line in out.read_text().splitlines()}) == 600
    assert out.read_bytes() == whole.read_bytes()
