"""Processes that decode while the model runs; answers are in the order of the tasks.

Workers are plain subprocesses that import numpy, Pillow and this package's decoder, but neither torch nor the caller's
script. They start in a fraction of a second, and a script needs no `if __name__ == "__main__"`. Only a few tasks are in
progress at a time, so memory does not grow with the number of files. If a hostile file crashes a worker, only that file
is lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from neuralmean.data.images.worker import Answer, Decoder, Task, read_frame, task_header, write_frame
from neuralmean.data.preprocessing import Preprocessing

__all__ = ["decode_in_order", "default_workers"]

CRASHED = "the decoder crashed on it"
_AHEAD = 2  # tasks in progress per worker, so that none waits for the consumer
_PACKAGE = Path(__file__).parents[2]
# The package's __init__ imports torch, which a decoder does not need; use an empty module instead.
_BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; import types; package = types.ModuleType('neuralmean'); "
    "package.__path__ = [sys.argv[1]]; sys.modules['neuralmean'] = package; "
    "from neuralmean.data.images.worker import main; main()"
)

_Frame = tuple[dict[str, Any], list[NDArray[np.uint8]]] | None


def default_workers() -> int:
    """Return the default number of decoding processes: one less than the number of cores, from 1 to 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores - 1))


def decode_in_order(
    tasks: Iterable[tuple[Task, bool]], preprocessing: Preprocessing, *, workers: int, max_pixels: int
) -> Iterator[tuple[Task, Answer]]:
    """Yield each task with its answer, in order, while the next tasks are in progress.

    Args:
        tasks: Tasks, each with whether it is worth a worker; the others run in this process. Read lazily.
        preprocessing: What to do to the images.
        workers: Number of processes; 0 decodes in this process.
        max_pixels: Reject larger images.
    """
    here = Decoder(preprocessing, max_pixels)
    team: list[_Worker] = []  # grows with the tasks, so that ten tasks start at most ten processes
    under_way: deque[tuple[Task, _Worker | None]] = deque()
    turn = 0
    try:
        for task, for_worker in tasks:
            if for_worker and len(team) < workers:
                team.append(_Worker(preprocessing, max_pixels, here))
            worker = team[turn % len(team)] if for_worker and team else None
            if worker is not None:
                worker.submit(task)
                turn += 1
            under_way.append((task, worker))
            if len(under_way) > _AHEAD * len(team):
                yield _finish(*under_way.popleft(), here)
        while under_way:
            yield _finish(*under_way.popleft(), here)
    finally:
        here.close()
        for worker in team:
            worker.close()


def _finish(task: Task, worker: _Worker | None, here: Decoder) -> tuple[Task, Answer]:
    return task, here.answer(task) if worker is None else worker.result()


class _Worker:
    """One process, started at the first task; answers are in the order of the tasks."""

    def __init__(self, preprocessing: Preprocessing, max_pixels: int, here: Decoder) -> None:
        self._setup = {"preprocessing": preprocessing.to_json(), "max_pixels": max_pixels}
        self._here = here
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: queue.SimpleQueue[_Frame] = queue.SimpleQueue()
        self._reader: threading.Thread | None = None
        self._ready = False
        self._usable = True
        self._pending: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        """Begin a task."""
        self._pending.append(task)
        if self._is_running():
            self._write(task_header(task))

    def result(self) -> Answer:
        """Return the answer to the oldest pending task."""
        task = self._pending.popleft()
        answer = self._receive()
        if answer is None:
            answer = self._one_by_one(task)
            if self._is_running():
                for later in self._pending:
                    self._write(task_header(later))
        return answer

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        if self._pending:
            process.kill()  # its answers are no longer needed
        with contextlib.suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        # The process exits at the end of its input, and its reader at the end of its answers.
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if self._reader is not None:
            self._reader.join()
        process.stdout.close()  # type: ignore[union-attr]

    def _one_by_one(self, task: Task) -> Answer:
        """Answer a task that crashed the process, by decoding its images one by one with a new process after each crash."""
        pixels: list[NDArray[np.uint8]] = []
        failures: dict[int, str] = {}
        for place, single in enumerate(task.split()):
            answer = self._alone(single)
            pixels.extend(answer.pixels)
            if answer.failures:
                failures[place] = answer.failures[0]
        return Answer(pixels, failures)

    def _alone(self, task: Task) -> Answer:
        if self._is_running():
            self._write(task_header(task))
        answer = self._receive()
        if answer is not None:
            return answer
        return Answer([], {0: CRASHED}) if self._usable else self._here.answer(task)

    def _is_running(self) -> bool:
        if self._process is None and self._usable:
            self._start()
        return self._process is not None

    def _start(self) -> None:
        paths = [entry for entry in sys.path if entry]
        single_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(_PACKAGE), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **single_thread},
            )
        except OSError:
            self._usable = False
            return
        self._ready = False
        self._frames = queue.SimpleQueue()
        # Without a reader thread, this process could block on writing a task while the worker blocks on writing an answer.
        self._reader = threading.Thread(target=_read_all, args=(self._process.stdout, self._frames), daemon=True)
        self._reader.start()
        self._write(self._setup)

    def _write(self, header: dict[str, Any]) -> None:
        # A dead process is detected when its answer is read.
        with contextlib.suppress(OSError):
            write_frame(self._process.stdin, header)  # type: ignore[union-attr, arg-type]

    def _receive(self) -> Answer | None:
        """Return the next answer; None if the process has died."""
        if self._process is None:
            return None
        frame = self._frames.get()
        if frame is not None and not self._ready:
            self._ready = True
            frame = self._frames.get()
        if frame is None:
            # A process that dies before its first answer would die again if restarted.
            self._usable = self._ready
            self._pending, pending = deque(), self._pending
            self.close()
            self._pending = pending
            return None
        header, pixels = frame
        return Answer(pixels, {int(place): str(reason) for place, reason in header["failures"]})


def _read_all(stream: IO[bytes], frames: queue.SimpleQueue[_Frame]) -> None:
    while True:
        try:
            frame = read_frame(stream)
        except (OSError, ValueError):
            frame = None
        frames.put(frame)
        if frame is None:
            return
