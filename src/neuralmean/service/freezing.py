"""The compiled graph of a served model: made and checked in the background, while the model itself answers."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence

from torch import Tensor

from neuralmean.detector.detector import Detector
from neuralmean.service.workers import Runner, twin

log = logging.getLogger("neuralmean.service")

NICE = 10
"""Niceness of the compiler's thread, on systems that have it."""


def freeze_later(detector: Detector, runners: Sequence[Runner], example: Tensor) -> threading.Thread:
    """Begin to compile a detector's model; the workers use the graph as soon as it is there and checked.

    If there is no graph (a dynamic model, early exits, a GPU, no compiler), a line in the log says why, and the model
    keeps answering.

    Args:
        detector: The served detector.
        runners: The passes of the workers.
        example: One input.
    """
    # It ends with the server: a running compilation is abandoned.
    thread = threading.Thread(target=_freeze, args=(detector, runners, example), name="neuralmean-freeze", daemon=True)
    thread.start()
    return thread


def _freeze(detector: Detector, runners: Sequence[Runner], example: Tensor) -> None:
    if sys.platform == "linux":  # of this thread only; the compiler inherits it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    try:
        frozen = twin(detector).freeze(example)  # a separate detector, so that checks do not disturb the served one
        for runner in runners:
            runner.freeze(frozen)
    except Exception as error:  # noqa: BLE001 - the model answers anyway
        log.info("The model runs without compilation: %s", error)
    else:
        log.info("The model runs as a compiled graph from now on.")
