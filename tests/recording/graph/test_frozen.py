from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import sys
import threading

import pytest
import torch

from neuralmean import Detector
from neuralmean.errors import InputError, ModelMismatchError
from neuralmean.files.cache import cache_folder
from neuralmean.recording.graph import compiled, frozen
from neuralmean.recording.graph.compiled import check_compiler
from neuralmean.service.freezing import Freezing
from neuralmean.service.workers import Runner, Threads
from tests.conftest import count_hooks, make_trained

pytestmark = pytest.mark.filterwarnings("ignore::neuralmean.errors.CalibrationWarning")

SHAPE = (3, 8, 8)


def images(n=60, seed=1):
    return torch.rand(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A cache folder of this module's own, so that a model is compiled once; how fast a toy is does not matter."""
    try:
        check_compiler()
    except InputError as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(frozen, "_faster", lambda observer, own, x, graph: graph)
        yield patch


@pytest.fixture
def eager():
    return Detector(make_trained()).fit(images(300), held_out=images(100, 2))


@pytest.fixture
def detector(home, eager):
    return copy.deepcopy(eager).freeze(images(1))


@pytest.fixture
def calls(detector, monkeypatch):
    """Counts the runs of the model's head: the weights guard notices a replaced `forward`, but not this."""
    found = []
    own = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda *args: found.append(1) or own(*args))
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 40])
def test_a_frozen_detector_gives_the_numbers_of_the_model(detector, eager, calls, size):
    x = images(size, seed=size) * 2
    output, decision = detector(x)
    assert not calls
    expected, wanted = eager(x)
    torch.testing.assert_close(output, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(decision.score, wanted.score, rtol=1e-4, atol=1e-4)
    assert torch.equal(decision.is_ood, wanted.is_ood)
    assert count_hooks(detector.model) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: torch.rand(2, 3, 10, 10),
        lambda x: x.requires_grad_(),
    ],
    ids=["shape", "gradients"],
)
def test_other_inputs_run_the_model(detector, eager, calls, make):
    x = make(images(2))
    assert torch.equal(detector(x)[1].score, eager(x)[1].score)
    assert calls


def test_a_changed_weight_is_noticed(detector):
    with torch.no_grad():
        detector.model.fc.weight.add_(1)
    with pytest.raises(ModelMismatchError, match="weights have changed"):
        detector(images(1))


def test_threads_share_a_graph(detector, eager):
    inputs = [images(1 + index % 3, seed=index) for index in range(24)]
    expected = [eager.score(x) for x in inputs]
    wrong = []

    def work(number):
        for index in range(number, 24, 6):
            score = detector(inputs[index])[1].score
            if not torch.allclose(score, expected[index], rtol=1e-4, atol=1e-4):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_runs_the_model(detector):
    detector(images(1))
    mine, theirs = multiprocessing.Pipe(duplex=False)

    def answer():
        torch.set_num_threads(1)
        theirs.send(detector(images(2))[1].score.tolist())

    child = multiprocessing.get_context("fork").Process(target=answer)
    child.start()
    assert mine.poll(120)
    torch.testing.assert_close(torch.tensor(mine.recv()), detector.score(images(2)), rtol=1e-4, atol=1e-4)
    child.join()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda detector: pickle.loads(pickle.dumps(detector))])
def test_a_copy_runs_the_model(detector, copied):
    twin = copied(detector)
    assert detector.is_frozen
    assert not twin.is_frozen
    torch.testing.assert_close(twin.score(images(3)), detector.score(images(3)), rtol=1e-4, atol=1e-4)


def test_a_package_is_compiled_once_and_only_its_owner_may_write_to_it(detector, eager, monkeypatch):
    folder = cache_folder("graphs")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert len(before) == 2
    assert folder.stat().st_mode & 0o077 == 0 or sys.platform == "win32"
    monkeypatch.setattr(compiled, "compile_packages", lambda *args: pytest.fail("compiled again"))
    assert copy.deepcopy(eager).freeze(images(4)).is_frozen
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_worker_takes_over_the_graphs(detector, eager):
    other = copy.deepcopy(eager).freeze(like=detector)
    assert other.is_frozen
    torch.testing.assert_close(other.score(images(3)), eager.score(images(3)), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="Expected `like` to be a frozen detector of a model with the same weights"):
        Detector(make_trained(seed=5)).freeze(like=detector)
    with pytest.raises(InputError, match="Expected `like` to be a frozen detector"):
        copy.deepcopy(eager).freeze(like=eager)


def test_a_service_swaps_the_graph_in_while_it_answers(home, eager, caplog):
    runners = [Runner(copy.deepcopy(eager), Threads(1, 1)) for _ in range(2)]
    x = images(3)
    before = runners[0](x, alone=True)
    with caplog.at_level("INFO", "neuralmean.service"):
        Freezing(eager, runners, images(1)).join()
    assert "runs as a compiled graph from now on" in caplog.text
    for runner in runners:
        after = runner(x, alone=True)
        torch.testing.assert_close(after.decision.score, before.decision.score, rtol=1e-4, atol=1e-4)
    assert not eager.is_frozen


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch, of itself
def test_a_compiled_model_is_frozen_through_the_same_module(detector, eager):
    wrapped = torch.compile(copy.deepcopy(eager.model), backend="eager")
    own = Detector(wrapped).fit(images(300), held_out=images(100, 2)).freeze(images(1))
    torch.testing.assert_close(own.score(images(3)), eager.score(images(3)), rtol=1e-4, atol=1e-4)


def test_a_graph_that_is_wrong_or_slow_is_not_used(home, eager, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(frozen, "_faster", lambda *args: None)
        with pytest.raises(
            InputError, match=r"but a compiled graph of it is not faster\. It runs as it is without one\."
        ):
            eager.freeze(images(1))
    make = frozen.compile_programs
    monkeypatch.setattr(
        frozen, "compile_programs", lambda *args: [lambda x, g=g: [t * 1.01 for t in g(x)] for g in make(*args)]
    )
    with pytest.raises(InputError, match="the graph does not reproduce the model's numbers"):
        eager.freeze(images(1))
    assert not eager.is_frozen


def test_early_exit_is_never_frozen():
    detector = Detector(make_trained(), scorer="average").fit(images(300), held_out=images(100), early_exit=True)
    with pytest.raises(InputError, match="Expected a detector without early exit to freeze"):
        detector.freeze(images(1))


def test_without_a_compiler_what_to_install_is_named(eager, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(InputError, match=r"needs a C\+\+ compiler, but none was found: install g\+\+"):
        eager.freeze(images(1))


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners on this system")
def test_a_cache_that_others_may_write_to_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder("graphs").chmod(0o770)
    with pytest.raises(InputError, match="must be a folder of your own that nobody else may use"):
        cache_folder("graphs")
    cache_folder_path = tmp_path / "neuralmean" / "graphs"
    cache_folder_path.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    cache_folder_path.symlink_to(elsewhere)
    with pytest.raises(InputError, match="must be a folder of your own"):
        cache_folder("graphs")
