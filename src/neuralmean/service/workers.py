"""How passes share the cores: how many run at a time, with how many threads of torch, and on which copy of the model.

Several passes of one thread each do more than one pass of many threads: nothing waits at a barrier, which costs most where
others use the cores too. A pass that runs alone gets all threads, if that makes it faster. Where the model is a fixed graph it
is run as one, without Python between the layers. No batching and no HTTP in here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
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
"""How many times faster all threads must be than one: what they gain on an idle machine they lose on a busy one."""

CHANNELS_LAST_FROM = 8
"""Rows from which on the other layout pays; below, an input is laid out as in a direct call."""

T = TypeVar("T")


@dataclass(frozen=True)
class Threads:
    """Threads of torch for a pass that runs alone, and for each of several that run at a time."""

    alone: int
    together: int


class Runner:
    """Runs the passes of one worker, all on one thread.

    Args:
        detector: The worker's own.
        threads: How many threads a pass uses.
    """

    def __init__(self, detector: Detector, threads: Threads) -> None:
        self._detector = detector
        self._threads = threads
        self._channels_last = prefers_channels_last(detector.model)

    def freeze(self, like: Detector) -> None:
        """Run later passes on the graphs of a frozen detector of the same weights."""
        self._detector.freeze(like=like)

    def __call__(self, inputs: Tensor, explain: Tensor | None = None, *, alone: bool) -> Pass:
        """Run a batch; `explain` holds the rows to explain, `alone` says that nothing else runs or waits."""
        _use_threads(self._threads.alone if alone else self._threads.together)
        if self._channels_last and inputs.dim() == 4 and len(inputs) >= CHANNELS_LAST_FROM:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return run_pass(self._detector, inputs, explain)


def make_runners(detector: Detector, example: Tensor | None, n_threads: int) -> list[Runner]:
    """Return the passes of the workers that serve a detector.

    Args:
        detector: What is served; the first worker's own, the others have twins.
        example: One input, to make a graph of the model and to find out how many threads are best; None does neither, unless
            the detector is frozen.
        n_threads: How many threads there are.
    """
    n_workers = min(n_threads, MOST_WORKERS)
    if is_compiled(detector.model) or device_of(unwrap(detector.model).modules()).type != "cpu":
        n_workers = 1  # these passes take turns anyway
    detectors = [detector]
    try:
        detectors += [twin(detector) for _ in range(n_workers - 1)]
    except Exception as error:  # noqa: BLE001 - whatever a model or scorer raises that cannot be copied
        log.info("Passes run one at a time, as the model cannot be copied: %s", error)
    threads = Threads(alone=n_threads, together=max(1, n_threads // len(detectors)))
    if example is not None and threads.together < n_threads:
        threads = Threads(_best_threads(detector, example, threads), threads.together)
    # Only the first ever uses all threads. As long as the OpenMP threads of two live, there are more than cores.
    apart = Threads(threads.together, threads.together)
    return [Runner(own, apart if number else threads) for number, own in enumerate(detectors)]


def twin(detector: Detector) -> Detector:
    """Return a detector whose model shares every tensor with that of `detector`, but no module."""
    return from_artefact(Detector, to_artefact(detector), shared_copy(detector.model), "the twin")


def prefers_channels_last(model: nn.Module) -> bool:
    """Tell whether images should come with their channels last in memory, as convolutions on a CPU want them.

    Example:
        >>> prefers_channels_last(nn.Conv2d(3, 4, 3)), prefers_channels_last(nn.Linear(3, 4))
        (True, False)
    """
    core = unwrap(model)
    return device_of(core.modules()).type == "cpu" and any(isinstance(module, nn.Conv2d) for module in core.modules())


def on_own_thread(function: Callable[[], T]) -> T:
    """Call a function on a thread that ends with it, and takes its OpenMP threads along.

    As long as the OpenMP threads of two threads live, there are more than cores, and each falls asleep wherever it waits
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
    """Let this thread use so many; threads that use torch for the first time later begin with the same number."""
    if torch.get_num_threads() != n_threads:
        torch.set_num_threads(n_threads)
