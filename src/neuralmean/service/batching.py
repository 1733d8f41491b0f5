"""Concurrent requests share forward passes.

A few worker threads run the passes, each with its own copy of the model. A single request runs at once; under load
requests wait for each other up to a bound. The queue is bounded in inputs and refuses at once when full. A request that
is cancelled before its pass begins does not run. `close` finishes accepted requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Queue
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.service.passes import Pass
from neuralmean.service.refusal import busy

log = logging.getLogger("neuralmean.service")

AFTERWARDS = 16
"""Batches that may wait for `after` before the workers wait for it too."""

SMALL = 8
"""Fewer rows are not worth splitting: the fixed cost of a pass is about that of this many rows."""


class Run(Protocol):
    """The forward pass of one worker."""

    def __call__(self, inputs: Tensor, explain: Tensor, *, alone: bool) -> Pass:
        """Run a batch; `explain` holds the rows to explain, `alone` says that nothing else runs or waits."""


class ClientGoneError(Exception):
    """The client disconnected before its answer."""


@dataclass
class Answer:
    """The result of one job: the shared pass, and its own rows."""

    shared: Pass
    rows: slice
    explained: slice  # rows of `shared.explanation`

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return output, score, p-value and decision of the own rows."""
        return {name: array[self.rows] for name, array in self.shared.arrays.items()}


@dataclass
class Job:
    """Inputs of one request that fit into one batch."""

    inputs: Tensor  # (N, ...)
    explain: bool = False
    watched: bool = True  # whether it belongs to the monitored stream
    since: float = field(default_factory=time.monotonic)
    future: asyncio.Future[Answer] | None = None
    given_up: bool = False

    def __len__(self) -> int:
        return len(self.inputs)

    def fits_with(self, other: Job) -> bool:
        """Return whether the two can share a batch."""
        return self.inputs.shape[1:] == other.inputs.shape[1:] and self.inputs.dtype == other.inputs.dtype


