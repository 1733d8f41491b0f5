"""`Monitor` watches a stream of decisions and raises an alarm when the stream as a whole has changed.

It keeps counters, the latest items, and sequential tests whose false-alarm probability over all time is bounded together: of the
scores of single items, of the paper's batch-level discrepancy of short blocks, which shows changes that no single item does, and
of repeated inputs. The mathematics is in `stats.sequential`. Nothing here needs HTTP or an extra.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.detector.decision import Decision
from neuralmean.detector.detector import Detector
from neuralmean.errors import ArtefactError, InputError, ModelMismatchError, NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.monitor.alarms import change_before, describe
from neuralmean.monitor.block_test import BLOCK, BlockTest
from neuralmean.monitor.counters import Counters
from neuralmean.monitor.recent import RecentItems
from neuralmean.monitor.spacing import Spacing
from neuralmean.monitor.state import from_artefact, identity, to_artefact
from neuralmean.monitor.status import Alarm, MonitorStatus, Test
from neuralmean.monitor.stream_tests import N_REPEATS, ItemTests, RepeatTest
from neuralmean.scorers import Observation
from neuralmean.scorers.contract import needs_of, score_rows
from neuralmean.stats.calibration import Calibration, check_rate
from neuralmean.stats.correlation import LEVELS
from neuralmean.stats.false_flags import most_false_flags

Floats = NDArray[np.float64]

HISTORY = 2048  # number of items kept in memory
SHARES = {"items": 0.75, "thinned": 0.1, "blocks": 0.1, "repeats": 0.05}  # of the false-alarm rate
TO_ACCEPT = 100  # items needed to accept a new normal


class Monitor:
    r"""Detects when a stream of inputs differs from the data that the detector was calibrated on.

    The alarm is a sequential test: it may be checked after every item, and the probability that it *ever* goes off on a
    stream that is exchangeable with the held-out data is at most `false_alarm_rate`. The tests share that rate (`SHARES`):

    - items: scores, ranked among the held-out scores and the stream so far, and counted in bins of the held-out scores alone
    - thinned: the same of one item in 4, 16, ..., 1024, for streams with correlated neighbours. The correlation
      is estimated from the latest 2,048 scores, and a test counts only if its items are far enough apart.
    - blocks: the batch-level discrepancy (Dong et al., CVPR 2022, Eq. 3 and 5 with :math:`|I| = 32`) of blocks of 32 items, each
      ranked among the earlier blocks. Channels are standardised first, which the paper does not do:

      .. math::
          \sqrt{\frac{1}{D} \sum_c \left( \frac{\mathrm{NMD}_c(I) - \overline{\mathrm{NMD}}_c}{\sigma_c} \right)^2}

      with mean and standard deviation of the held-out data, or of the stream's first `window` items if the detector has seen
      fewer than 128 held-out examples.
    - repeats: the same input, at least 10 times in a row.

    Args:
        detector: A calibrated detector.
        window: Number of latest items in the window; a multiple of 32.
        false_alarm_rate: Probability of ever raising a false alarm, between two calls of `reset` or `accept`.
        every: One of every so many items is used; None estimates it, 1 means that items are independent.
        follow: Drift is followed rather than reported if at most this share of the inputs since the change is flagged; None
            follows none.
        seed: Seed of the random order of equal scores.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
        >>> images = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> _ = [model(images) for _ in range(50)]  # instead of training
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
        every: int | None = None,
        follow: float | None = None,
        seed: int = 0,
    ) -> None:
        check_rate(false_alarm_rate)
        if follow is not None:
            check_rate(follow, "follow")
        if isinstance(window, bool) or not isinstance(window, int) or window < BLOCK or window % BLOCK:
            raise InputError(f"Expected `window` to be a multiple of {BLOCK}, but got {window!r}.")
        if every is not None and (
            isinstance(every, bool) or not isinstance(every, int) or not 1 <= every <= LEVELS[-1]
        ):
            raise InputError(f"Expected `every` to be None or a number from 1 to {LEVELS[-1]}, but got {every!r}.")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise InputError(f"Expected `seed` to be a whole number of at least 0, but got {seed!r}.")
        self.detector, self.window, self.every, self.follow, self.seed = detector, window, every, follow, seed
        self.false_alarm_rate = float(false_alarm_rate)
        self._lock = threading.RLock()
        self.n_remembered = max(window, HISTORY)
        self._counters, self._recent, self._spacing = Counters(), RecentItems(self.n_remembered), Spacing(every)
        self._width = len(detector.channels)
        self._blocks = BlockTest(detector.layers, detector.column_layers, window)
        self._n_resets = self._n_accepted = self._n_followed = 0
        self._accepted: Floats | None = None  # scores that were accepted as the new normal
        self._begin_tests()

    @property
    def block_size(self) -> int:
        """How many items a block holds."""
        return BLOCK

    def _begin_tests(self) -> None:
        held_out = self._calibration().scores.double().numpy()
        is_new = self._accepted is not None
        self._identity = identity(self.detector)  # kept, because the detector may be calibrated again
        seed = self.seed + 2 * self._n_resets
        self._items = ItemTests(held_out if self._accepted is None else self._accepted, seed)
        self._blocks.begin(None if is_new else self.detector.profile, seed + 1)
        self._repeats = RepeatTest(held_out, self._width)
        self._alarm: Alarm | None = None
        self._following: int | None = None  # the item since which a mild drift is to be followed
        self._spacing.begin(self._counters.n_seen)

    def _calibration(self) -> Calibration:
        if self.detector.calibration is None:
            raise NotFittedError("Expected a detector with a threshold to monitor. Call `fit` or `calibrate` first.")
        return self.detector.calibration

    @property
    def drift(self) -> bool:
        """Whether the alarm is on; it stays on until `reset` or `accept`."""
        return self._alarm is not None

    @property
    def alarm(self) -> Alarm | None:
        """The alarm that is on, with its details; None while it is off."""
        return self._alarm

    @property
    def guarantee(self) -> str:
        """The guarantee of the alarm, in a sentence or two."""
        rate = f"{self.false_alarm_rate:g}"
        what = "the held-out data" if self._accepted is None else "the inputs that were accepted as normal"
        own = f"On a stream like {what} the alarm ever goes off with a probability of at most {rate}."
        if self.detector.calibration_source == "held_out" or self._accepted is not None:
            return own
        return f"{own} But the held-out data was not: {self.detector.guarantee[0].lower()}{self.detector.guarantee[1:]}"

    def update(self, decision: Decision | None = None, *, vectors: Tensor | None = None) -> bool:
        """Add the next items of the stream and return whether the alarm is on.

        Args:
            decision: The decision on them, in order.
            vectors: Their discrepancy vectors (N, D), as `detector.discrepancy` returns them: for the test on blocks and to
                name the layers that moved. Without a decision they are scored here, if the scorer needs nothing else.
        """
        vectors = self._check_vectors(vectors)
        if decision is None:
            decision = self._decide(vectors)
        given: object = decision
        if not isinstance(given, Decision):
            raise InputError(f"Expected a decision, as `detector.predict` returns it, but got {type(given).__name__}.")
        scores = decision.score.detach().double().cpu().numpy()
        if not np.isfinite(scores).all():
            raise InputError("Expected finite scores, but got NaN or Inf. Leave these inputs out.")
        if vectors is not None and len(vectors) != len(scores):
            raise InputError(f"Expected a vector for each of {len(scores)} decisions, but got {len(vectors)}.")
        with self._lock:
            for first in range(0, len(scores), BLOCK):  # in parts, so that a large batch does not delay the alarm
                part = slice(first, first + BLOCK)
                self._take(decision[part], scores[part], None if vectors is None else vectors[part])
            return self.drift

    def _take(self, decision: Decision, scores: Floats, vectors: Tensor | None) -> None:
        n_before, n_tested = self._counters.n_seen, self._items.n
        found, notes = self._items.update(scores)
        repeats, n_repeats = self._repeats.update(scores, vectors, self._items.ranks)
        blocks = np.empty(0) if vectors is None else self._blocks.update(vectors)
        self._counters.add(decision)
        self._recent.add(decision, scores, notes)
        if self._alarm is not None:
            return
        # For each test the spacing of its items, and the excess of each value over the alarm's threshold.
        over = {1: found[0] - self._log_needed("items")}
        over |= {level: own - self._log_needed("thinned") for level, own in zip(LEVELS[1:], found[1:], strict=True)}
        reached = {level: int(np.flatnonzero(own >= 0)[0]) for level, own in over.items() if (own >= 0).any()}
        by_blocks = bool((blocks >= self._log_needed("blocks")).any())
        if (repeats >= self._log_needed("repeats")).any():
            place = int(np.flatnonzero(repeats >= self._log_needed("repeats"))[0])
            self._alarm = self._describe("repeats", n_before + 1 + place, int(n_repeats[place]))
        elif (reached or by_blocks) and self._may_judge():
            since, _ = change_before(self._n_seen, self._n_seen, self._recent, self._items)
            self._spacing.estimate(self._recent, self._n_seen, since)
            allowed = [level for level in reached if level >= self._spacing.level]
            if allowed:
                level = allowed[0]
                self._raise(self._describe("items", n_before + 1 + -n_tested % level + level * reached[level]))
            elif by_blocks and self._spacing.level == 1:
                self._raise(self._describe("blocks", self._n_seen))
        elif self._following is not None:
            self._follow_up()

    def _may_judge(self) -> bool:
        """Return whether an alarm of another test than that of repeats may be raised now."""
        about_to_repeat = self._repeats.n_repeats >= N_REPEATS // 2
        return not about_to_repeat and self._spacing.is_known(self._recent, self._n_seen)

    def _raise(self, alarm: Alarm) -> None:
        """Raise an alarm, unless the drift is mild and to be followed."""
        if self.follow is None or alarm.n_flagged > self.follow * alarm.n_since:
            self._alarm = alarm
            return
        self._following = alarm.since[1] if self._following is None else self._following
        self._follow_up()

    def _follow_up(self) -> None:
        """Accept a mild drift as the new normal once there are enough items of it."""
        count = self._n_seen - (self._following or 0)
        if count >= TO_ACCEPT:
            self._n_followed += 1
            self._accept(count)

    def _describe(self, test: Test, item: int, n_repeats: int = 0) -> Alarm:
        return describe(test, item, self._n_seen, self._recent, self._items, n_repeats)

    @property
    def _n_seen(self) -> int:
        return self._counters.n_seen

    def reset(self) -> None:
        """Switch the alarm off and restart the tests with the full false-alarm rate; counters continue."""
        with self._lock:
            self._n_resets += 1
            self._begin_tests()

    def accept(self) -> None:
        """Accept the current stream as normal: the items since the change, or the window if there was none.

        The tests restart against these items, with a new guarantee. The threshold and the p-values of single inputs do not
        change. `revert` returns to the held-out data.

        Raises:
            InputError: There are fewer than 100 such items.
        """
        with self._lock:
            count = self.window if self._alarm is None else self._n_seen - self._alarm.since[1]
            count = min(count, len(self._recent))
            if count < TO_ACCEPT:
                raise InputError(
                    f"Expected at least {TO_ACCEPT} items to accept as normal, but got {count}. Wait for more of them."
                )
            self._accept(count)

    def _accept(self, count: int) -> None:
        self._accepted = self._recent.scores(count)
        self._blocks.forget()
        self._n_accepted += 1
        self.reset()
        self._spacing.go_back(count)

    def revert(self) -> None:
        """Compare with the held-out data again after `accept`, with a new guarantee."""
        with self._lock:
            self._accepted = None
            self.reset()

    def status(self) -> MonitorStatus:
        """Return the current status."""
        with self._lock:
            recent, alarm, counters = self._recent.last(self.window), self._alarm, self._counters
            log_value, log_needed = self._strongest()
            compared = self._blocks.compare(drift=self.drift)
            return MonitorStatus(
                n_seen=counters.n_seen,
                n_ood=counters.n_ood,
                n_by_kind=dict(counters.n_by_kind),
                n_since_reset=self._items.n,
                n_window=len(recent),
                window_ood_rate=sum(item.flagged for item in recent) / len(recent) if recent else None,
                expected_ood_rate=self._calibration().false_alarm_rate,
                p_value_counts=tuple(counters.p_value_counts),
                p_value_sum=counters.p_value_sum,
                drift=self.drift,
                drift_at=None if alarm is None else alarm.item,
                drift_by=None if alarm is None else alarm.test,
                alarm=alarm,
                log10_evidence=log_value / math.log(10),
                log10_needed=log_needed / math.log(10),
                every=self._spacing.level,
                reference="held-out data" if self._accepted is None else f"{len(self._accepted):,} accepted items",
                n_accepted=self._n_accepted,
                n_followed=self._n_followed,
                **compared._asdict(),
            )

    def _strongest(self) -> tuple[float, float]:
        """Return the logarithm of the evidence of the test that is nearest to an alarm, and the value at which it alarms."""
        items, need, least = self._items.evidence, self._log_needed, self._spacing.level
        values = [(items[0].log_value, need("items")), (self._blocks.evidence.log_value, need("blocks"))]
        if least > 1:
            own = [one.log_value for level, one in zip(LEVELS, items, strict=True) if level >= least]
            values = [(max(own), need("thinned"))]
        if self._repeats.n_repeats >= N_REPEATS:
            values.append((self._repeats.evidence.log_value, need("repeats")))
        return max(values, key=lambda pair: pair[0] - pair[1])

    def window_p_values(self) -> list[float]:
        """Return the p-values in the window, oldest first."""
        with self._lock:
            return [item.p_value for item in self._recent.last(self.window)]

    def window_flags(self) -> list[bool]:
        """Return which inputs in the window were flagged, oldest first."""
        with self._lock:
            return [item.flagged for item in self._recent.last(self.window)]

    def window_false_flags(self, *, confidence: float = 0.95) -> tuple[int, int | None]:
        """Return the number of flagged inputs in the window, and an upper bound on the false flags among them.

        The bound holds with the confidence. It is None for a detector that was calibrated by group; see `Decision.most_false`.
        """
        with self._lock:
            items, calibration = self._recent.last(self.window), self._calibration()
        n_flagged = sum(item.flagged for item in items)
        if calibration.group_of is not None:
            return n_flagged, None
        p_values = np.array([item.p_value for item in items])
        return n_flagged, most_false_flags(p_values, len(calibration.scores), calibration.level, confidence)

    def save(self, path: str | Path) -> None:
        """Write the whole state to a file, whole or not at all."""
        with self._lock:
            artefact = to_artefact(self)
        artefact.write(path)

    @classmethod
    def load(cls, path: str | Path, detector: Detector) -> Monitor:
        """Restore the monitor that wrote `path`, bit for bit; `detector` must be the same."""
        artefact = Artefact.read(path)
        if artefact.header.get("kind") != "monitor":
            raise ArtefactError(f"Expected {str(path)!r} to be the state of a monitor, but it is something else.")
        if artefact.header.get("detector") != identity(detector):
            raise ModelMismatchError(
                f"Expected the detector that the monitor in {str(path)!r} was watching, but got another one. "
                "Use a new state file."
            )
        try:
            return from_artefact(cls, artefact, detector)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ArtefactError(f"Expected {str(path)!r} to be the state of a monitor, but {error}.") from None

    def _log_needed(self, test: str) -> float:
        """Return the logarithm of the evidence that an alarm needs; the thinned tests share theirs."""
        parts = len(LEVELS) - 1 if test == "thinned" else 1
        return math.log(parts / (SHARES[test] * self.false_alarm_rate))

    def _check_vectors(self, vectors: Tensor | None) -> Tensor | None:
        if vectors is None:
            return None
        given: object = vectors
        if not isinstance(given, Tensor) or given.dim() != 2 or given.shape[1] != self._width:
            got = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            raise InputError(f"Expected vectors as a tensor of shape (N, {self._width}), but got {got}.")
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

    def __repr__(self) -> str:
        state = f"drift since item {self._alarm.item}" if self._alarm is not None else "no drift"
        return f"Monitor({self._n_seen} items, {self._counters.n_ood} OOD, {state})"
