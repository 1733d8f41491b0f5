"""Runs a job over chunks, here or on Ray, and returns the results in the order of the chunks.

Ray starts and places the workers and moves bytes; the chunks are assigned here, so that the death of a worker or a
node costs only its current chunks: they are given to others, and each result is taken exactly once. No chunk
waits for a worker that has not started yet. Independent of what a job does.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from neuralmean.errors import InputError, NeuralMeanError
from neuralmean.jobs.cluster.chunks import Chunk
from neuralmean.jobs.cluster.extras import import_extra
from neuralmean.jobs.cluster.jobs import Job

MAX_ATTEMPTS = 10
CAREFUL_FROM = 2  # deaths of a worker on the same chunk after which its images are decoded in another process
_PER_WORKER = 2  # chunks assigned to a worker: one running, one waiting, so that none is idle
_AHEAD = 16  # chunks per worker that may be finished before an earlier one
_MIN_STORE = 256 * 2**20


@dataclass(frozen=True)
class Cluster:
    """Where the work runs.

    Attributes:
        address: An existing Ray cluster (`"auto"`, `"ray://host:10001"`); None starts one on this machine for the duration
            of the work, unless Ray is already running in this process.
        workers: Number of workers; None fills the cluster, 0 works in this process, without Ray.
        threads: Threads and CPUs of each worker.
        gpus: GPUs of each worker, also less than 1; with any the model runs on it.
    """

    address: str | None = None
    workers: int | None = None
    threads: int = 1
    gpus: float = 0.0

    def __post_init__(self) -> None:
        for name, value, least in (("workers", self.workers, 0), ("threads", self.threads, 1)):
            if name == "workers" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"Expected `{name}` to be an integer of at least {least}, but got {value!r}.")
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, (int, float)) or not 0 <= self.gpus < 1e3:
            raise InputError(f"Expected `gpus` to be a number of GPUs for each worker, but got {self.gpus!r}.")


class Engine:
    """Runs jobs with one model; used as a context manager, in which workers are started once and at the first job.

    Args:
        model: The model; sent to each worker once.
        cluster: Where the work runs.
        spare_cpus: CPUs to leave for the producer of the chunks.
    """

    def __init__(self, model: nn.Module, cluster: Cluster, *, spare_cpus: int = 0) -> None:
        self._model, self._cluster, self._spare_cpus = model, cluster, spare_cpus
        self._team: _Team | None = None
        self._started_ray = False

    def __enter__(self) -> Self:
        if self._cluster.workers != 0:
            self._started_ray = _connect(self._cluster, self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._team is not None:
            self._team.close()
        if self._started_ray:
            import_extra("ray").shutdown()

    def run(self, job: Job, chunks: Iterable[Chunk]) -> Iterator[tuple[Chunk, Any]]:
        """Yield every chunk with its result, in order; chunks are read as workers become free."""
        if self._cluster.workers == 0:
            with _threads(self._cluster.threads):
                job.set_up(self._model)
                for chunk in chunks:
                    yield chunk, job.run(chunk)
            return
        if self._team is None:
            self._team = _Team(self._model, self._cluster, self._spare_cpus)
        yield from self._team.run(job, iter(chunks))


def _connect(cluster: Cluster, model: nn.Module) -> bool:
    """Connect this process to Ray; return whether it was not connected before."""
    ray = import_extra("ray")
    if ray.is_initialized():
        return False
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if cluster.address is None:
        size = sum(tensor.nbytes for tensor in model.state_dict().values() if isinstance(tensor, torch.Tensor))
        options |= {"object_store_memory": max(_MIN_STORE, 3 * size), "include_dashboard": False}
        if cluster.workers is not None:
            options["num_cpus"] = cluster.workers * cluster.threads
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Ray warns about its own future changes
            ray.init(address=cluster.address or "local", **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"Expected a Ray cluster at {cluster.address or 'this machine'!r}, but it cannot be reached: {error}. If "
            "it asks for a token, as clusters of Ray 2.59 and later do, RAY_AUTH_MODE=token must be set here too."
        ) from error
    return True


@contextmanager
def _threads(threads: int) -> Generator[None]:
    """Set the number of threads, which can change the last bits of a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Worker:
    """The actor: holds the model and the current job, runs one chunk at a time."""

    def __init__(self, model: nn.Module, threads: int, on_gpu: bool) -> None:
        torch.set_num_threads(threads)
        self._model, self._on_gpu = model, on_gpu
        self._job: Job | None = None
        self._number = -1

    def ready(self) -> bool:
        """Load the model; an error here is returned unchanged, unlike one in the constructor."""
        on_gpu = self._on_gpu and torch.cuda.is_available()
        if on_gpu:
            self._model = self._model.to("cuda")
        return on_gpu

    def run(self, number: int, job: list[Any], chunk: Chunk, careful: bool) -> Any:
        """Run one chunk of the job with this number, which is fetched if it is new."""
        if self._job is None or number != self._number:
            fetched: Job = import_extra("ray").get(job[0])
            fetched.set_up(self._model)
            self._job, self._number = fetched, number
        return self._job.run(chunk, careful=careful)


