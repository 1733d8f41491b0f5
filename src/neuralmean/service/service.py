"""The detector with everything that serves it: built from settings, started, used by the routes, shut down."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.detector.groups import refuse_labels
from neuralmean.monitor.monitor import Monitor
from neuralmean.service.batching import Batcher
from neuralmean.service.bodies import BodyReader, within
from neuralmean.service.freezing import NAME, Freezing
from neuralmean.service.history import N_PICTURES, History
from neuralmean.service.live import Live
from neuralmean.service.passes import run_pass
from neuralmean.service.protocol import VERSION, InputSpec
from neuralmean.service.refusal import Refusal, busy
from neuralmean.service.settings import Settings
from neuralmean.service.workers import Runner, make_runners, on_own_thread

T = TypeVar("T")


class Companion(Protocol):
    """Something that starts once the worker runs and stops before it ends."""

    async def start(self) -> None:
        """Begin."""

    async def stop(self) -> None:
        """Stop, after accepted requests are finished."""


class Service:
    """A detector with everything that serves it."""

    def __init__(
        self,
        detector: Detector,
        preprocessing: Preprocessing | None,
        *,
        name: str,
        settings: Settings,
        monitor: Monitor | None,
    ) -> None:
        refuse_labels(detector.learnt.grouped_by, "the service")
        self.detector = detector
        self.preprocessing = preprocessing
        self.name = name
        self.settings = settings
        self.spec = InputSpec(_input_shape(preprocessing), settings.max_batch)
        self.batcher: Batcher | None = None
        self.output_shape: tuple[int, ...] | None = None
        self.reader = BodyReader(settings, self.aside)
        self.live = Live(
            monitor or _open_monitor(detector, settings),
            preprocessing,
            n_flagged=settings.n_flagged if settings.thumbnails else 0,
            state=settings.state,
            history=_open_history(settings),
        )
        self._decoders: ThreadPoolExecutor | None = None
        self._watchers: ThreadPoolExecutor | None = None
        self.thread_ids: set[int] = set()  # of the threads that worked here, as the system numbers them
        self.companions: list[Companion] = []  # run as long as the worker does: gRPC, telemetry

    @asynccontextmanager
    async def running(self, _: Any = None) -> AsyncIterator[None]:
        """Run the workers; at the end finish accepted requests and save the monitor's state."""
        n_threads = torch.get_num_threads()
        example = None if self.preprocessing is None else self.preprocessing.example()
        runners = await asyncio.to_thread(on_own_thread, lambda: self._warm_up(example, n_threads))
        decoders = self._decoders = ThreadPoolExecutor(2, thread_name_prefix="neuralmean-decode")
        watchers = self._watchers = ThreadPoolExecutor(1, thread_name_prefix="neuralmean-watch")
        self.batcher = Batcher(
            runners,
            max_batch=self.settings.max_batch,
            max_wait_ms=self.settings.max_wait_ms,
            queue=self.settings.queue,
            after=self.live.take,
        )
        freezing = Freezing(self.detector, runners, example) if self.settings.freeze and example is not None else None
        saving = asyncio.create_task(self._save_now_and_then())
        started: list[Companion] = []
        try:
            for companion in self.companions:
                await companion.start()
                started.append(companion)
            yield
        finally:
            self.thread_ids |= _thread_ids()
            if freezing is not None:
                freezing.abandon()
            saving.cancel()
            for companion in reversed(started):
                await companion.stop()
            await asyncio.to_thread(self.batcher.close)
            self.batcher = None
            decoders.shutdown()
            watchers.shutdown()
            await asyncio.to_thread(self.live.save)
            if self.live.history is not None:
                await asyncio.to_thread(self.live.history.close)
            self.thread_ids |= _thread_ids()

    def _warm_up(self, example: torch.Tensor | None, n_threads: int) -> list[Runner]:
        """Run the model once if the size of its input is known, so that the first request is as fast as the next."""
        if example is None:
            return make_runners(self.detector, None, n_threads)
        output = run_pass(self.detector, example).output
        self.output_shape = None if output is None else tuple(output.shape[1:])
        return make_runners(self.detector, example, n_threads)

    async def _save_now_and_then(self) -> None:
        while self.settings.state is not None and self.settings.state_every_s:
            await asyncio.sleep(self.settings.state_every_s)
            await asyncio.to_thread(self.live.save)

    async def aside(self, work: Callable[[], T]) -> T:
        """Run slow work on a thread, within the time-out, so that others are answered meanwhile."""
        late = f"The server took longer than {self.settings.timeout_s:g} seconds to read the request. Try again later."
        try:
            return await within(
                self.settings.timeout_s, asyncio.get_running_loop().run_in_executor(self._decoders, work)
            )
        except (asyncio.TimeoutError, TimeoutError):
            raise busy(late, self.settings.timeout_s) from None

    async def watching(self, work: Callable[[], T]) -> T:
        """Query the monitor or the history, one query at a time, so that many do not slow other requests."""
        return await asyncio.get_running_loop().run_in_executor(self._watchers, work)

    def ready(self) -> Batcher:
        """Return the batcher, or refuse if it is not running."""
        if self.batcher is None:
            raise busy("The server is not ready. Try again later.", 1)
        return self.batcher

    def check_name(self, name: str, version: str) -> None:
        """Refuse unless this is the model's name."""
        if name != self.name or version != VERSION:
            raise Refusal(404, f"Expected the model {self.name!r} (version {VERSION}), but got {name[:80]!r}.")


def _thread_ids() -> set[int]:
    # Of our own: others may never end, and nobody waits for a compilation.
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(("neuralmean", "asyncio"))]
    threads = [thread for thread in ours if thread.name != NAME]
    return {thread.native_id for thread in threads if thread.native_id is not None}


def _input_shape(preprocessing: Preprocessing | None) -> tuple[int | None, ...] | None:
    if preprocessing is None:
        return None
    return (preprocessing.channels, *(preprocessing.size or (None, None)))


def _open_monitor(detector: Detector, settings: Settings) -> Monitor:
    if settings.state is not None and Path(settings.state).exists():
        return Monitor.load(settings.state, detector)
    options: dict[str, Any] = {"every": settings.every, "follow": settings.follow}
    return Monitor(detector, window=settings.window, false_alarm_rate=settings.drift_rate, **options)


def _open_history(settings: Settings) -> History | None:
    if settings.history is None:
        return None
    n_pictures = N_PICTURES if settings.thumbnails else 0
    return History(
        settings.history, days=settings.history_days, max_bytes=settings.history_bytes, n_pictures=n_pictures
    )
