"""Requests share passes, the queue is bounded, and nobody pays for what others do."""

import asyncio
import threading

import pytest
import torch

from neuralmean.detector.decision import Decision
from neuralmean.errors import InputError
from neuralmean.service.batching import Batcher, ClientGoneError, Job
from neuralmean.service.passes import Pass
from neuralmean.service.refusal import Refusal
from neuralmean.stats.calibration import Calibration

CALIBRATION = Calibration.of(torch.arange(19.0), 0.05)


class Passes:
    """Stands for the model: remembers its batches, waits while it is held, fails on negative inputs."""

    def __init__(self):
        self.sizes = []
        self.alone = []
        self.free = threading.Event()
        self.free.set()
        self.begun = threading.Event()

    def __call__(self, inputs, explain, *, alone):
        self.begun.set()
        assert self.free.wait(10)
        if (inputs < 0).any():
            raise InputError("negative")
        self.sizes.append(len(inputs))
        self.alone.append(alone)
        score = inputs.flatten(1).sum(1)
        return Pass(inputs * 2, Decision(score, CALIBRATION), inputs, None)


@pytest.fixture
def passes():
    return Passes()


def _batcher(*passes, **changes):
    return Batcher(passes, **{"max_batch": 8, "max_wait_ms": 0.0, "queue": 16, **changes})


def _job(*values):
    return Job(torch.tensor(values, dtype=torch.float32)[:, None])


def _scores(answer):
    return answer.shared.decision.score[answer.rows].tolist()


async def _hold(batcher, passes):
    """Keep the worker busy with one job; returns its task."""
    passes.free.clear()
    passes.begun.clear()
    task = asyncio.create_task(batcher.submit([_job(0.0)], timeout=10))
    await asyncio.to_thread(passes.begun.wait, 10)
    return task


def _run(scenario, batcher):
    try:
        asyncio.run(asyncio.wait_for(scenario(), 30))
    finally:
        batcher.close()


def test_what_comes_while_the_worker_is_busy_shares_a_pass_and_everybody_gets_their_own(passes):
    batcher = _batcher(passes)

    async def scenario():
        first = await _hold(batcher, passes)
        others = [asyncio.create_task(batcher.submit([_job(i, i + 0.5)], timeout=10)) for i in range(3)]
        await asyncio.sleep(0)
        passes.free.set()
        await first
        answers = await asyncio.gather(*others)
        assert [_scores(answer) for (answer,) in answers] == [[0, 0.5], [1, 1.5], [2, 2.5]]

    _run(scenario, batcher)
    assert passes.sizes == [1, 6]
    assert (batcher.n_passes, batcher.n_rows, batcher.n_waiting) == (2, 7, 0)


def test_a_batch_holds_at_most_its_limit_and_one_shape(passes):
    batcher = _batcher(passes, max_batch=4)

    async def scenario():
        first = await _hold(batcher, passes)
        jobs = [_job(1, 2, 3), _job(4, 5), Job(torch.ones(1, 2)), _job(6)]
        others = [asyncio.create_task(batcher.submit([job], timeout=10)) for job in jobs]
        await asyncio.sleep(0)
        passes.free.set()
        await asyncio.gather(first, *others)
        assert [_scores(task.result()[0]) for task in others] == [[1, 2, 3], [4, 5], [2], [6]]

    _run(scenario, batcher)
    assert passes.sizes == [1, 4, 2, 1]


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(passes):
    batcher = _batcher(passes, max_batch=2, queue=2)

    async def scenario():
        first = await _hold(batcher, passes)
        second = asyncio.create_task(batcher.submit([_job(1, 2)], timeout=10))
        await asyncio.sleep(0)
        with pytest.raises(Refusal, match="The server has too much to do") as caught:
            await batcher.submit([_job(3)], timeout=10)
        assert caught.value.status == 503
        assert int(caught.value.headers["Retry-After"]) >= 1
        passes.free.set()
        await asyncio.gather(first, second)

    _run(scenario, batcher)
    assert batcher.n_refused == 1
    assert passes.sizes == [1, 2]


def test_a_request_that_is_cancelled_before_its_pass_does_not_run_and_makes_room(passes):
    batcher = _batcher(passes, max_batch=2, queue=2)

    async def scenario():
        first = await _hold(batcher, passes)
        second = asyncio.create_task(batcher.submit([_job(1, 2)], timeout=10))
        await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        third = asyncio.create_task(batcher.submit([_job(3)], timeout=10))
        await asyncio.sleep(0)
        passes.free.set()
        await first
        assert _scores((await third)[0]) == [3]

    _run(scenario, batcher)
    assert passes.sizes == [1, 1]
    assert batcher.n_given_up == 1