@dataclass
class _Member:
    """A worker as the driver sees it."""

    actor: Any
    busy: list[Any] = field(default_factory=list)  # references to its pending results


class _Team:
    """All workers and their assignments."""

    def __init__(self, model: nn.Module, cluster: Cluster, spare_cpus: int) -> None:
        self._ray = import_extra("ray")
        self._size = _room(self._ray, cluster, spare_cpus)
        self._kind = self._ray.remote(
            num_cpus=cluster.threads, num_gpus=cluster.gpus, max_restarts=0, max_task_retries=0
        )(Worker)
        self._arguments = (self._ray.put(model), cluster.threads, cluster.gpus > 0)
        self._number, self._job = -1, [None]
        self._starting: dict[Any, _Member] = {}  # by the reference that resolves when it has started
        self._ready: list[_Member] = []
        self._work: dict[Any, tuple[_Member, Chunk]] = {}  # by the reference of the result
        self._again: deque[Chunk] = deque()
        self._deaths: dict[int, int] = {}  # deaths of workers, by the number of their chunk
        self._failed_starts = 0
        for _ in range(self._size):
            self._hire()

    def run(self, job: Job, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Any]]:
        """Yield chunks with their results, in order."""
        self._begin(job)
        order: deque[Chunk] = deque()
        results: dict[int, Any] = {}
        more = True
        while True:
            while more and len(order) < self._size * _AHEAD and self._free() is not None and not self._again:
                chunk = next(chunks, None)
                more = chunk is not None
                if chunk is not None:
                    order.append(chunk)
                    self._give(chunk)
            while self._again and self._free() is not None:
                self._give(self._again.popleft())
            while order and order[0].number in results:
                chunk = order.popleft()
                yield chunk, results.pop(chunk.number)
            if not order and not more:
                return
            self._wait(results)

    def _begin(self, job: Job) -> None:
        """Drop an earlier job, also an unfinished one."""
        for member, _ in [*self._work.values()]:
            self._bury(member)
        self._work, self._again, self._deaths = {}, deque(), {}
        # Inside a list it is sent as a reference, which only a worker without the job fetches.
        self._number, self._job = self._number + 1, [self._ray.put(job)]

    def close(self) -> None:
        """End every worker."""
        for member in (*self._starting.values(), *self._ready):
            self._dismiss(member)
        self._starting, self._ready, self._work = {}, [], {}

    def _hire(self) -> None:
        actor = self._kind.remote(*self._arguments)
        self._starting[actor.ready.remote()] = _Member(actor)

    def _dismiss(self, member: _Member) -> None:
        with suppress(Exception):
            self._ray.kill(member.actor)

    def _free(self) -> _Member | None:
        """Return the least busy worker, if it can take another chunk."""
        member = min(self._ready, key=lambda one: len(one.busy), default=None)
        return member if member is not None and len(member.busy) < _PER_WORKER else None

    def _give(self, chunk: Chunk) -> None:
        member = self._free()
        if member is None:
            self._again.append(chunk)
            return
        careful = self._deaths.get(chunk.number, 0) >= CAREFUL_FROM
        result = member.actor.run.remote(self._number, self._job, chunk, careful)
        member.busy.append(result)
        self._work[result] = (member, chunk)

    def _wait(self, results: dict[int, Any]) -> None:
        """Wait for the next event and handle it."""
        done, _ = self._ray.wait([*self._work, *self._starting], num_returns=1, timeout=None)
        for reference in done:
            if reference in self._starting:
                self._take_up(reference)
            elif reference in self._work:
                self._take_result(reference, results)

    def _take_up(self, reference: Any) -> None:
        member = self._starting.pop(reference)
        try:
            self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise _cause_of(error) from error
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError) as error:
            self._failed_starts += 1
            if self._failed_starts > MAX_ATTEMPTS:
                raise NeuralMeanError(
                    f"Expected workers that start, but {self._failed_starts} of them did not: {error}. Is neuralmean, and "
                    "the code of the model, installed on every node?"
                ) from error
            self._hire()
            return
        self._failed_starts = 0
        self._ready.append(member)

    def _take_result(self, reference: Any, results: dict[int, Any]) -> None:
        member, chunk = self._work.pop(reference)
        member.busy.remove(reference)
        try:
            results[chunk.number] = self._ray.get(reference)
            self._deaths.pop(chunk.number, None)
        except self._ray.exceptions.RayTaskError as error:
            raise _cause_of(error) from error
        except (
            self._ray.exceptions.RayActorError,
            self._ray.exceptions.ObjectLostError,
            self._ray.exceptions.OutOfMemoryError,  # of a worker that Ray killed for the memory it took
        ) as error:
            self._bury(member)
            self._count_death(chunk, error)
            self._again.append(chunk)

    def _bury(self, member: _Member) -> None:
        """Replace a worker that is dead or unreachable, once."""
        if member in self._ready:
            self._ready.remove(member)
            self._dismiss(member)
            self._hire()

    def _count_death(self, chunk: Chunk, error: Exception) -> None:
        deaths = self._deaths[chunk.number] = self._deaths.get(chunk.number, 0) + 1
        if deaths >= MAX_ATTEMPTS:
            raise NeuralMeanError(
                f"Expected chunk {chunk.number} to be done, but {deaths} workers died with it: {error}. If they ran out of "
                "memory, use fewer workers or a smaller `batch_size`."
            ) from error


def _room(ray: Any, cluster: Cluster, spare_cpus: int) -> int:
    """Return the number of workers to start."""
    total = ray.cluster_resources()
    cpus = int((total.get("CPU", 0) - spare_cpus) // cluster.threads)
    room = cpus if not cluster.gpus else min(cpus, int(total.get("GPU", 0) / cluster.gpus))
    workers = room if cluster.workers is None else cluster.workers
    # A cluster that grows on demand may have no room yet; but a dataset would wait forever for a CPU that workers hold.
    if (cluster.workers is None and room < 1) or (spare_cpus and workers > room):
        wanted = f"{max(workers, 1)} worker(s) of {cluster.threads} CPU(s) and {cluster.gpus:g} GPU(s)"
        spare = f", and {spare_cpus} CPU for the dataset" if spare_cpus else ""
        raise InputError(
            f"Expected a cluster with room for {wanted}{spare}, but it has {total.get('CPU', 0):g} CPU(s) and "
            f"{total.get('GPU', 0):g} GPU(s). Ask for fewer `workers`."
        )
    return workers


def _cause_of(error: BaseException) -> BaseException:
    """Return the error that was raised in a worker, without Ray's wrapping."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error
