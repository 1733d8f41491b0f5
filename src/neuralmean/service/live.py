"""What an operator sees: the latest items, the latest flagged inputs as thumbnails, and the monitor, all bounded."""

from __future__ import annotations

import io
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import NeuralMeanError
from neuralmean.monitor.monitor import Monitor
from neuralmean.service.passes import Pass

log = logging.getLogger("neuralmean.service")

N_ITEMS = 400
SIDE = 96
N_SHOWN_LAYERS = 12
N_NAMED = 8  # layers in the log
N_LATEST = 8  # inputs that the log tells of beside the window: a window of hundreds hides what has just begun


@dataclass(frozen=True)
class Item:
    """One input that was scored."""

    number: int  # counted from 1
    time: float  # seconds since 1970
    score: float
    p_value: float
    is_ood: bool


class Live:
    """Takes what is watched of every batch in, on one thread; is asked by the page and by Prometheus, on other threads.

    Args:
        monitor: Watches the stream.
        preprocessing: To turn the model's inputs back into pictures; None shows none.
        n_flagged: How many flagged pictures are kept; 0 keeps none.
        state: Where the monitor's state is written; None nowhere.
    """

    def __init__(
        self, monitor: Monitor, preprocessing: Preprocessing | None, *, n_flagged: int, state: str | Path | None
    ) -> None:
        self.monitor = monitor
        self._preprocessing = preprocessing
        self._state = state
        self._lock = threading.Lock()
        self._number = 0
        self._saved = (-1, -1)
        self._drift_time: float | None = None  # of the alarm, if it went off since the start
        # Inputs during which it is still asked which layers moved.
        self._n_unnamed = monitor.window if monitor.drift else 0
        self._items: deque[Item] = deque(maxlen=N_ITEMS)
        self._flagged: deque[tuple[Item, NDArray[np.uint8]]] = deque(maxlen=n_flagged)

    def take(self, inputs: Tensor, shared: Pass) -> None:
        """Take a batch in; one at a time."""
        was_on = self.monitor.drift
        if self.monitor.update(shared.decision, vectors=shared.vectors):
            self._tell_of_alarm(is_new=not was_on)
        decision, now = shared.decision, time.time()
        rows = zip(decision.score.tolist(), decision.p_value.tolist(), decision.is_ood.tolist(), strict=True)
        items = [Item(self._number + i, now, score, p, ood) for i, (score, p, ood) in enumerate(rows, 1)]
        keep = self._flagged.maxlen or 0
        flagged = [(item, row) for row, item in enumerate(items) if item.is_ood][-keep:] if keep else []
        pictures = [(item, picture) for item, row in flagged if (picture := self._picture(inputs[row])) is not None]
        with self._lock:
            self._number += len(items)
            self._items.extend(items)
            self._flagged.extend(pictures)

    def _tell_of_alarm(self, *, is_new: bool) -> None:
        """Log an alarm, and some inputs later, if it was not certain at once, which layers moved."""
        if not is_new and self._n_unnamed <= 0:
            return
        status = self.monitor.status()
        moved = [layer.layer for layer in status.layers if layer.moved]
        names = ", ".join(moved[:N_NAMED]) + (f" and {len(moved) - N_NAMED} more" if len(moved) > N_NAMED else "")
        if is_new:
            self._drift_time = time.time()
            flags = self.monitor.window_flags()
            log.warning(
                "Drift alarm at input %d, by %s: what comes in no longer looks like what the detector was calibrated on. "
                "Flagged: %s, %s; expected: %.1f %%. Layers that moved: %s.",
                status.drift_at,
                "single inputs" if status.drift_by == "items" else "the mean of many",
                _share(flags[-N_LATEST:]),
                _share(flags),
                100 * status.expected_ood_rate,
                names or "none for certain yet",
            )
        elif moved:
            log.warning("Layers that moved, by the last %d inputs: %s.", status.n_compared, names)
        # To be named later, unless nothing moves over a whole window.
        self._n_unnamed = 0 if moved else (status.drift_at or 0) + self.monitor.window - status.n_seen

    def reset(self) -> None:
        """Switch the alarm off."""
        self.monitor.reset()
        self._drift_time = None
        log.warning("The drift alarm was reset.")

    def _picture(self, row: Tensor) -> NDArray[np.uint8] | None:
        """Return what the model saw as a small picture (H, W, C)."""
        if self._preprocessing is None or row.dim() != 3 or len(row) != self._preprocessing.channels:
            return None
        step = max(1, -(-max(row.shape[1:]) // SIDE))
        values = row[:, ::step, ::step].float().permute(1, 2, 0).numpy()
        pixels = (values * np.array(self._preprocessing.std) + np.array(self._preprocessing.mean)) * 255
        small: NDArray[np.uint8] = np.clip(np.rint(pixels), 0, 255).astype(np.uint8)
        return small

    def snapshot(self, since: int) -> dict[str, Any]:
        """Return the items after number `since`, the flagged ones, and what the monitor knows."""
        status = asdict(self.monitor.status())
        moved = [layer for layer in status["layers"] if layer["moved"]]
        counts = np.histogram(self.monitor.window_p_values(), bins=20, range=(0, 1))[0]
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
                "guarantee": self.monitor.guarantee,
            },
        }

    def thumbnail(self, number: int) -> bytes | None:
        """Return the flagged input of this number as PNG; None where it is no longer, or was never, kept."""
        from PIL import Image

        with self._lock:
            found = [picture for item, picture in self._flagged if item.number == number]
        if not found:
            return None
        picture = found[0][:, :, 0] if found[0].shape[2] == 1 else found[0]
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "PNG")
        return buffer.getvalue()

    def save(self) -> None:
        """Write the monitor's state where there is a file for it and something new in it; a full disk is only logged."""
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


def _share(flags: list[bool]) -> str:
    return f"{sum(flags)} of the last {len(flags)} ({100 * sum(flags) / max(1, len(flags)):.1f} %)"