def test_a_client_that_has_gone_is_not_worked_for(passes):
    batcher = _batcher(passes)

    async def scenario():
        first = await _hold(batcher, passes)
        left = asyncio.Event()
        second = asyncio.create_task(batcher.submit([_job(1)], timeout=10, gone=left.wait))
        await asyncio.sleep(0)
        left.set()
        with pytest.raises(ClientGoneError):
            await second
        passes.free.set()
        await first

    _run(scenario, batcher)
    assert passes.sizes == [1]


def test_an_answer_that_takes_too_long_is_given_up(passes):
    batcher = _batcher(passes)

    async def scenario():
        first = await _hold(batcher, passes)
        with pytest.raises(Refusal, match=r"The answer took longer than 0\.01 seconds") as caught:
            await batcher.submit([_job(1)], timeout=0.01)
        assert caught.value.status == 503
        passes.free.set()
        await first

    _run(scenario, batcher)
    assert passes.sizes == [1]


def test_one_bad_request_does_not_spoil_the_batch(passes):
    batcher = _batcher(passes)

    async def scenario():
        first = await _hold(batcher, passes)
        tasks = [asyncio.create_task(batcher.submit([_job(value)], timeout=10)) for value in (1, -1, 2)]
        await asyncio.sleep(0)
        passes.free.set()
        await first
        good, bad, other = await asyncio.gather(*tasks, return_exceptions=True)
        assert (_scores(good[0]), _scores(other[0])) == ([1], [2])
        assert isinstance(bad, InputError)

    _run(scenario, batcher)


def test_a_request_of_several_jobs_is_answered_in_order_or_not_at_all(passes):
    batcher = _batcher(passes, max_batch=2, queue=4)

    async def scenario():
        answers = await batcher.submit([_job(1), Job(torch.ones(1, 3)), _job(2)], timeout=10)
        assert [_scores(answer) for answer in answers] == [[1], [3], [2]]
        with pytest.raises(InputError, match="negative"):
            await batcher.submit([_job(1), _job(-1)], timeout=10)
        with pytest.raises(Refusal, match="too much to do"):
            await batcher.submit([_job(1, 1)] * 3, timeout=10)
        assert batcher.n_waiting == 0

    _run(scenario, batcher)


def test_under_load_a_request_waits_for_company_and_alone_it_does_not(passes):
    batcher = _batcher(passes, max_wait_ms=20_000.0)

    async def scenario():
        await asyncio.wait_for(batcher.submit([_job(1)], timeout=10), 5)  # alone: at once
        with batcher.arriving():
            waiting = asyncio.create_task(batcher.submit([_job(1)], timeout=30))
            for _ in range(500):
                await asyncio.sleep(0)
            assert passes.sizes == [1]
            await batcher.submit([_job(*range(7))], timeout=10)  # now the batch is full
            await waiting

    _run(scenario, batcher)
    assert passes.sizes == [1, 8]


def test_a_lone_client_never_waits_however_many_rows_it_sends(passes):
    batcher = _batcher(passes, max_wait_ms=20_000.0)

    async def scenario():
        for _ in range(3):
            await asyncio.wait_for(batcher.submit([_job(1, 2, 3)], timeout=10), 5)

    _run(scenario, batcher)
    assert passes.sizes == [3, 3, 3]
    assert passes.alone == [True, True, True]


def test_a_pass_that_others_share_or_wait_for_is_not_alone(passes):
    batcher = _batcher(passes, max_batch=2)

    async def scenario():
        first = await _hold(batcher, passes)
        others = [asyncio.create_task(batcher.submit([_job(i)], timeout=10)) for i in range(5)]
        await asyncio.sleep(0)
        passes.free.set()
        await asyncio.gather(first, *others)

    _run(scenario, batcher)
    assert passes.sizes == [1, 2, 2, 1]
    assert passes.alone == [True, False, False, True]


def test_workers_run_at_the_same_time_and_what_is_left_over_finds_the_next_one():
    first, second = Passes(), Passes()
    batcher = _batcher(first, second, max_batch=2, max_wait_ms=20_000.0)
    first.free.clear()
    second.free.clear()

    async def scenario():
        with batcher.arriving():  # so that every batch gets full
            tasks = [asyncio.create_task(batcher.submit([_job(i)], timeout=10)) for i in range(6)]
            for one in (first, second):
                assert await asyncio.to_thread(one.begun.wait, 10)
            assert batcher.n_waiting == 2
            second.free.set()
            while sum(task.done() for task in tasks) < 4:
                await asyncio.sleep(0)
        assert first.sizes == []
        first.free.set()
        assert [_scores((await task)[0]) for task in tasks] == [[0], [1], [2], [3], [4], [5]]

    _run(scenario, batcher)
    assert (first.sizes, second.sizes) == ([2], [2, 2])
    assert True not in first.alone + second.alone