class Batcher:
    """Runs jobs from an event loop on worker threads, many at a time.

    Args:
        runs: The forward passes, one for each worker; they run at the same time.
        max_batch: Maximum number of rows of a batch.
        max_wait_ms: Maximum time an idle worker waits for more requests to share its batch, under load.
        queue: Maximum number of waiting rows.
        after: Called with the watched inputs of each batch and what the pass showed of them, one batch after the other on a
            thread of its own.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        max_batch: int,
        max_wait_ms: float,
        queue: int,
        after: Callable[[Tensor, Pass], None] | None = None,
    ) -> None:
        self._max_batch = max_batch
        self._max_wait = max_wait_ms / 1000
        self._max_queue = queue
        self._after = after
        self._lock = threading.RLock()
        # One event per worker; the first idle worker is woken, which is always the same one under low load.
        self._bells = [threading.Condition(self._lock) for _ in runs]
        self._resting = [False] * len(runs)
        self._jobs: deque[Job] = deque()
        self._n_waiting = self._n_arriving = self._n_running = 0  # rows, requests, rows
        self._n_free = len(runs)
        self._crowd = 0.0  # recent number of concurrent rows
        self._seconds_per_row = 0.01
        self._closing = False
        self.n_passes = self.n_rows = self.n_refused = self.n_given_up = 0
        self._workers = [
            threading.Thread(target=self._work, args=(number, run), name=f"neuralmean-worker-{number}", daemon=True)
            for number, run in enumerate(runs)
        ]
        self._afterwards: Queue[tuple[Tensor, Pass] | None] = Queue(AFTERWARDS)
        self._follower = threading.Thread(target=self._follow, name="neuralmean-after", daemon=True)
        for thread in (*self._workers, self._follower):
            thread.start()

    @property
    def n_waiting(self) -> int:
        """Rows that wait."""
        return self._n_waiting

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Tell the workers that a request is being read, so that they wait for it."""
        self._n_arriving += 1
        try:
            yield
        finally:
            self._n_arriving -= 1

    async def submit(
        self, jobs: Sequence[Job], *, timeout: float, gone: Callable[[], Coroutine[Any, Any, Any]] | None = None
    ) -> list[Answer]:
        """Run all jobs of a request, or none of them; must be called on an event loop.

        Args:
            jobs: What to run; each of at most `max_batch` rows.
            timeout: Longest time to wait for the answers, in seconds.
            gone: Returns when the client has gone: the jobs that have not begun by then do not run.

        Raises:
            Refusal: The queue is full, the server is going down, or the answer takes too long.
            ClientGoneError: The client has gone.
        """
        loop = asyncio.get_running_loop()
        self._accept(jobs, loop)
        answers = asyncio.gather(*(job.future for job in jobs if job.future is not None))

        def give_up(reason: Exception) -> None:
            if not answers.done():
                answers.set_exception(reason)

        late = busy(f"The answer took longer than {timeout:g} seconds. Try again later.", timeout)
        timer = loop.call_later(timeout, give_up, late)
        watch = None if gone is None else loop.create_task(gone())
        if watch is not None:
            watch.add_done_callback(lambda _: give_up(ClientGoneError()))
        try:
            return await answers
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()
            for job in jobs:  # jobs of a cancelled call that have not begun do not run
                job.given_up = True
                if job.future is not None:
                    job.future.cancel()

    def _accept(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        n_rows = sum(map(len, jobs))
        with self._lock:
            if self._closing:
                raise busy("The server is shutting down. Try again later.", 1)
            if self._n_waiting + n_rows > self._max_queue:
                self._drop_given_up()
            if self._n_waiting + n_rows > self._max_queue:
                self.n_refused += 1
                raise busy("The server has too much to do. Try again later.", self._n_waiting * self._seconds_per_row)
            for job in jobs:
                job.future = loop.create_future()
            is_first = not self._jobs
            self._jobs.extend(jobs)
            self._n_waiting += n_rows
            # In between, a worker is already waiting for more requests, and waking it would only delay both threads.
            if is_first or not self._waiting_pays():
                self._ring()

    def close(self) -> None:
        """Refuse new requests, finish accepted ones, and end the workers."""
        with self._lock:
            self._closing = True
            for bell in self._bells:
                bell.notify()
        for worker in self._workers:
            worker.join()
        self._afterwards.put(None)
        self._follower.join()

    def _work(self, number: int, run: Run) -> None:
        while True:
            batch, alone = self._next_batch(number)
            if not batch:
                return
            self._run_batch(run, batch, alone=alone)
            with self._lock:
                self._n_free += 1

    def _ring(self) -> None:
        if True in self._resting:
            self._bells[self._resting.index(True)].notify()

    def _rest(self, number: int, seconds: float | None = None) -> None:
        self._resting[number] = True
        self._bells[number].wait(seconds)
        self._resting[number] = False

    def _next_batch(self, number: int) -> tuple[list[Job], bool]:
        """Wait for jobs and return those that share a batch, none at the end, and whether no others wait."""
        free_since = time.monotonic()
        with self._lock:
            while True:
                self._drop_given_up()
                if not self._jobs:
                    if self._closing:
                        return [], False
                    self._rest(number)
                elif (left := self._time_left(free_since)) > 0:
                    self._rest(number, left)
                else:
                    break
            self._crowd = (
                self._crowd + self._n_waiting + self._n_running
            ) / 2  # the average forgets absent clients quickly
            jobs = self._take()
            alone = len(jobs) == 1 and not (self._jobs or self._n_running or self._n_arriving)
            self._n_running += sum(map(len, jobs))
            self._n_free -= 1
            if self._jobs:
                self._ring()
            return jobs, alone

    def _time_left(self, free_since: float) -> float:
        """Return how many more seconds a worker that became idle then may wait for more jobs."""
        if self._closing or not self._waiting_pays():
            return 0.0
        return max(self._jobs[0].since, free_since) + self._max_wait - time.monotonic()

    def _waiting_pays(self) -> bool:
        """Return whether more jobs are expected, and fewer are waiting than one worker's share of the concurrent ones."""
        here = self._n_waiting + self._n_running
        self._crowd = max(self._crowd, here + self._n_arriving)
        part = min(self._max_batch, self._crowd / len(self._workers))
        return self._n_waiting < part and (self._n_arriving > 0 or here < int(self._crowd))

    def _drop_given_up(self) -> None:
        kept = [job for job in self._jobs if not job.given_up]
        self.n_given_up += len(self._jobs) - len(kept)
        self._jobs = deque(kept)
        self._n_waiting = sum(map(len, kept))

    def _take(self) -> list[Job]:
        taken: list[Job] = []
        rest: deque[Job] = deque()
        part = max(SMALL, math.ceil(self._n_waiting / self._n_free))  # leaves jobs for the other idle workers
        room = min(self._max_batch, part)
        for job in self._jobs:
            if not taken or (len(job) <= room and job.fits_with(taken[0])):
                taken.append(job)
                room -= len(job)
            else:
                rest.append(job)
        self._jobs = rest
        self._n_waiting = sum(map(len, rest))
        return taken

    def _run_batch(self, run: Run, jobs: list[Job], *, alone: bool) -> None:
        n_rows = sum(map(len, jobs))
        begin = time.monotonic()
        try:
            inputs = jobs[0].inputs if len(jobs) == 1 else torch.cat([job.inputs for job in jobs])
            shared = run(inputs, _explained_rows(jobs), alone=alone)
        except Exception as error:  # noqa: BLE001 - one request's fault must not end the worker
            if len(jobs) > 1:  # one request is at fault; the others are run separately
                for job in jobs:
                    self._run_batch(run, [job], alone=False)
            else:
                self._end(n_rows)
                _deliver(jobs, [error])
            return
        self._end(n_rows)
        self._seconds_per_row = (time.monotonic() - begin) / n_rows / len(self._workers)
        _deliver(jobs, _share(jobs, shared))
        if all(job.watched for job in jobs):
            self._afterwards.put((inputs, shared))
        elif any(job.watched for job in jobs):
            rows = torch.cat([torch.full((len(job),), job.watched) for job in jobs])
            self._afterwards.put((inputs[rows], shared.of(rows)))

    def _follow(self) -> None:
        torch.set_num_threads(1)  # of this thread: the others are the workers'
        while (item := self._afterwards.get()) is not None:
            if self._after is None:
                continue
            try:
                self._after(*item)
            except Exception:
                log.exception("The monitor failed on a batch.")

    def _end(self, n_rows: int) -> None:
        """Count a pass as finished before its answers are sent: their clients may send new requests at once."""
        with self._lock:
            self._n_running -= n_rows
            self.n_passes += 1
            self.n_rows += n_rows


def _explained_rows(jobs: Sequence[Job]) -> Tensor:
    rows: list[int] = []
    start = 0
    for job in jobs:
        rows.extend(range(start, start + len(job)) if job.explain else ())
        start += len(job)
    return torch.tensor(rows, dtype=torch.long)


def _share(jobs: Sequence[Job], shared: Pass) -> list[Answer | BaseException]:
    answers: list[Answer | BaseException] = []
    row = explained = 0
    for job in jobs:
        n_explained = len(job) if job.explain else 0
        rows = slice(row, row + len(job))
        answers.append(Answer(shared, rows, slice(explained, explained + n_explained)))
        row, explained = row + len(job), explained + n_explained
    return answers


def _deliver(jobs: Sequence[Job], answers: Sequence[Answer | BaseException]) -> None:
    """Hand the answers to the event loop, in one step."""

    def set_all() -> None:
        for job, answer in zip(jobs, answers, strict=True):
            if job.future is None or job.future.done():
                continue
            if isinstance(answer, BaseException):
                job.future.set_exception(answer)
            else:
                job.future.set_result(answer)

    futures = [job.future for job in jobs if job.future is not None]
    if futures:
        try:
            futures[0].get_loop().call_soon_threadsafe(set_all)
        except RuntimeError:  # the event loop has ended: no client is waiting
            log.info("An answer came after the end.")
