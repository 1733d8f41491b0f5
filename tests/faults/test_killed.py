"""kill -9 at random moments: the target is the old file or the new one, and going on ends like an undisturbed run."""

from __future__ import annotations

import multiprocessing
import random
import signal
import sys
import time

import pytest
from PIL import Image

from neuralmean.files import write_atomically
from tests.faults import actors

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a POSIX system")

COUNTS = [pytest.param(3, id="3"), pytest.param(20, id="20", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def server():
    """Starts processes that have torch imported already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.actors"])
    return context


def _run(server, target, *arguments):
    process = server.Process(target=target, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0


def _run_and_kill(server, seconds, target, *arguments, ready=lambda: True):
    """Kill the process some seconds after it is `ready`; returns whether it was still at work."""
    process = server.Process(target=target, args=arguments)
    process.start()
    while not ready() and process.is_alive():
        process.join(timeout=0.001)
    process.join(timeout=seconds)
    process.kill()
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL)
    return process.exitcode != 0


def _duration(server, target, *arguments):
    begin = time.monotonic()
    _run(server, target, *arguments)
    return time.monotonic() - begin


def _leftovers(folder):
    return [path for path in folder.iterdir() if path.name.endswith(".nmd-tmp")]


@pytest.mark.parametrize("count", COUNTS)
def test_a_fit_that_is_killed_leaves_the_old_file_or_the_new_one(server, tmp_path, count):
    old, new, target = tmp_path / "old.nmd", tmp_path / "new.nmd", tmp_path / "x.nmd"
    _run(server, actors.fit_and_save, str(old), 1)
    seconds = _duration(server, actors.fit_and_save, str(new), 2)
    rng = random.Random(0)
    killed = 0
    for share in [0.1, *(rng.uniform(0, 1.2) for _ in range(count - 1))]:
        target.write_bytes(old.read_bytes())
        killed += _run_and_kill(server, share * seconds, actors.fit_and_save, str(target), 2)
        assert actors.is_loadable(target)
        threshold = _threshold(target)
        assert threshold in (_threshold(old), _threshold(new))
        _run(server, actors.fit_and_save, str(target), 2)  # done again it ends like an undisturbed run
        assert _threshold(target) == _threshold(new)
    assert killed


def _threshold(path):
    from neuralmean.artefact import Artefact

    return Artefact.read(path).header["calibration"]["threshold"]


@pytest.mark.parametrize("count", COUNTS)
def test_a_save_that_is_killed_in_the_middle_of_writing_leaves_a_whole_file(server, tmp_path, count):
    content, target = tmp_path / "content.nmd", tmp_path / "x.nmd"
    _run(server, actors.fit_and_save, str(content), 1)
    target.write_bytes(content.read_bytes())
    rng = random.Random(1)
    for _ in range(count):
        assert _run_and_kill(server, rng.uniform(0.3, 1.0), actors.save_again_and_again, str(target), str(content))
        assert actors.is_loadable(target)
        assert len(_leftovers(tmp_path)) <= 1  # the part that was being written, under a name nobody reads
        for path in _leftovers(tmp_path):
            path.unlink()


@pytest.mark.parametrize("count", COUNTS)
def test_a_scoring_run_that_is_killed_goes_on_and_ends_the_same(server, tmp_path, count):
    folder, artefact = tmp_path / "images", tmp_path / "x.nmd"
    folder.mkdir()
    for i in range(400):
        Image.effect_noise((12, 12), 20 + i / 4).convert("RGB").save(folder / f"{i:04}.png")
    _run(server, actors.fit_and_save, str(artefact), 1)
    whole = tmp_path / "whole.jsonl"
    _run(server, actors.score, str(artefact), str(folder), str(whole))
    out, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    rng = random.Random(2)
    resumed = 0
    for _ in range(count):
        out.write_text("old")
        chunks = rng.randint(1, 50)  # of 50; at the last one the output is being written

        def ready(chunks=chunks):
            return partial.exists() and partial.read_bytes().count(b"\n") > chunks

        arguments = (str(artefact), str(folder), str(out))
        _run_and_kill(server, rng.uniform(0, 0.01), actors.score, *arguments, ready=ready)
        assert out.read_text() in ("old", whole.read_text())
        resumed += partial.exists()
        _run(server, actors.score, str(artefact), str(folder), str(out))
        assert out.read_bytes() == whole.read_bytes()
        assert not partial.exists()
    assert resumed


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the size of files")
def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path):
    import resource

    from neuralmean.errors import ArtefactError

    target = tmp_path / "x.bin"
    target.write_bytes(b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ArtefactError, match="the disk is full"), write_atomically(target) as file:
            file.write(bytes(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert target.read_bytes() == b"old"
    assert _leftovers(tmp_path) == []