async def _let_both_end(*passes):
    """Wait until every one of these passes has begun, then let them go on."""
    for one in passes:
        assert await asyncio.to_thread(one.begun.wait, 5)
    for one in passes:
        one.free.set()


def test_two_requests_and_two_workers_do_not_wait_for_each_other():
    first, second = Passes(), Passes()
    batcher = _batcher(first, second, max_wait_ms=20_000.0)
    first.free.clear()
    second.free.clear()

    async def scenario():
        tasks = [asyncio.create_task(batcher.submit([_job(0)], timeout=10))]
        while not (first.begun.is_set() or second.begun.is_set()):
            await asyncio.sleep(0)
        tasks += [asyncio.create_task(batcher.submit([_job(1)], timeout=10))]
        await _let_both_end(first, second)
        await asyncio.gather(*tasks)

    _run(scenario, batcher)
    assert first.sizes == second.sizes == [1]


def test_what_waits_is_split_between_the_workers_that_are_free():
    first, second = Passes(), Passes()
    batcher = _batcher(first, second, max_batch=64, queue=64)
    first.free.clear()
    second.free.clear()

    async def scenario():
        with batcher._lock:  # nobody begins before all are here
            tasks = [asyncio.create_task(batcher.submit([_job(1, 2, 3, 4)], timeout=10)) for _ in range(8)]
            while batcher.n_waiting < 32:
                await asyncio.sleep(0)
        await _let_both_end(first, second)
        await asyncio.gather(*tasks)

    _run(scenario, batcher)
    assert first.sizes == second.sizes == [16]


def test_a_worker_waits_for_its_part_of_those_who_were_here_a_moment_ago():
    first, second = Passes(), Passes()
    batcher = _batcher(first, second, max_wait_ms=20_000.0)

    async def scenario():
        await asyncio.wait_for(batcher.submit([_job(*range(8))], timeout=10), 5)
        one = asyncio.create_task(batcher.submit([_job(1)], timeout=30))
        for _ in range(500):
            await asyncio.sleep(0)
        assert batcher.n_waiting == 1  # eight were here: a worker's part is four
        await asyncio.wait_for(batcher.submit([_job(1, 2, 3)], timeout=10), 5)
        await one

    _run(scenario, batcher)
    assert sorted(first.sizes + second.sizes) == [4, 8]


def test_close_finishes_what_was_accepted_and_refuses_the_rest(passes):
    batcher = _batcher(passes)

    async def scenario():
        first = await _hold(batcher, passes)
        second = asyncio.create_task(batcher.submit([_job(1)], timeout=10))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(batcher.close))
        while not batcher._closing:
            await asyncio.sleep(0)
        with pytest.raises(Refusal, match="The server is shutting down"):
            await batcher.submit([_job(2)], timeout=10)
        passes.free.set()
        await asyncio.gather(first, second, closing)

    _run(scenario, batcher)
    assert passes.sizes == [1, 1]


def test_what_fails_after_the_answer_is_logged_and_does_not_end_the_worker(passes, caplog):
    def after(inputs, shared):
        raise ValueError("full")

    batcher = _batcher(passes, after=after)

    async def scenario():
        for _ in range(2):
            await batcher.submit([_job(1)], timeout=10)

    _run(scenario, batcher)
    assert caplog.text.count("The monitor failed on a batch.") == 2


def test_while_there_is_little_to_do_the_first_worker_does_it():
    first, second = Passes(), Passes()
    batcher = _batcher(first, second)

    async def scenario():
        for _ in range(5):
            while not all(batcher._resting):
                await asyncio.sleep(0)
            await batcher.submit([_job(1)], timeout=10)

    _run(scenario, batcher)
    assert (first.sizes, second.sizes) == ([1] * 5, [])


def test_what_comes_after_the_answer_runs_in_order_on_its_own_thread_and_to_its_end():
    seen, names = [], set()

    def after(inputs, shared):
        seen.append(inputs.item())
        names.add(threading.current_thread().name)

    batcher = _batcher(Passes(), after=after)

    async def scenario():
        for value in range(40):  # more than may wait
            await batcher.submit([_job(value)], timeout=10)

    _run(scenario, batcher)  # closes it
    assert seen == list(range(40))
    assert names == {"neuralmean-after"}
