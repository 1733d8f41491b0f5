"""Bad days of a Ray cluster: the driver is killed, a node is lost. Minutes long; `make slow`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image

from neuralmean import distributed
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
from neuralmean import distributed
from tests.conftest import make_trained
from tests.faults import actors
artefact, folder, out = sys.argv[1:]
distributed.score(artefact, folder, out=out, model=make_trained, preprocessing=actors.HOW, workers=1, chunk_size=8)
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
    command = [sys.executable, "-c", DRIVER, str(artefact), str(folder), str(out)]
    driver = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
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
    import ray

    with scale._nodes(2) as (address, nodes):
        killer = threading.Thread(
            target=lambda: (_wait_until(lambda: _lines(partial) > 5), scale.end_node(nodes[1], signal.SIGKILL))
        )
        killer.start()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        try:
            outcome = distributed.score(
                artefact, folder, out=out, model=make_trained, preprocessing=actors.HOW, workers=2, chunk_size=8
            )
        finally:
            ray.shutdown()
            killer.join()
    assert outcome.n_images == 600
    assert len({json.loads(line)["path"] for line in out.read_text().splitlines()}) == 600
    assert out.read_bytes() == whole.read_bytes()
