"""The compiled graph of a served model: made and checked in the background, while the model itself answers."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from torch import Tensor

from neuralmean.detector.detector import Detector
from neuralmean.recording.graph.compiled import abandoned
from neuralmean.service.workers import Runner, freeze_runners, twin

log = logging.getLogger("neuralmean.service")

NAME = "neuralmean-freeze"


class Freezing:
    """A thread that compiles a detector's model; the workers use the graph as soon as it is there and checked.

    If there is no graph (a dynamic model, early exits, a GPU, no compiler), a line in the log says why, and the model
    keeps answering.

    Args:
        detector: The served detector.
        runners: The passes of the workers.
        example: One input.
    """

    def __init__(self, detector: Detector, runners: Sequence[Runner], example: Tensor) -> None:
        self._abandoned = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(detector, runners, example), name=NAME, daemon=True)
        # Python ends threads wherever they are, and C++ aborts the process if that is inside of it.
        atexit.register(self.join)
        self._thread.start()

    def abandon(self) -> None:
        """End as soon as possible: the compiler at once, torch's capture of the model after its current step."""
        self._abandoned.set()

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join()

    def _run(self, detector: Detector, runners: Sequence[Runner], example: Tensor) -> None:
        abandoned.set(self._abandoned)
        try:
            frozen = twin(detector).freeze(example)  # a separate detector, so that checks do not disturb the served one
            freeze_runners(runners, frozen)
        except Exception as error:  # noqa: BLE001 - the model answers anyway
            if self._abandoned.is_set():
                log.info("The compilation was stopped, because the server ends.")
            else:
                log.info("The model runs without compilation: %s", error)
        else:
            log.info("The model runs as a compiled graph from now on.")
        finally:
            atexit.unregister(self.join)


def leave(code: int = 0) -> NoReturn:
    """End this process without Python's clean-up, which takes many seconds on a busy machine: all is written by now.

    It also ends a compilation that was abandoned and whose current step goes on, which may take a minute.
    """
    for thread in threading.enumerate():
        if thread.name == NAME:
            thread.join(1)  # enough for the compiler to be ended and its files to be deleted
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads them, or they are closed
            stream.flush()
    os._exit(code)
