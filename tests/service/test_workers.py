"""Passes that run at a time: twins of the detector, threads for each, and the layout of the inputs."""

import logging
import threading

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.service import workers
from neuralmean.service.passes import run_pass
from neuralmean.service.workers import Runner, Threads, freeze_runners, make_runners, on_own_thread, twin
from tests.conftest import make_trained

ONE = Threads(1, 1)


@pytest.fixture(autouse=True)
def threads_of_torch():
    """Leave torch's threads as they are, whatever a test sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_twin_shares_every_tensor_and_no_module_and_gives_the_same_bits(detector, images):
    other = twin(detector)
    pairs = zip(detector.model.parameters(), other.model.parameters(), strict=True)
    assert all(own is its for own, its in pairs)
    pairs = zip(detector.model.buffers(), other.model.buffers(), strict=True)
    assert all(own is its for own, its in pairs)
    assert not set(map(id, detector.model.modules())) & set(map(id, other.model.modules()))
    assert torch.equal(other.score(images[:5]), detector.score(images[:5]))
    assert other.threshold == detector.threshold


def test_twins_at_work_at_the_same_time_do_not_disturb_each_other(detector, images):
    expected = [detector.score(part) for part in (images[:4], images[4:8])]
    found = [[], []]
    start = threading.Barrier(2)

    def work(index, own):
        start.wait(10)
        for _ in range(50):
            found[index].append(run_pass(own, images[4 * index : 4 * index + 4]).decision.score)

    tasks = [threading.Thread(target=work, args=pair) for pair in enumerate((detector, twin(detector)))]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join()
    for scores, right in zip(found, expected, strict=True):
        assert len(scores) == 50
        assert all(torch.equal(score, right) for score in scores)


@pytest.mark.parametrize(("n_threads", "n_workers", "together"), [(1, 1, 1), (2, 2, 1), (4, 4, 1), (9, 4, 2)])
def test_the_threads_are_shared_out_among_a_few_workers(detector, n_threads, n_workers, together):
    runners = make_runners(detector, None, n_threads)
    assert len(runners) == n_workers
    assert runners[0]._threads == Threads(n_threads, together)
    assert all(runner._threads == Threads(together, together) for runner in runners[1:])


def test_a_model_that_cannot_be_copied_has_one_worker_with_all_threads(detector, caplog):
    caplog.set_level(logging.INFO, "neuralmean.service")
    detector.model.lock = threading.Lock()
    (runner,) = make_runners(detector, None, 2)
    assert runner._threads == Threads(2, 2)
    assert "Passes run one at a time, because the model cannot be copied: Expected a model" in caplog.text
    assert "TinyNet cannot: cannot pickle '_thread.lock' object" in caplog.text


def test_a_compiled_model_has_one_worker(detector, monkeypatch):
    monkeypatch.setattr(workers, "is_compiled", lambda model: True)
    assert len(make_runners(detector, None, 2)) == 1


@pytest.mark.parametrize(("seconds", "alone"), [([4.0, 2.0], 2), ([2.1, 2.0], 1), ([2.0, 9.0], 1)])
def test_alone_a_pass_gets_all_threads_only_where_they_make_it_faster(detector, images, monkeypatch, seconds, alone):
    monkeypatch.setattr(workers, "_seconds", lambda *_: seconds.pop(0))
    first, second = make_runners(detector, images[:1], 2)
    assert (first._threads, second._threads) == (Threads(alone, 1), ONE)


def test_a_pass_runs_with_the_threads_of_its_kind(detector, images):
    run = Runner(detector, Threads(alone=2, together=1))
    run(images[:1], alone=True)
    assert torch.get_num_threads() == 2
    run(images[:1], alone=False)
    assert torch.get_num_threads() == 1


class _Choosy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = make_trained()

    def forward(self, x):
        return self.body(x) if x.sum() > 0 else self.body(-x)


class _Layout(nn.Module):
    """Remembers how its inputs lay in memory."""

    def __init__(self):
        super().__init__()
        self.body = make_trained()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.is_contiguous(memory_format=torch.channels_last))
        return self.body(x)


def test_many_images_come_with_channels_last_and_a_few_as_in_a_direct_call(images):
    detector = Detector(_Layout(), scorer="average").calibrate(images[:50])
    detector.model.seen.clear()
    run = Runner(detector, ONE)
    few, many = run(images[:7], alone=True), run(images[:8], alone=True)
    assert detector.model.seen == [False, True]
    assert torch.equal(few.decision.score, detector.score(images[:7]))
    torch.testing.assert_close(many.decision.score, detector.score(images[:8]), rtol=1e-5, atol=1e-5)
    assert few.output is not None
    assert many.output is not None
    torch.testing.assert_close(few.output, many.output[:7], rtol=1e-5, atol=1e-5)


def test_what_starts_on_a_thread_of_its_own_leaves_no_thread_behind():
    before = set(threading.enumerate())
    found = on_own_thread(threading.current_thread)
    assert found is not threading.current_thread()
    assert set(threading.enumerate()) == before
    with pytest.raises(ValueError, match="no model"):
        on_own_thread(lambda: (_ for _ in ()).throw(ValueError("no model")))


def test_compiled_graphs_run_one_at_a_time_with_all_threads(model, images, monkeypatch):
    """torch holds Python's lock while a compiled graph runs, so two passes at a time would each have half of the cores."""
    detector = Detector(model, scorer="average").calibrate(images)
    runners = make_runners(detector, None, 2)
    seen = []
    monkeypatch.setattr(Detector, "freeze", lambda self, x=None, *, like=None: self)
    monkeypatch.setattr(
        "neuralmean.service.workers.run_pass",
        lambda *_: seen.append((threading.current_thread().name, torch.get_num_threads())),
    )
    freeze_runners(runners, detector)
    for runner in runners:
        runner(images[:4], alone=False)
    assert len(set(seen)) == 1
    assert seen[0][1] == 2
    assert seen[0][0].startswith("neuralmean-graph")
