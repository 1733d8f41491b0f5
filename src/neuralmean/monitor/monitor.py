"""`Monitor` watches a stream of decisions and says when the stream as a whole has turned.

It keeps counters, a window of the latest items, and two sequential tests whose false-alarm probability over all time is
bounded together: one on the p-values of single items, one on the paper's batch-level discrepancy of short blocks, which
sees turns that no single item shows. The mathematics is in `sequential`. Nothing here needs HTTP or an extra.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import deque
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuralmean.detector.decision import Decision
from neuralmean.detector.detector import Detector
from neuralmean.errors import ArtefactError, InputError, ModelMismatchError, NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.monitor.state import from_artefact, identity, to_artefact
from neuralmean.scorers import Observation
from neuralmean.scorers.contract import needs_of, score_rows
from neuralmean.stats.calibration import Calibration, check_rate
from neuralmean.stats.held_out_profile import HeldOutProfile
from neuralmean.stats.moments import Moments
from neuralmean.stats.sequential import Evidence, OnlineRanks

BLOCK = 32
P_VALUE_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_N_TESTS = 2
_FEWEST = 128  # held-out examples to compare with


@dataclass(frozen=True)
class LayerShift:
    """How far the mean activation of a layer has moved.

    Attributes:
        layer: Dotted name of the layer.
        shift: Root mean square over its live channels of the move, in standard deviations of single inputs, less what chance
            explains.
        moved: Whether chance is out of the question as an explanation; before there is a profile, only after an alarm.
    """

    layer: str
    shift: float
    moved: bool


@dataclass(frozen=True)
class MonitorStatus:
    """What a `Monitor` knows at one moment.

    Attributes:
        n_seen: Items since the beginning.
        n_ood: Items that were flagged.
        n_since_reset: Items that the current test has seen.
        n_window: Items in the window.
        window_ood_rate: Share of the window that was flagged; None while it is empty.
        expected_ood_rate: Share that is flagged while all is well.
        p_value_counts: Items since the beginning by p-value, for each upper edge in `P_VALUE_EDGES`.
        p_value_sum: Sum of all p-values.
        drift: Whether the alarm is on; it stays on until `reset`.
        drift_at: The item (counted from 1) that set it off.
        drift_by: Which test set it off: `"items"` or `"blocks"`.
        log10_evidence: The stronger of the two tests, as a power of ten against "nothing has changed".
        log10_needed: Where the alarm goes off.
        discrepancy: The paper's batch-level discrepancy of the window; None without vectors.
        layers: The watched layers, those that moved most first; empty without vectors.
        n_compared: Items that `layers` is about: the window, or the latest ones of it where these show more clearly what moved.
        compared_with: What they are compared with.
    """

    n_seen: int
    n_ood: int
    n_since_reset: int
    n_window: int
    window_ood_rate: float | None
    expected_ood_rate: float
    p_value_counts: tuple[int, ...]
    p_value_sum: float
    drift: bool
    drift_at: int | None
    drift_by: str | None
    log10_evidence: float
    log10_needed: float
    discrepancy: float | None
    layers: tuple[LayerShift, ...]
    n_compared: int
    compared_with: str


class Monitor:
    r"""Decides whether a stream of inputs has turned away from what the detector was calibrated on.

    The alarm is a sequential test: it may be looked at after every item, for ever, and the probability that it *ever*
    goes off on a stream that is exchangeable with the held-out data is at most `false_alarm_rate`. Half of that is spent
    on a test of the items' scores, ranked online among the held-out scores (see `sequential.OnlineRanks`), half on a
    test of the batch-level discrepancy (Dong et al., CVPR 2022, Eq. 3 and 5 with :math:`|I| = 32`) of blocks of 32
    items, each ranked among the blocks before it. Channels are put on one scale first, which the paper does not do:

    .. math::
        \sqrt{\frac{1}{D} \sum_c \left( \frac{\mathrm{NMD}_c(I) - \overline{\mathrm{NMD}}_c}{\sigma_c} \right)^2}

    with mean and standard deviation of the held-out data, or of the stream's first `window` items where the detector has seen
    fewer than 128 held-out examples.

    Args:
        detector: A calibrated detector.
        window: How many of the latest items the window holds; a multiple of 32.
        false_alarm_rate: Probability of ever raising a false alarm, between two calls of `reset`.
        seed: Of the random ranks among equal scores.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
        >>> images = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> _ = [model(images) for _ in range(50)]  # stands for training
        >>> detector = Detector(model, scorer="average").calibrate(images[:100])
        >>> monitor = Monitor(detector)
        >>> monitor.update(detector.predict(images[100:])), monitor.update(detector.predict(images[:20] + 3))
        (False, True)
    """

    def __init__(
        self,
        detector: Detector,
        *,
        window: int = 512,
        false_alarm_rate: float = 0.01,
        seed: int = 0,
    ) -> None:
        check_rate(false_alarm_rate)
        if isinstance(window, bool) or not isinstance(window, int) or window < BLOCK or window % BLOCK:
            raise InputError(f"Expected `window` to be a multiple of {BLOCK}, but got {window!r}.")
        self.detector = detector
        self.window = window
        self.false_alarm_rate = float(false_alarm_rate)
        self.seed = seed
        self._lock = threading.RLock()
        self._n_seen = self._n_ood = 0
        self._p_value_counts = [0] * len(P_VALUE_EDGES)
        self._p_value_sum = 0.0
        self._recent: deque[tuple[float, bool]] = deque(maxlen=window)  # p-value, flagged
        self._n_resets = 0
        self._width = len(detector.channels)
        self._learnt = Moments.empty(self._width)  # of the first items, where the detector has no profile
        self._begin_tests()

    def _begin_tests(self) -> None:
        scores = self._calibration().scores.double().numpy()
        self._known = self.detector.profile
        self._identity = identity(self.detector)  # as it is now, although it may be calibrated again
        self._item_ranks = OnlineRanks(scores, seed=self.seed + 2 * self._n_resets)
        self._block_ranks = OnlineRanks(seed=self.seed + 2 * self._n_resets + 1)
        self._item_evidence, self._block_evidence = Evidence(), Evidence()
        self._drift: tuple[int, str] | None = None
        self._blocks: deque[Moments] = deque()
        self._open = Moments.empty(self._width)
        if self._learnt.count < self.window:
            self._learnt = Moments.empty(self._width)

    def _calibration(self) -> Calibration:
        if self.detector.calibration is None:
            raise NotFittedError("Expected a detector with a threshold to monitor. Call `fit` or `calibrate` first.")
        return self.detector.calibration

    @property
    def drift(self) -> bool:
        """Whether the alarm is on; it stays on until `reset`."""
        return self._drift is not None

    @property
    def guarantee(self) -> str:
        """What an alarm is worth, in a sentence or two."""
        rate = f"{self.false_alarm_rate:g}"
        own = f"On a stream like the held-out data the alarm ever goes off with a probability of at most {rate}."
        if self.detector.calibration_source == "held_out":
            return own
        return f"{own} But the held-out data was not: {self.detector.guarantee[0].lower()}{self.detector.guarantee[1:]}"

    def update(self, decision: Decision | None = None, *, vectors: Tensor | None = None) -> bool:
        """Take the next items of the stream in and return whether the alarm is on.

        Args:
            decision: What the detector said of them, in order.
            vectors: Their discrepancy vectors (N, D), as `detector.discrepancy` returns: for the test on blocks and to
                name the layers that moved. Alone they are scored here, where the scorer needs nothing else.
        """
        vectors = self._check_vectors(vectors)
        if decision is None:
            decision = self._decide(vectors)
        scores = decision.score.detach().double().cpu().numpy()
        if not np.isfinite(scores).all():
            raise InputError("Expected finite scores, but got NaN or Inf. Leave these inputs out.")
        if vectors is not None and len(vectors) != len(scores):
            raise InputError(f"Expected a vector for each of {len(scores)} decisions, but got {len(vectors)}.")
        with self._lock:
            before = self._n_seen
            self._count(decision)
            if len(scores):
                log_values = self._item_evidence.update(self._item_ranks.p_values(scores))
                self._sound(log_values, before + 1, "items")
            if vectors is not None:
                self._watch_vectors(vectors, before)
            return self.drift

    def reset(self) -> None:
        """Switch the alarm off and begin the tests anew, with the whole false-alarm rate to spend; counters go on."""
        with self._lock:
            self._n_resets += 1
            self._begin_tests()

    def status(self) -> MonitorStatus:
        """Return all that is known now."""
        with self._lock:
            flagged = sum(ood for _, ood in self._recent)
            latest = list(accumulate([self._open, *reversed(self._blocks)]))
            window, profile = latest[-1], self._baseline()
            log_value = max(self._item_evidence.log_value, self._block_evidence.log_value)
            layers, n_compared = self._compare(latest, profile)
            return MonitorStatus(
                n_seen=self._n_seen,
                n_ood=self._n_ood,
                n_since_reset=self._item_evidence.n,
                n_window=len(self._recent),
                window_ood_rate=flagged / len(self._recent) if self._recent else None,
                expected_ood_rate=self._calibration().false_alarm_rate,
                p_value_counts=tuple(self._p_value_counts),
                p_value_sum=self._p_value_sum,
                drift=self.drift,
                drift_at=None if self._drift is None else self._drift[0],
                drift_by=None if self._drift is None else self._drift[1],
                log10_evidence=log_value / math.log(10),
                log10_needed=self._log_needed() / math.log(10),
                discrepancy=window.mean.abs().mean().item() if window.count else None,
                layers=layers,
                n_compared=n_compared,
                compared_with=self._name_of(profile),
            )

    def window_p_values(self) -> list[float]:
        """Return the p-values in the window, oldest first."""
        with self._lock:
            return [p_value for p_value, _ in self._recent]

    def window_flags(self) -> list[bool]:
        """Return which inputs in the window were flagged, oldest first."""
        with self._lock:
            return [flag for _, flag in self._recent]

    def save(self, path: str | Path) -> None:
        """Write all of the state to a file, whole or not at all."""
        with self._lock:
            artefact = to_artefact(self)
        artefact.write(path)

    @classmethod
    def load(cls, path: str | Path, detector: Detector) -> Monitor:
        """Go on where the monitor that wrote `path` was, bit for bit; `detector` must be the same."""
        artefact = Artefact.read(path)
        if artefact.header.get("kind") != "monitor":
            raise ArtefactError(f"Expected {str(path)!r} to be the state of a monitor, but it is something else.")
        if artefact.header.get("detector") != identity(detector):
            raise ModelMismatchError(
                f"Expected the detector that the monitor in {str(path)!r} was watching, but got another one. "
                "Begin with a new state file."
            )
        try:
            return from_artefact(cls, artefact, detector)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ArtefactError(f"Expected {str(path)!r} to be the state of a monitor, but {error}.") from None

    def _log_needed(self) -> float:
        return math.log(_N_TESTS / self.false_alarm_rate)

    def _sound(self, log_values: np.ndarray[Any, Any], first_item: int, test: str) -> None:
        over = np.flatnonzero(log_values >= self._log_needed())
        if self._drift is None and len(over):
            self._drift = (first_item + int(over[0]), test)

    def _count(self, decision: Decision) -> None:
        p_values, flags = decision.p_value.tolist(), decision.is_ood.tolist()
        self._n_seen += len(p_values)
        self._n_ood += sum(flags)
        for p_value in p_values:
            self._p_value_counts[bisect.bisect_left(P_VALUE_EDGES, p_value)] += 1
            self._p_value_sum += p_value
        self._recent.extend(zip(p_values, flags, strict=True))

    def _check_vectors(self, vectors: Tensor | None) -> Tensor | None:
        if vectors is None:
            return None
        if vectors.dim() != 2 or vectors.shape[1] != self._width:
            raise InputError(f"Expected vectors of shape (N, {self._width}), but got {tuple(vectors.shape)}.")
        if not torch.isfinite(vectors).all():
            raise InputError("Expected finite vectors, but got NaN or Inf. Leave these inputs out.")
        return vectors

    def _decide(self, vectors: Tensor | None) -> Decision:
        if vectors is None:
            raise InputError("Expected a decision or vectors to update with, but got neither.")
        needs = sorted(needs_of(self.detector.scorer))
        if needs:
            raise InputError(
                f"Expected a decision, as the scorer needs the model's {' and '.join(needs)} besides vectors."
            )
        calibration, scores = self._calibration(), score_rows(self.detector.scorer, Observation(vectors))
        return Decision(scores, calibration)

    def _watch_vectors(self, vectors: Tensor, before: int) -> None:
        row = 0
        while row < len(vectors):
            part = vectors[row : row + BLOCK - self._open.count]
            row += len(part)
            self._open = self._open + Moments.of(part)
            if self._open.count == BLOCK:
                self._close_block(before + row)

    def _close_block(self, item: int) -> None:
        block, profile = self._open, self._baseline()
        self._open = Moments.empty(len(block.mean))
        self._blocks.append(block)
        if len(self._blocks) > self.window // BLOCK:
            self._blocks.popleft()
        if profile is None:
            self._learnt = self._learnt + block
        else:
            score = profile.shifts(block).mean().sqrt().item()
            self._sound(self._block_evidence.update(self._block_ranks.p_values([score])), item, "blocks")

    def _baseline(self) -> HeldOutProfile | None:
        if self._known is not None and self._known.moments.count >= _FEWEST:
            return self._known
        return self._bare(self._learnt) if self._learnt.count >= self.window else None

    def _bare(self, moments: Moments) -> HeldOutProfile:
        return HeldOutProfile.bare(self.detector.column_layers, moments, len(self.detector.layers))

    def _name_of(self, profile: HeldOutProfile | None) -> str:
        if profile is None:
            return "the training data"
        if profile.moments is self._learnt:
            return f"the first {self.window} items"
        return f"the {profile.moments.count:,} held-out examples"

    def _compare(self, latest: list[Moments], profile: HeldOutProfile | None) -> tuple[tuple[LayerShift, ...], int]:
        """Return how far each layer has moved, the farthest first, and over how many of the latest items that was taken.

        A turn shows in the mean of the window only once much of the window has turned. So the latest block, the latest two
        and so on are looked at as well, and the part with the clearest move is taken, if there is a clear one.

        Args:
            latest: Moments of such parts, growing; the window last.
            profile: What to compare with; None for the training data.
        """
        window = latest[-1]
        if window.count < 2:
            return (), 0
        parts = [part for part in latest if part.count >= BLOCK] or [window]
        certain, off = window.count >= BLOCK, 0.0  # means of fewer are not nearly normal
        if profile is not None:
            off = 1 / profile.moments.count
        else:  # The training data's mean, 0 in these vectors. Fresh data always lies a little off it.
            profile = self._bare(replace(window, mean=torch.zeros_like(window.mean)))
            parts, certain = [window], certain and self.drift
        noise = torch.tensor([1 / part.count + off for part in parts], dtype=torch.float64)
        times = profile.layer_shifts(parts) / noise[:, None]  # (parts, layers) of what chance explains
        over = times / profile.limit(math.log(1000 * times.numel()))  # 0.1 % for all layers and parts together
        clearest = int(over.amax(dim=1).argmax()) if bool((over > 1).any()) else -1
        shifts = [
            LayerShift(name, math.sqrt(max(0.0, ratio - 1) * noise[clearest].item()), certain and excess > 1)
            for name, ratio, excess in zip(
                self.detector.layers, times[clearest].tolist(), over[clearest].tolist(), strict=True
            )
        ]
        return tuple(sorted(shifts, key=lambda shift: -shift.shift)), parts[clearest].count

    def __repr__(self) -> str:
        state = f"drift since item {self._drift[0]}" if self._drift is not None else "no drift"
        return f"Monitor({self._n_seen} items, {self._n_ood} OOD, {state})"
