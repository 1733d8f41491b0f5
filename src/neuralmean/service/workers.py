"""Distributes passes over the cores: how many run at a time, with how many threads, and on which copy of the model.

Several single-threaded passes are faster than one pass of many threads: nothing waits at a barrier, which is most expensive if
other programs use the cores. A pass that runs alone gets all threads, if that makes it faster. A compiled graph runs one pass
at a time, with all threads, as torch holds Python's lock during it. No batching and no HTTP here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from neuralmean.detector.detector import Detector
from neuralmean.detector.saving import from_artefact, to_artefact
from neuralmean.models.execution import device_of, is_compiled, shared_copy
from neuralmean.models.layers import unwrap
from neuralmean.service.passes import Pass, run_pass

log = logging.getLogger("neuralmean.service")

MOST_WORKERS = 4
"""Each holds Python's lock while it goes from layer to layer, so that more of them get in each other's way."""
N_TIMED = 5
WORTH_IT = 1.1
"""Required speed-up of all threads over one: a gain on an idle machine is lost on a busy one."""

CHANNELS_LAST_FROM = 8
"""Minimum number of rows for the other layout; fewer keep the layout of a direct call."""

T = TypeVar("T")


@dataclass(frozen=True)
class Threads:
    """Threads of torch for a pass that runs alone, and for each of several that run at a time."""

    alone: int
    together: int


class Runner:
    """Runs the passes of one worker, all on one thread.

    Args:
        detector: The worker's own detector.
        threads: Number of threads of a pass.
    """

    def __init__(self, detector: Detector, threads: Threads) -> None:
        self._detector = detector
        self._threads = threads
        self._channels_last = prefers_channels_last(detector.model)
        self._lane: ThreadPoolExecutor | None = None  # the thread that runs the passes; None for the caller's own

    @property
    def threads(self) -> Threads:
        """Number of threads of a pass."""
        return self._threads

    def freeze(self, like: Detector, lane: ThreadPoolExecutor, threads: Threads) -> None:
        """Run later passes on the graphs of a frozen detector of the same weights, on the thread of `lane`."""
        self._detector.freeze(like=like)
        self._threads, self._lane = threads, lane

    def __call__(self, inputs: Tensor, explain: Tensor | None = None, *, alone: bool) -> Pass:
        """Run a batch; `explain` holds the rows to explain, `alone` says that nothing else runs or waits."""
        if self._lane is not None:
            return self._lane.submit(self._run, inputs, explain, alone).result()
        return self._run(inputs, explain, alone)

    def _run(self, inputs: Tensor, explain: Tensor | None, alone: bool) -> Pass:
        _use_threads(self._threads.alone if alone else self._threads.together)
        if self._channels_last and inputs.dim() == 4 and len(inputs) >= CHANNELS_LAST_FROM:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return run_pass(self._detector, inputs, explain)


def freeze_runners(runners: Sequence[Runner], frozen: Detector) -> None:
    """Let all workers run the graphs of a frozen detector, on one thread of their own that they share."""
    lane = ThreadPoolExecutor(1, thread_name_prefix="neuralmean-graph")
    threads = Threads(runners[0].threads.alone, sum(runner.threads.together for runner in runners))
    for runner in runners:
        runner.freeze(frozen, lane, threads)


def make_runners(detector: Detector, example: Tensor | None, n_threads: int) -> list[Runner]:
    """Return the passes of the workers that serve a detector.

    Args:
        detector: The served detector; the first worker uses it, the others use copies.
        example: One input, to compile the model and to measure how many threads are best; None does neither, unless
            the detector is frozen.
        n_threads: Number of available threads.
    """
    n_workers = min(n_threads, MOST_WORKERS)
    if is_compiled(detector.model) or device_of(unwrap(detector.model).modules()).type != "cpu":
        n_workers = 1  # these passes run in turn anyway
    detectors = [detector]
    try:
        detectors += [twin(detector) for _ in range(n_workers - 1)]
    except Exception as error:  # noqa: BLE001 - whatever a model or scorer raises that cannot be copied
        log.info("Passes run one at a time, because the model cannot be copied: %s", error)
    threads = Threads(alone=n_threads, together=max(1, n_threads // len(detectors)))
    if example is not None and threads.together < n_threads:
        threads = Threads(_best_threads(detector, example, threads), threads.together)
    # Only the first uses all threads: the OpenMP threads of two would be more than the cores.
    apart = Threads(threads.together, threads.together)
    return [Runner(own, apart if number else threads) for number, own in enumerate(detectors)]


def twin(detector: Detector) -> Detector:
    """Return a detector whose model shares every tensor with that of `detector`, but no module."""
    return from_artefact(Detector, to_artefact(detector), shared_copy(detector.model), "the twin")


def prefers_channels_last(model: nn.Module) -> bool:
    """Return whether images should be channels-last in memory, which is faster for convolutions on a CPU.

    Example:
        >>> prefers_channels_last(nn.Conv2d(3, 4, 3)), prefers_channels_last(nn.Linear(3, 4))
        (True, False)
    """
    core = unwrap(model)
    return device_of(core.modules()).type == "cpu" and any(isinstance(module, nn.Conv2d) for module in core.modules())


def on_own_thread(function: Callable[[], T]) -> T:
    """Call a function on a new thread, whose OpenMP threads end with it.

    With the OpenMP threads of two threads there are more threads than cores, and each sleeps wherever it waits
    for the others: passes then take three times as long.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="neuralmean-start") as executor:
        return executor.submit(function).result()


def _best_threads(detector: Detector, example: Tensor, threads: Threads) -> int:
    few = _seconds(Runner(detector, Threads(threads.together, threads.together)), example)
    many = _seconds(Runner(detector, threads), example)
    return threads.alone if few > WORTH_IT * many else threads.together


def _seconds(run: Runner, example: Tensor) -> float:
    times: list[float] = []
    run(example, alone=True)  # a graph is made ready by its first passes
    for _ in range(N_TIMED):
        begin = time.perf_counter()
        run(example, alone=True)
        times.append(time.perf_counter() - begin)
    return min(times)


def _use_threads(n_threads: int) -> None:
    """Set the number of threads of this thread; later threads that use torch for the first time inherit it."""
    if torch.get_num_threads() != n_threads:
        torch.set_num_threads(n_threads)
