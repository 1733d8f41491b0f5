"""Memory or the disk fails at every single call of the core: the state is the old one or the new one, and the error is ours."""

from __future__ import annotations

import contextlib
import shutil

import pytest
import torch

from neuralmean.errors import ArtefactError
from neuralmean.files import artefact, atomic, journal
from neuralmean.files.artefact import Artefact
from neuralmean.files.atomic import locked, remove_leftovers, write_atomically
from neuralmean.files.journal import Journal
from neuralmean.stats import calibration
from neuralmean.stats.calibration import Calibration
from tests.faults.failing import SYSTEM, broken_disk, each_call, no_disk, no_memory

# A `close` that was made to fail leaves the file to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
FAILURES = {
    "memory": (no_memory, None, (MemoryError,)),
    "full_disk": (no_disk, SYSTEM, (ArtefactError,)),
    "broken_disk": (broken_disk, SYSTEM, (ArtefactError,)),
}


@pytest.fixture(params=FAILURES)
def failure(request):
    return FAILURES[request.param]


def visible(folder):
    """Files that are not hidden."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.parametrize("mode", ["wb", "w"])
@pytest.mark.parametrize("was_there", [True, False])
def test_a_file_is_the_old_one_or_the_new_one(tmp_path, failure, mode, was_there):
    make, only, ours = failure
    old, new = (b"old", b"new") if mode == "wb" else ("old", "new")
    path = tmp_path / "file"
    n_reached = 0
    for failing in each_call([atomic], make, only):
        path.unlink(missing_ok=True)
        if was_there:
            path.write_bytes(b"old")
        outcome = contextlib.suppress(*ours)
        finished = False
        with outcome, failing:
            with write_atomically(path, mode) as file:
                file.write(new)
            finished = True
        n_reached += failing.reached is not None
        content = path.read_bytes() if path.exists() else None
        assert content in ({b"old", b"new"} if was_there else {None, b"new"}), failing.reached
        assert content == b"new" or not finished, failing.reached
        assert visible(tmp_path) in ([], ["file"])
        remove_leftovers(path)  # where removing itself failed
        assert [entry.name for entry in tmp_path.iterdir()] == visible(tmp_path)
    assert n_reached > 5
    assert old != new


def test_a_lock_is_let_go(tmp_path, failure):
    make, only, ours = failure
    for failing in each_call([atomic], make, only):
        with contextlib.suppress(*ours, OSError), failing, locked(tmp_path / "lock"):
            pass
        with locked(tmp_path / "lock", wait=False) as held:
            assert held, failing.reached


def _artefact(value):
    return Artefact({"value": value}, {"t": torch.full((5,), float(value)), "n": torch.arange(3)})


def test_a_saved_file_is_the_old_one_or_the_new_one(tmp_path, failure):
    make, only, ours = failure
    for failing in each_call([artefact, atomic], make, only):
        _artefact(1).write(tmp_path / "x.nmd")
        with contextlib.suppress(*ours), failing:
            _artefact(2).write(tmp_path / "x.nmd")
        again = Artefact.read(tmp_path / "x.nmd")
        assert again.header["value"] in (1, 2)
        assert torch.equal(again.tensors["t"], torch.full((5,), float(again.header["value"])))
        assert visible(tmp_path) == ["x.nmd"]
        remove_leftovers(tmp_path / "x.nmd")


def test_reading_a_saved_file_changes_nothing_and_fails_in_our_words(tmp_path, failure):
    make, only, ours = failure
    _artefact(1).write(tmp_path / "x.nmd")
    before = (tmp_path / "x.nmd").read_bytes()
    for failing in each_call([artefact], make, only):
        found = None
        with contextlib.suppress(*ours), failing:
            found = Artefact.read(tmp_path / "x.nmd")
        assert found is None or torch.equal(found.tensors["t"], torch.ones(5)), failing.reached
        assert (tmp_path / "x.nmd").read_bytes() == before


def test_a_journal_loses_nothing_that_was_finished(tmp_path, failure):
    make, only, ours = failure
    fresh, out = tmp_path / "fresh.partial", tmp_path / "out"
    first = Journal(tmp_path / "fresh", "run", resume=True)
    for key in ("a", "b"):
        first.add(key, [key])
    first.close()
    for failing in each_call([journal], make, only):
        shutil.copy(fresh, tmp_path / "out.partial")
        opened = None
        with contextlib.suppress(*ours), failing:
            opened = Journal(out, "run", resume=True)
            opened.cut()
            opened.add("c", ["c"])
        if opened is not None:
            opened.close()
        again = Journal(out, "run", resume=True)
        keys = [entry.key for entry in again.entries()]
        assert keys[:2] == ["a", "b"], failing.reached
        assert keys[2:] in ([], ["c"]), failing.reached
        again.cut()
        again.add("d", 1)
        assert [entry.key for entry in again.entries()] == [*keys, "d"]
        again.close()


def test_a_calibration_is_there_whole_or_not_at_all_and_asked_again_it_is_the_same():
    scores = torch.rand(300, generator=torch.Generator().manual_seed(0))
    asked = torch.tensor([0.0, 0.5, 0.97, 2.0])

    def results(made):
        return made.threshold, made.level, made.p_value(asked).tolist()

    for confidence in (None, 0.9):
        expected = results(Calibration.of(scores, 0.05, confidence=confidence))
        for failing in each_call([calibration], no_memory):
            calibration.examples_needed.cache_clear()
            calibration._largest_rank.cache_clear()
            made = None
            with contextlib.suppress(MemoryError), failing:
                made = Calibration.of(scores, 0.05, confidence=confidence)
                results(made)
            made = made or Calibration.of(scores, 0.05, confidence=confidence)
            assert results(made) == expected, failing.reached
