"""Hostile files: each is refused in our words, quickly and without more memory than it is long."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
import torch

from neuralmean import Detector
from neuralmean.detector.inspection import describe_saved
from neuralmean.detector.saved import open_saved
from neuralmean.errors import ArtefactError, InputError, NeuralMeanError
from neuralmean.files.artefact import MAX_HEADER_BYTES, Artefact
from neuralmean.files.atomic import write_atomically
from neuralmean.files.journal import Journal
from neuralmean.jobs.rows import FinishedPart
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
    with pytest.raises(ArtefactError, match="the head 'conv2' is not a linear layer but a Conv2d"):
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
    with pytest.raises(ArtefactError, match="'scorer.junk' is unknown"):
        Detector.load(tmp_path / "x.nmd", detector.model)


HEADERS = {
    "many_lists": b"[" + b"[]," * 1_000_000 + b"[]]",
    "many_objects": b"[" + b'{"a":1},' * 400_000 + b"1]",
    "many_names": b"{" + b",".join(b'"%d":1' % i for i in range(200_000)) + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_unpacks_to_many_times_its_size_is_not_unpacked(tmp_path, name, monkeypatch):
    text = b'{"__metadata__":{"neuralmean":"{}"},"x":' + HEADERS[name] + b"}"
    assert len(text) < MAX_HEADER_BYTES
    (tmp_path / "x.nmd").write_bytes(struct.pack("<Q", len(text)) + text)
    monkeypatch.setattr(json, "loads", None)  # not even tried
    with pytest.raises(ArtefactError, match="it is not one, or it is truncated"):
        Artefact.read(tmp_path / "x.nmd")


def test_a_header_with_more_parts_than_can_be_read_is_not_written(tmp_path):
    with pytest.raises(InputError, match=r"with 100,000 parts, but got 0 MiB, 0.4 and 100,0\d\d. Watch fewer layers"):
        Artefact({"lists": [[]] * 100_000}, {}).write(tmp_path / "x.nmd")
    assert list(tmp_path.iterdir()) == []


ON_A_NETWORK = [
    "\\\\evil.example\\share\\w.safetensors",
    "//evil.example/share/w.safetensors",
    "/\\evil.example\\share\\w.safetensors",
    "\\/evil.example/share/w.safetensors",
    "\\??\\UNC\\evil.example\\share\\w.safetensors",
]


@pytest.mark.parametrize("folder", ON_A_NETWORK)
def test_a_folder_on_a_network_is_not_asked_for(detector, tmp_path, folder, monkeypatch):
    asked = []
    monkeypatch.setattr("neuralmean.models.huggingface._config", asked.append)
    detector.save(tmp_path / "x.nmd", info={"model": f"hf:{folder}", "weights": None})
    with pytest.raises(InputError, match="Expected the file to name a folder of this machine, but it names"):
        open_saved(tmp_path / "x.nmd")
    assert not asked


@pytest.mark.parametrize("weights", ON_A_NETWORK)
def test_weights_on_a_network_are_not_asked_for(detector, tmp_path, weights, monkeypatch):
    asked = []
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda self: asked.append(str(self)) or is_file(self))
    detector.save(tmp_path / "x.nmd", info={"model": "torch.nn:Identity", "weights": weights})
    with pytest.raises(InputError, match="Expected the model's weights at"):
        open_saved(tmp_path / "x.nmd")
    assert asked
    assert all(path.startswith(str(tmp_path)) for path in asked)


def _within(seconds, work):
    told = []
    thread = threading.Thread(target=lambda: told.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return told[0] if told else "it hangs"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("kind", ["pipe", "link", "dangling", "folder"])
def test_a_journal_that_is_no_file_of_its_own_is_refused(tmp_path, kind):
    place, victim = tmp_path / "out.csv.partial", tmp_path / "victim"
    victim.write_text("precious")
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(victim if kind == "link" else tmp_path / "new")

    def begin():
        try:
            Journal(tmp_path / "out.csv", "run", resume=True)
        except ArtefactError as error:
            return str(error)

    told = _within(10, begin)
    assert ("it is a link, a pipe or a device" in told) == (kind != "folder"), told
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("line", [b"key not json", b"key " + b"[" * 100_000, b"k\xff 1"])
def test_a_line_that_is_no_json_ends_what_counts_also_with_a_checksum_that_fits(tmp_path, line):
    first = Journal(tmp_path / "out", "run", resume=True)
    first.add("a", 1)
    first.close()
    with (tmp_path / "out.partial").open("ab") as file:
        file.write(b"%08x " % zlib.crc32(line) + line + b"\n")
    again = Journal(tmp_path / "out", "run", resume=True)
    assert [entry.key for entry in again.entries()] == ["a"]
    again.close()


@pytest.mark.parametrize(
    "content",
    [
        5,
        [],
        [[], [], []],
        [[["a.png"]], []],
        [[["a.png", "x", 0.5, False, "typical"]], []],
        [[[1, 2.0, 0.5, False, "x"]], []],
    ],
    ids=str,
)
def test_rows_of_a_journal_that_are_none_are_refused(content):
    with pytest.raises(ArtefactError, match="Expected the journal to hold scores of images"):
        FinishedPart.from_json(content)


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_what_others_may_not_read_they_may_not_read_while_it_is_written(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("old")
    secret.chmod(0o600)
    with write_atomically(secret) as file:
        file.write(b"new")
        file.flush()
        (unfinished,) = [path for path in tmp_path.iterdir() if path != secret]
        assert unfinished.stat().st_mode & 0o777 == 0o600


def test_a_link_put_in_the_place_of_the_unfinished_file_is_not_followed(tmp_path, monkeypatch):
    # Its name cannot be guessed; if it could, the file behind the link would still not be written.
    monkeypatch.setattr("secrets.token_hex", lambda n: "0" * 2 * n)
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".out.000000000000.nmd-tmp").symlink_to("victim")
    with (
        pytest.raises(ArtefactError, match="the system reported: File exists"),
        write_atomically(tmp_path / "out") as file,
    ):
        file.write(b"new")
    assert (tmp_path / "victim").read_text() == "precious"


@pytest.mark.parametrize("header", [{}, {"fitted": {}}, {"fitted": 1, "calibration": [], "info": "x"}], ids=str)
def test_a_saved_file_without_what_is_told_of_it_is_refused_when_it_is_inspected(tmp_path, header):
    Artefact(header, {}).write(tmp_path / "x.nmd")
    with pytest.raises(ArtefactError, match="its content is invalid"):
        describe_saved(tmp_path / "x.nmd")


@pytest.mark.parametrize(
    "name", ["forward", "__class__", "../conv1", "bn1.weight", "", "conv1\0", "modules", "x" * 5000]
)
@pytest.mark.parametrize("place", ["head", "layer"])
def test_names_of_layers_that_are_none_are_refused(detector, tmp_path, name, place):
    detector.save(tmp_path / "good.nmd")
    change = put("head", value=name) if place == "head" else put("layers", 0, 0, value=name)
    recrafted(Artefact.read(tmp_path / "good.nmd"), change).write(tmp_path / "x.nmd")
    with pytest.raises(NeuralMeanError, match="Expected "):
        Detector.load(tmp_path / "x.nmd", detector.model)


@pytest.mark.parametrize(
    "spec",
    ["os:system", "../evil:Net", "/tmp/evil.py:Net", "torch.nn:Module.apply", "torch.nn:__builtins__", "torch.hub:load",
     "torch.nn.modules:os", "timm:../../x", "timm:hf-hub:evil/x", "torchvision:../x", "bench:../x", "a:b:c", ":", "torch.nn:"],
)  # fmt: skip
def test_a_spec_of_a_file_that_names_no_model_of_a_package_is_refused(detector, tmp_path, spec):
    detector.save(tmp_path / "x.nmd", info={"model": spec})
    with pytest.raises(NeuralMeanError, match="Expected "):
        open_saved(tmp_path / "x.nmd")
