"""The operator's view: the latest items, the latest flagged inputs as thumbnails, and the monitor, all bounded."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import NeuralMeanError
from neuralmean.monitor.monitor import Monitor
from neuralmean.monitor.status import MonitorStatus
from neuralmean.service.history import History, HistoryRow
from neuralmean.service.passes import Pass

log = logging.getLogger("neuralmean.service")

N_ITEMS = 400
TEST_NAMES = {"items": "single inputs", "blocks": "the mean of many", "repeats": "repeats"}
SIDE = 96
N_SHOWN_LAYERS = 12
N_NAMED = 8  # layers in the log
N_LATEST = 8  # latest inputs in the log in addition to the window, which hides a recent change


@dataclass(frozen=True)
class Item:
    """One input that was scored."""

    number: int  # counted from 1
    time: float  # seconds since 1970
    score: float
    p_value: float
    is_ood: bool
    kind: str  # see `Decision.kind`
    predicted: int | None  # class, if the model has classes


class Live:
    """Records the watched inputs of every batch, on one thread; read by the page and by Prometheus, on other threads.

    Args:
        monitor: Watches the stream.
        preprocessing: To turn the model's inputs back into pictures; None shows no pictures.
        n_flagged: Number of flagged pictures that are kept; 0 keeps none.
        state: File of the monitor's state; None writes none.
        history: History of decisions and alarms; None keeps none.
    """

    def __init__(
        self,
        monitor: Monitor,
        preprocessing: Preprocessing | None,
        *,
        n_flagged: int,
        state: str | Path | None,
        history: History | None = None,
    ) -> None:
        self.monitor = monitor
        self.history = history
        self._preprocessing = preprocessing
        self._state = state
        self._lock = threading.Lock()
        self._number = 0
        self._saved = (-1, -1)
        self._drift_time: float | None = None  # of the alarm, if it went off since the start
        # Inputs during which the layers that moved are still determined.
        self._n_unnamed = monitor.window if monitor.drift else 0
        self._items: deque[Item] = deque(maxlen=N_ITEMS)
        self._flagged: deque[tuple[Item, NDArray[np.uint8]]] = deque(maxlen=n_flagged)

    def take(self, inputs: Tensor, shared: Pass) -> None:
        """Record a batch; one at a time."""
        was_on = self.monitor.drift
        is_on = self.monitor.update(shared.decision, vectors=shared.vectors)
        items = _items_of(shared, self._number, time.time())
        keep = self._flagged.maxlen or 0
        flagged = [(item, row) for row, item in enumerate(items) if item.is_ood][-keep:] if keep else []
        if is_on and not was_on and keep:
            flagged = sorted({*flagged, *self._examples_in(items)}, key=lambda pair: pair[1])
        pictures = [(item, picture) for item, row in flagged if (picture := self._picture(inputs[row])) is not None]
        with self._lock:
            self._number += len(items)
            self._items.extend(items)
            self._flagged.extend(pictures)
        if self.history is not None:
            rows = [HistoryRow(*astuple(item)) for item in items]
            self.history.add(rows, [(item.number, _png(picture)) for item, picture in pictures])
        if is_on:
            self._tell_of_alarm(is_new=not was_on)

    def _examples_in(self, items: list[Item]) -> list[tuple[Item, int]]:
        """Return the examples of the alarm that are among these items, which came last, each with its row."""
        status = self.monitor.status()
        first = status.n_seen - len(items) + 1
        rows = [] if status.alarm is None else [number - first for number in status.alarm.examples if number >= first]
        return [(items[row], row) for row in rows]

    def _tell_of_alarm(self, *, is_new: bool) -> None:
        """Log an alarm, and some inputs later, if it was not certain at once, which layers moved."""
        if not is_new and self._n_unnamed <= 0:
            return
        status = self.monitor.status()
        moved = [layer.layer for layer in status.layers if layer.moved]
        names = ", ".join(moved[:N_NAMED]) + (f" and {len(moved) - N_NAMED} more" if len(moved) > N_NAMED else "")
        if is_new:
            self._drift_time = time.time()
            self._keep_alarm(status, moved)
            flags = self.monitor.window_flags()
            log.warning(
                "Drift alarm at input %d, by %s, since input %d to %d: %s%s "
                "Flagged: %s, %s; expected: %.1f %%. Layers that moved: %s.",
                status.drift_at,
                TEST_NAMES[status.drift_by or "items"],
                *(status.alarm.since if status.alarm else (0, 0)),
                _difference(status),
                status.alarm.sentence if status.alarm else "",
                _share(flags[-N_LATEST:]),
                _share(flags),
                100 * status.expected_ood_rate,
                names or "none for certain yet",
            )
        elif moved:
            log.warning("Layers that moved, by the last %d inputs: %s.", status.n_compared, names)
            if self.history is not None:
                self.history.name_layers(moved)
        # Named later, unless nothing moves over a whole window.
        self._n_unnamed = 0 if moved else (status.drift_at or 0) + self.monitor.window - status.n_seen

    def _keep_alarm(self, status: MonitorStatus, moved: list[str]) -> None:
        """Write an alarm to the history, with the details known so far."""
        if self.history is None or status.alarm is None:
            return
        offset = self._number - status.n_seen  # the monitor may continue the count of an earlier run
        examples = [number + offset for number in status.alarm.examples if number + offset > 0]
        content = {**asdict(status.alarm), "sentence": status.alarm.sentence, "examples": examples, "layers": moved}
        self.history.begin_alarm(content)

    def reset(self) -> None:
        """Switch the alarm off."""
        self.monitor.reset()
        self._end_alarm("The drift alarm was reset.")

    def accept(self) -> None:
        """Accept the current stream as normal."""
        self.monitor.accept()
        self._end_alarm("The current stream was accepted as normal.")

    def revert(self) -> None:
        """Compare with the held-out data again."""
        self.monitor.revert()
        self._end_alarm("The stream is compared with the held-out data again.")

    def _end_alarm(self, sentence: str) -> None:
        self._drift_time = None
        log.warning(sentence)
        if self.history is not None:
            self.history.end_alarm()

    def _picture(self, row: Tensor) -> NDArray[np.uint8] | None:
        """Return the model's input as a small picture (H, W, C)."""
        if self._preprocessing is None or row.dim() != 3 or len(row) != self._preprocessing.channels:
            return None
        step = max(1, -(-max(row.shape[1:]) // SIDE))
        values = row[:, ::step, ::step].float().permute(1, 2, 0).numpy()
        pixels = (values * np.array(self._preprocessing.std) + np.array(self._preprocessing.mean)) * 255
        small: NDArray[np.uint8] = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
        return small

    def snapshot(self, since: int) -> dict[str, Any]:
        """Return the items after number `since`, the flagged ones, and the monitor's status."""
        status = asdict(self.monitor.status())
        moved = [layer for layer in status["layers"] if layer["moved"]]
        counts = np.histogram(self.monitor.window_p_values(), bins=20, range=(0, 1))[0]
        n_flagged, most_false = self.monitor.window_false_flags()
        with self._lock:
            items = [asdict(item) for item in self._items if item.number > since]
            flagged = [asdict(item) for item, _ in reversed(self._flagged)]
            number = self._number
        return {
            "number": number,
            "items": items,
            "flagged": flagged,
            "monitor": {
                **status,
                "drift_time": self._drift_time,
                "layers": status["layers"][:N_SHOWN_LAYERS],
                "n_layers": len(status["layers"]),
                "n_moved": len(moved),
                "window": self.monitor.window,
                "window_p_value_counts": counts.tolist(),
                "window_n_flagged": n_flagged,
                "window_most_false": most_false,
                "guarantee": self.monitor.guarantee,
                "sentence": None if self.monitor.alarm is None else self.monitor.alarm.sentence,
            },
        }

    def thumbnail(self, number: int) -> bytes | None:
        """Return the flagged input of this number as PNG; None if it is not kept, or no longer."""
        with self._lock:
            found = [picture for item, picture in self._flagged if item.number == number]
        return _png(found[0]) if found else None

    def save(self) -> None:
        """Write the monitor's state if it has a file and has changed; a full disk is only logged."""
        status = self.monitor.status()
        known = status.n_seen, status.n_since_reset
        if self._state is None or known == self._saved:
            return
        try:
            self.monitor.save(self._state)
            self._saved = known
        except NeuralMeanError as error:
            log.error("The monitor's state was not saved: %s", error)

    def totals(self) -> Mapping[str, int]:
        """Return how many items and pictures are held."""
        with self._lock:
            return {"items": len(self._items), "flagged": len(self._flagged)}


def _difference(status: MonitorStatus) -> str:
    """Return what the stream no longer looks like; a frozen camera may show what it always does."""
    if status.drift_by == "repeats":
        return ""
    is_first = status.reference == "held-out data"
    known = "the data that the detector was calibrated on" if is_first else f"the {status.reference}"
    return f"the inputs no longer look like {known}. "


def _items_of(shared: Pass, number: int, now: float) -> list[Item]:
    """Return the items of a pass, numbered from `number` + 1."""
    decision, output = shared.decision, shared.output
    is_classes = output is not None and output.dim() == 2 and output.shape[1] > 1
    predicted = output.argmax(dim=1).tolist() if output is not None and is_classes else [None] * len(decision)
    columns = decision.score.tolist(), decision.p_value.tolist(), decision.is_ood.tolist(), decision.kind, predicted
    return [Item(number + i, now, *row) for i, row in enumerate(zip(*columns, strict=True), 1)]


def _png(picture: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(buffer, "PNG")
    return buffer.getvalue()


def _share(flags: list[bool]) -> str:
    return f"{sum(flags)} of the last {len(flags)} ({100 * sum(flags) / max(1, len(flags)):.1f} %)"
