"""Hostile files: each is refused in our words, quickly and without more memory than it is long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch

from neuralmean import Detector
from neuralmean.detector.saved import open_saved
from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.artefact import Artefact
from neuralmean.monitor.monitor import Monitor
from tests.attacks.crafted import MONITOR_STATES, RAW_FILES, put, recrafted
from tests.conftest import make_trained


@pytest.fixture(scope="module")
def detector():
    torch.manual_seed(0)
    images = torch.rand(400, 3, 8, 8)
    return Detector(make_trained()).fit(images[:200], held_out=images[200:])


@pytest.fixture(scope="module")
def state(detector, tmp_path_factory):
    """The state of a monitor that has closed blocks, an open one and an alarm."""
    monitor = Monitor(detector, window=64)
    for strange in (0.0, 0.0, 5.0):
        seen = detector.observe(torch.rand(50, 3, 8, 8) + strange)
        monitor.update(seen.decision, vectors=seen.vectors)
    path = tmp_path_factory.mktemp("state") / "good"
    monitor.save(path)
    assert Monitor.load(path, detector).status() == monitor.status()
    return Artefact.read(path)


@pytest.mark.parametrize("name", MONITOR_STATES)
def test_a_crafted_monitor_state_is_refused(detector, state, tmp_path, name):
    recrafted(state, MONITOR_STATES[name]).write(tmp_path / "bad")
    with pytest.raises((ArtefactError, InputError), match="Expected "):
        Monitor.load(tmp_path / "bad", detector)


@pytest.mark.parametrize("name", RAW_FILES)
def test_a_crafted_container_is_refused(tmp_path, name):
    (tmp_path / "x.nmd").write_bytes(RAW_FILES[name])
    with pytest.raises(ArtefactError, match="Expected ") as told:
        Artefact.read(tmp_path / "x.nmd")
    assert len(str(told.value)) < 1000


def test_a_head_that_is_a_convolution_is_refused(detector, tmp_path):
    detector.save(tmp_path / "good.nmd")
    recrafted(Artefact.read(tmp_path / "good.nmd"), put("head", value="conv2")).write(tmp_path / "x.nmd")
    with pytest.raises(ArtefactError, match="the head 'conv2' is no linear layer but a Conv2d"):
        Detector.load(tmp_path / "x.nmd", detector.model)


@pytest.mark.parametrize("weights", ["w" * 5000, "/".join(["w" * 200] * 50), "w\0w"])
def test_weights_with_a_name_that_no_file_can_have_are_refused(detector, tmp_path, weights):
    detector.save(tmp_path / "x.nmd", info={"model": "torch.nn:Identity", "weights": weights})
    with pytest.raises(InputError, match="Expected the model's weights at"):
        open_saved(tmp_path / "x.nmd")


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_a_path_that_no_file_can_have_is_refused(name):
    with pytest.raises(ArtefactError, match="Expected to read a saved detector from") as told:
        Artefact.read(name)
    assert len(str(told.value)) < 1000


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "x.nmd")
    told = []

    def read():
        with pytest.raises(ArtefactError, match="but it is a pipe or a device"):
            Artefact.read(tmp_path / "x.nmd")
        told.append(True)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(10)
    assert told
    with pytest.raises(ArtefactError, match="but it is a pipe or a device"):
        Artefact.read("/dev/zero")


_READ = """
import resource, sys
from neuralmean.errors import ArtefactError
from neuralmean.files.artefact import Artefact
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    Artefact.read(sys.argv[1])
except ArtefactError as error:
    print(error, file=sys.stderr)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in KiB on Linux")
def test_a_large_tensor_costs_no_more_memory_than_it_is_long(detector, tmp_path):
    detector.save(tmp_path / "good.nmd")

    def add_junk(header, tensors):
        tensors["scorer.junk"] = torch.zeros(25 * 2**20)

    recrafted(Artefact.read(tmp_path / "good.nmd"), add_junk).write(tmp_path / "x.nmd")
    done = subprocess.run([sys.executable, "-c", _READ, tmp_path / "x.nmd"], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 120  # of 100 MiB
    with pytest.raises(ArtefactError, match="nothing has a use for 'scorer.junk'"):
        Detector.load(tmp_path / "x.nmd", detector.model)
