"""kill -9 at random moments: the target is the old file or the new one, and going on ends like an undisturbed run."""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import signal
import sys
import time
from itertools import count as count_from

import pytest
import torch
from PIL import Image

from neuralmean.bench.results import read_rows
from neuralmean.errors import ArtefactError
from neuralmean.files.artefact import Artefact
from neuralmean.files.atomic import write_atomically
from tests.bench.test_experiments import SETS, write_sets, write_weights
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


def _figures(rows):
    """Rows without what a clock or the memory decides."""
    measured = ("seconds", "fit_seconds", "score_ms_per_image", "peak_mb")
    return [{name: value for name, value in row.items() if name not in measured} for row in rows]


@pytest.mark.parametrize("count", COUNTS)
def test_a_benchmark_that_is_killed_goes_on_and_ends_with_the_same_rows(server, tmp_path, count):
    for name in ("data", "weights"):
        (tmp_path / name).mkdir()
    write_sets(tmp_path / "data", {**SETS, "cifar100-train": 60, "cifar100-test": 60})
    write_weights(tmp_path / "weights")
    whole, out = tmp_path / "whole.json", tmp_path / "out.json"
    seconds = _duration(server, actors.run_benchmark, str(tmp_path), str(whole))
    expected = _figures(read_rows(whole))
    old = {**read_rows(whole)[0], "experiment": "another", "setting": "made before"}
    rng = random.Random(3)
    begun = 0
    for turn in range(count):
        shutil.rmtree(f"{out}-cache", ignore_errors=True)
        out.write_text(json.dumps([old]))
        # By turns while features are made and fits are done, and around the writing of some row.
        least, wait = (rng.randint(2, len(expected)), 0.02) if turn % 2 == 0 else (1, seconds)

        def ready(least=least):
            return out.read_bytes().count(b'"experiment"') >= least

        arguments = (str(tmp_path), str(out))
        killed = _run_and_kill(server, rng.uniform(0, wait), actors.run_benchmark, *arguments, ready=ready)
        rows = read_rows(out)  # any moment leaves a whole file, with the rows that were finished
        assert rows[0] == old
        assert _figures(rows[1:]) == expected[: len(rows) - 1]
        begun += killed and len(rows) > 1
        _run(server, actors.run_benchmark, str(tmp_path), str(out))
        assert read_rows(out)[: len(rows)] == rows  # nothing that was finished is measured again
        assert _figures(read_rows(out)[1:]) == expected
    assert begun


@pytest.mark.parametrize("count", COUNTS)
def test_a_monitor_that_is_killed_goes_on_from_its_state_and_ends_in_the_same(server, tmp_path, count):
    artefact, whole, state = tmp_path / "x.nmd", tmp_path / "whole.state", tmp_path / "x.state"
    _run(server, actors.fit_and_save, str(artefact), 1)
    seconds = _duration(server, actors.watch, str(artefact), str(whole))
    expected = Artefact.read(whole)
    n_items = 60 * actors.STREAM_BATCH
    assert expected.header["counters"]["n_seen"] == n_items
    assert expected.header["alarm"]["item"] >= n_items // 2  # the change is part of what has to survive
    rng = random.Random(4)
    moments = set()
    for _ in range(count):
        state.unlink(missing_ok=True)
        seen = 0
        for attempt in count_from():  # killed until it is through: every start goes on where the last one was
            wait = rng.uniform(0.2, 0.9) * seconds * (1 + attempt / 5)
            killed = _run_and_kill(server, wait, actors.watch, str(artefact), str(state))
            before, seen = seen, Artefact.read(state).header["counters"]["n_seen"] if state.exists() else 0
            assert seen % actors.STREAM_BATCH == 0
            assert seen >= before
            if not killed:
                break
            moments.add(seen)
            assert attempt < 50
        final = Artefact.read(state)
        assert final.header == expected.header
        assert final.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(final.tensors[name], tensor) for name, tensor in expected.tensors.items())
        assert len(_leftovers(tmp_path)) <= attempt
        for path in _leftovers(tmp_path):
            path.unlink()
    assert len(moments - {0, n_items}) >= count // 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs a limit on the size of files")
def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path):
    import resource

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
