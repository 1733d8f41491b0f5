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
"""How much the compiler gives way to the answers, where the system knows such a thing."""


def freeze_later(detector: Detector, runners: Sequence[Runner], example: Tensor) -> threading.Thread:
    """Begin to compile a detector's model; the workers use the graph as soon as it is there and checked.

    Where there is no graph (a model that is none, early exits, a GPU, no compiler), a line in the log says why, and the model
    goes on answering.

    Args:
        detector: What is served.
        runners: The passes of the workers.
        example: One input.
    """
    # It ends with the server: what is being compiled by then is given up.
    thread = threading.Thread(target=_freeze, args=(detector, runners, example), name="neuralmean-freeze", daemon=True)
    thread.start()
    return thread


def _freeze(detector: Detector, runners: Sequence[Runner], example: Tensor) -> None:
    if sys.platform == "linux":  # of this thread only; the compiler inherits it
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    try:
        frozen = twin(detector).freeze(example)  # of its own, so that nothing that is served is checked while it runs
        for runner in runners:
            runner.freeze(frozen)
    except Exception as error:  # noqa: BLE001 - the model answers anyway
        log.info("The model runs as it is, and not compiled: %s", error)
    else:
        log.info("The model runs as a compiled graph from now on.")
