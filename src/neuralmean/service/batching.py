"""Requests that come at the same time share forward passes.

One worker thread runs the passes. A request that finds the worker idle runs at once; under load requests wait for each
other up to a bound. The queue is bounded in inputs and refuses at once when full. A request that is given up before its
pass begins does not run. `close` finishes what was accepted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.service.passes import Pass
from neuralmean.service.refusal import busy

log = logging.getLogger("neuralmean.service")

Run = Callable[[Tensor, Tensor], Pass]
"""Runs a batch of inputs and explains the rows whose indices the second argument holds."""


class ClientGoneError(Exception):
    """The client has gone before its answer came."""


@dataclass
class Answer:
    """What one job gets: the pass that it shared, and which rows are its own."""

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
    since: float = field(default_factory=time.monotonic)
    future: asyncio.Future[Answer] | None = None
    given_up: bool = False

    def __len__(self) -> int:
        return len(self.inputs)

    def fits_with(self, other: Job) -> bool:
        """Whether the two can be one batch."""
        return self.inputs.shape[1:] == other.inputs.shape[1:] and self.inputs.dtype == other.inputs.dtype


class Batcher:
    """Runs jobs from an event loop on one worker thread, many at a time.

    Args:
        run: The forward pass.
        max_batch: Most rows of a batch.
        max_wait_ms: Longest time to wait for company, under load.
        queue: Most rows that wait.
        after: Called on the worker thread with each batch's inputs and pass, after the answers are on their way.
    """

    def __init__(
        self,
        run: Run,
        *,
        max_batch: int,
        max_wait_ms: float,
        queue: int,
        after: Callable[[Tensor, Pass], None] | None = None,
    ) -> None:
        self._run = run
        self._max_batch = max_batch
        self._max_wait = max_wait_ms / 1000
        self._max_queue = queue
        self._after = after
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._n_waiting = 0
        self._n_arriving = 0
        self._last_rows = 0
        self._seconds_per_row = 0.01
        self._closing = False
        self.n_passes = self.n_rows = self.n_refused = self.n_given_up = 0
        self._worker = threading.Thread(target=self._work, name="neuralmean-worker", daemon=True)
        self._worker.start()

    @property
    def n_waiting(self) -> int:
        """Rows that wait."""
        return self._n_waiting

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Tell the worker, while a request is being read, that it is worth waiting for a moment."""
        self._n_arriving += 1
        try:
            yield
        finally:
            self._n_arriving -= 1

    async def submit(
        self, jobs: Sequence[Job], *, timeout: float, gone: Callable[[], Awaitable[None]] | None = None
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
        self._accept(jobs, asyncio.get_running_loop())
        answers = asyncio.gather(*(job.future for job in jobs if job.future is not None))
        watch = None if gone is None else asyncio.ensure_future(gone())
        try:
            watched: list[asyncio.Future[Any]] = [answers] if watch is None else [answers, watch]
            done, _ = await asyncio.wait(watched, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if answers in done:
                return answers.result()
            if watch in done:
                raise ClientGoneError
            raise busy(f"The answer took longer than {timeout:g} seconds. Try again later.", timeout)
        finally:
            if watch is not None:
                watch.cancel()
            answers.cancel()
            for job in jobs:  # also when this call itself was cancelled
                job.given_up = job.future is None or job.future.cancelled()

    def _accept(self, jobs: Sequence[Job], loop: asyncio.AbstractEventLoop) -> None:
        n_rows = sum(map(len, jobs))
        with self._changed:
            if self._closing:
                raise busy("The server is shutting down. Try again later.", 1)
            if self._n_waiting + n_rows > self._max_queue:
                self._drop_given_up()
            if self._n_waiting + n_rows > self._max_queue:
                self.n_refused += 1
                raise busy("The server has too much to do. Try again later.", self._n_waiting * self._seconds_per_row)
            for job in jobs:
                job.future = loop.create_future()
            self._jobs.extend(jobs)
            self._n_waiting += n_rows
            self._changed.notify()

    def close(self) -> None:
        """Refuse what comes from now on, finish what was accepted, and end the worker."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._worker.join()

    def _work(self) -> None:
        while True:
            batch = self._next_batch()
            if batch is None:
                return
            self._run_batch(batch)

    def _next_batch(self) -> list[Job] | None:
        """Wait for work and return jobs that fit together; None at the end."""
        with self._changed:
            while True:
                while not self._jobs and not self._closing:
                    self._changed.wait()
                self._drop_given_up()
                if self._jobs:
                    break
                if self._closing:
                    return None
            deadline = self._jobs[0].since + self._max_wait
            while self._n_waiting < self._max_batch and self._company_is_near() and not self._closing:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            self._drop_given_up()
            return self._take()

    def _company_is_near(self) -> bool:
        return self._n_arriving > 0 or self._last_rows > 1

    def _drop_given_up(self) -> None:
        kept = [job for job in self._jobs if not job.given_up]
        self.n_given_up += len(self._jobs) - len(kept)
        self._jobs = deque(kept)
        self._n_waiting = sum(map(len, kept))

    def _take(self) -> list[Job]:
        taken: list[Job] = []
        rest: deque[Job] = deque()
        room = self._max_batch
        for job in self._jobs:
            if len(job) <= room and (not taken or job.fits_with(taken[0])):
                taken.append(job)
                room -= len(job)
            else:
                rest.append(job)
        self._jobs = rest
        self._n_waiting = sum(map(len, rest))
        return taken

    def _run_batch(self, jobs: list[Job]) -> None:
        n_rows = sum(map(len, jobs))
        self._last_rows = n_rows
        if not jobs:
            return
        begin = time.monotonic()
        try:
            inputs = jobs[0].inputs if len(jobs) == 1 else torch.cat([job.inputs for job in jobs])
            shared = self._run(inputs, _explained_rows(jobs))
        except Exception as error:  # noqa: BLE001 - one request's fault must not end the worker
            if len(jobs) > 1:  # one of them is at fault, the others must not suffer
                for job in jobs:
                    self._run_batch([job])
            else:
                _deliver(jobs, [error])
            return
        self._seconds_per_row = (time.monotonic() - begin) / n_rows
        self.n_passes += 1
        self.n_rows += n_rows
        _deliver(jobs, _share(jobs, shared))
        if self._after is not None:
            try:
                self._after(inputs, shared)
            except Exception:
                log.exception("The monitor could not take a batch in.")


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
        except RuntimeError:  # the event loop has ended: nobody waits any more
            log.info("An answer came after the end.")
