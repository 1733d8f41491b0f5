"""`Monitor` watches a stream of decisions and raises an alarm when the stream as a whole has changed.

It keeps counters, the latest items, and sequential tests whose false-alarm probability over all time is bounded together: of the
scores of single items, of the paper's batch-level discrepancy of short blocks, which shows changes that no single item does, and
of repeated inputs. The mathematics is in `stats.sequential`. Nothing here needs HTTP or an extra.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import deque
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.detector.decision import Decision
from neuralmean.detector.detector import Detector
from neuralmean.detector.kinds import FLAGGED_KINDS
from neuralmean.errors import ArtefactError, InputError, ModelMismatchError, NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.monitor.layer_shifts import layer_shifts
from neuralmean.monitor.state import from_artefact, identity, to_artefact
from neuralmean.monitor.status import Alarm, Kind, LayerShift, MonitorStatus, Test
from neuralmean.monitor.stream_tests import BOTH_WEIGHTS, N_REPEATS, ItemTests, RepeatTest
from neuralmean.scorers import Observation
from neuralmean.scorers.contract import needs_of, score_rows
from neuralmean.stats.betting import BETS, WEIGHTS, log_densities
from neuralmean.stats.calibration import Calibration, check_rate
from neuralmean.stats.change_point import change_interval
from neuralmean.stats.correlation import LEVELS, spacing
from neuralmean.stats.held_out_profile import HeldOutProfile
from neuralmean.stats.moments import Moments
from neuralmean.stats.sequential import Evidence, OnlineRanks

Floats = NDArray[np.float64]

BLOCK = 32
HISTORY = 2048  # items that are remembered one by one
P_VALUE_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SHARES = {"items": 0.75, "thinned": 0.1, "blocks": 0.1, "repeats": 0.05}  # of the false-alarm rate
KINDS = ("typical", *FLAGGED_KINDS)  # of a decision
N_EXAMPLES = 12
WARM_UP = 64  # items before anybody can tell how correlated the stream is
TO_ACCEPT = 100  # items that a new normal needs
_FEWEST = 128  # held-out examples to compare with


class RecentItem(NamedTuple):
    """What is remembered of one of the latest items."""

    score: float
    online_p_value: float  # among all before it
    bin: float
    log_null: float  # logarithm of the bin's probability
    p_value: float  # among the held-out scores
    flagged: bool
    kind: int  # index in `KINDS`


class Monitor:
    r"""Decides whether a stream of inputs has changed from what the detector was calibrated on.

    The alarm is a sequential test: it may be checked after every item, for ever, and the probability that it *ever* goes off on a
    stream that is exchangeable with the held-out data is at most `false_alarm_rate`. The tests share that rate (`SHARES`):

    - items: scores, ranked among the held-out scores and the stream so far, and counted in bins of the held-out scores alone
    - thinned: the same of one item in 4, 16, ..., 1024, for streams whose neighbours resemble each other. How correlated a stream
      is, is estimated from its latest 2,048 scores, and a test counts only if its items are far enough apart.
    - blocks: the batch-level discrepancy (Dong et al., CVPR 2022, Eq. 3 and 5 with :math:`|I| = 32`) of blocks of 32 items, each
      ranked among the blocks before it. Channels are standardised first, which the paper does not do:

      .. math::
          \sqrt{\frac{1}{D} \sum_c \left( \frac{\mathrm{NMD}_c(I) - \overline{\mathrm{NMD}}_c}{\sigma_c} \right)^2}

      with mean and standard deviation of the held-out data, or of the stream's first `window` items if the detector has seen
      fewer than 128 held-out examples.
    - repeats: the same input, at least 10 times in a row.

    Args:
        detector: A calibrated detector.
        window: How many of the latest items the window holds; a multiple of 32.
        false_alarm_rate: Probability of ever raising a false alarm, between two calls of `reset` or `accept`.
        every: Of how many neighbouring items one is used; None estimates it, 1 says that items are independent.
        follow: Drift is followed rather than reported if at most this share of the inputs since the change is flagged; None
            follows none.
        seed: Of the random order of equal scores.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
        >>> images = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> _ = [model(images) for _ in range(50)]  # in place of training
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
        self.detector, self.window, self.every, self.follow, self.seed = detector, window, every, follow, seed
        self.false_alarm_rate = float(false_alarm_rate)
        self._lock = threading.RLock()
        self._n_seen = self._n_ood = 0
        self._n_by_kind: dict[str, int] = dict.fromkeys(FLAGGED_KINDS, 0)
        self._p_value_counts = [0] * len(P_VALUE_EDGES)
        self._p_value_sum = 0.0
        self._recent: deque[RecentItem] = deque(maxlen=max(window, HISTORY))
        self._n_resets = self._n_accepted = self._n_followed = 0
        self._accepted: Floats | None = None  # scores that were accepted as the new normal
        self._width = len(detector.channels)
        self._learnt = Moments.empty(self._width)  # of the first items, if the detector has no profile
        self._begin_tests()

    @property
    def block_size(self) -> int:
        """How many items a block holds."""
        return BLOCK

    def _begin_tests(self) -> None:
        held_out = self._calibration().scores.double().numpy()
        reference = held_out if self._accepted is None else self._accepted
        self._known = self.detector.profile if self._accepted is None else None
        self._identity = identity(self.detector)  # as it is now, although it may be calibrated again
        self._items = ItemTests(reference, self.seed + 2 * self._n_resets)
        self._block_ranks = OnlineRanks(seed=self.seed + 2 * self._n_resets + 1)
        self._block_evidence = Evidence(WEIGHTS)
        self._repeats = RepeatTest(held_out)
        self._alarm: Alarm | None = None
        self._following: int | None = None  # the item since which a mild drift is to be followed
        self._spacing, self._estimated_at = next(level for level in LEVELS if level >= (self.every or 1)), 0
        self._spaced_from = self._n_seen  # what came before the tests began may have been different
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
        """Whether the alarm is on; it stays on until `reset` or `accept`."""
        return self._alarm is not None

    @property
    def alarm(self) -> Alarm | None:
        """The alarm that is on, with its details; None while it is off."""
        return self._alarm

    @property
    def guarantee(self) -> str:
        """What an alarm is worth, in a sentence or two."""
        rate = f"{self.false_alarm_rate:g}"
        what = "the held-out data" if self._accepted is None else "the inputs that were accepted as normal"
        own = f"On a stream like {what} the alarm ever goes off with a probability of at most {rate}."
        if self.detector.calibration_source == "held_out" or self._accepted is not None:
            return own
        return f"{own} But the held-out data was not: {self.detector.guarantee[0].lower()}{self.detector.guarantee[1:]}"

    def update(self, decision: Decision | None = None, *, vectors: Tensor | None = None) -> bool:
        """Take the next items of the stream in and return whether the alarm is on.

        Args:
            decision: The decision on them, in order.
            vectors: Their discrepancy vectors (N, D), as `detector.discrepancy` returns them: for the test on blocks and to
                name the layers that moved. Alone they are scored here, if the scorer needs nothing else.
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
            for first in range(0, len(scores), BLOCK):  # a large batch must not end long after a change in it
                part = slice(first, first + BLOCK)
                self._take(decision[part], scores[part], None if vectors is None else vectors[part])
            return self.drift

    def _take(self, decision: Decision, scores: Floats, vectors: Tensor | None) -> None:
        n_before, n_tested = self._n_seen, self._items.evidence[0].n
        found, notes = self._items.update(scores)
        repeats = self._repeats.update(scores, vectors, self._items.ranks)
        blocks = [] if vectors is None else self._watch_vectors(vectors)
        self._count(decision, scores, notes)
        if self._alarm is not None:
            return
        over = {
            "repeats": (n_before, 1, repeats - self._log_needed("repeats")),
            "items": (n_before, 1, found[0] - self._log_needed("items")),
        }
        for level, log_values in zip(LEVELS[1:], found[1:], strict=True):
            first = n_before + -n_tested % level
            over[f"every {level}"] = (first, level, log_values - self._log_needed("thinned", len(LEVELS) - 1))
        over["blocks"] = (n_before + len(scores) - 1, BLOCK, np.array(blocks) - self._log_needed("blocks"))
        reached = {name: where for name, where in over.items() if (where[2] >= 0).any()}
        if reached:
            self._raise(reached)
        elif self._following is not None:
            self._follow_up()

    def _raise(self, reached: dict[str, tuple[int, int, Floats]]) -> None:
        """Raise an alarm unless the stream is too correlated for the tests that ask for one, or the drift is to be followed."""
        if "repeats" in reached:
            first, _, excess = reached["repeats"]
            self._alarm = self._describe("repeats", first + 1 + int(np.flatnonzero(excess >= 0)[0]))
            return
        if self._repeats.n_repeats >= N_REPEATS // 2 or (self.every is None and self._n_to_space() < WARM_UP):
            return  # a frozen camera is about to be noticed, or too little is known of how correlated the stream is
        self._estimate_spacing()
        for name, (first, step, excess) in reached.items():
            if (1 if name == "blocks" else step) < self._spacing:
                continue
            place = 0 if name == "blocks" else step * int(np.flatnonzero(excess >= 0)[0])
            alarm = self._describe("blocks" if name == "blocks" else "items", first + 1 + place)
            if self.follow is not None and alarm.n_flagged <= self.follow * alarm.n_since:
                self._following = alarm.since[1] if self._following is None else self._following
                self._follow_up()
            else:
                self._alarm = alarm
            return

    def _estimate_spacing(self) -> None:
        if self.every is not None or (self._spacing > 1 and self._n_seen < self._estimated_at + BLOCK):
            return
        since, _ = self._change(self._n_seen)
        scores = np.array([item.score for item in self._recent])[-self._n_to_space() :]
        self._spacing = spacing(scores, len(scores) - (self._n_seen - since) - 1)
        self._estimated_at = self._n_seen

    def _n_to_space(self) -> int:
        """Return how many of the latest items show how correlated the stream is."""
        return min(len(self._recent), self._n_seen - self._spaced_from)

    def _follow_up(self) -> None:
        """Take a mild drift as the new normal once there are enough items of it."""
        count = self._n_seen - (self._following or 0)
        if count >= TO_ACCEPT:
            self._n_followed += 1
            self._accept(count)

    def _describe(self, test: Test, item: int) -> Alarm:
        since, kind = self._change(item), self._kind(test, item)
        if test == "repeats":
            since = (item - self._repeats.n_repeats, item - N_REPEATS)
        rows = list(islice(self._recent, max(0, len(self._recent) - (self._n_seen - since[1]) - 1), None))
        rows = rows[: item - since[1] + 1]
        order = sorted(range(len(rows)), key=lambda row: (rows[row].p_value, -rows[row].score))
        kinds = [KINDS[row.kind] for row in rows if row.flagged]
        return Alarm(
            item=item,
            test=test,
            since=(max(1, since[0]), max(1, since[1])),
            kind=kind,
            n_since=len(rows),
            n_flagged=sum(row.flagged for row in rows),
            strangeness={name: kinds.count(name) for name in KINDS if name in kinds},
            examples=tuple(since[1] + row for row in order[:N_EXAMPLES]),
        )

    def _gains(self, item: int) -> Floats:
        """Return what each bet gained on the items that are remembered and tested, up to `item`."""
        n_later = self._n_seen - item
        rows = list(self._recent)[-min(len(self._recent), self._items.evidence[0].n) :]
        notes = np.array(rows[: len(rows) - n_later], np.float64)[:, 1:4]
        return self._items.gains(notes)

    def _change(self, item: int) -> tuple[int, int]:
        """Return the items between which the change may have come."""
        gains = self._gains(item)
        first, last = change_interval(gains, BOTH_WEIGHTS)
        return item - len(gains) + 1 + first, item - len(gains) + 1 + last

    def _kind(self, test: Test, item: int) -> Kind:
        if test != "items":
            return "means" if test == "blocks" else "repeats"
        gains = self._gains(item)
        best = np.cumsum(gains[::-1], axis=0).max(axis=0) + np.log(BOTH_WEIGHTS)
        bet = BETS[int(best.argmax()) % len(BETS)]
        return "too typical" if bet.mirrored else "some inputs" if bet.share < 1 else "most inputs"

    def reset(self) -> None:
        """Switch the alarm off and begin the tests anew, with the whole false-alarm rate to spend; counters go on."""
        with self._lock:
            self._n_resets += 1
            self._begin_tests()

    def accept(self) -> None:
        """Take the stream as it is now as normal: the items since the change, or the window if there was none.

        The tests begin anew against these items, with a fresh promise. The threshold and the p-values of single inputs stay as
        they are. `revert` goes back to the held-out data.

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
        self._accepted = np.array([item.score for item in self._recent])[-count:]
        self._learnt = Moments.empty(self._width)
        self._n_accepted += 1
        self.reset()
        self._spaced_from -= count

    def revert(self) -> None:
        """Compare with the held-out data again after `accept`, with a fresh promise."""
        with self._lock:
            self._accepted = None
            self.reset()

    def status(self) -> MonitorStatus:
        """Return everything that is known now."""
        with self._lock:
            recent, alarm = self._window(), self._alarm
            latest = list(accumulate([self._open, *reversed(self._blocks)]))
            window, profile = latest[-1], self._baseline()
            log_value, log_needed = self._strongest()
            layers, n_compared = self._compare(latest, profile)
            return MonitorStatus(
                n_seen=self._n_seen,
                n_ood=self._n_ood,
                n_by_kind=dict(self._n_by_kind),
                n_since_reset=self._items.evidence[0].n,
                n_window=len(recent),
                window_ood_rate=sum(item.flagged for item in recent) / len(recent) if recent else None,
                expected_ood_rate=self._calibration().false_alarm_rate,
                p_value_counts=tuple(self._p_value_counts),
                p_value_sum=self._p_value_sum,
                drift=self.drift,
                drift_at=None if alarm is None else alarm.item,
                drift_by=None if alarm is None else alarm.test,
                alarm=alarm,
                log10_evidence=log_value / math.log(10),
                log10_needed=log_needed / math.log(10),
                discrepancy=window.mean.abs().mean().item() if window.count else None,
                layers=layers,
                n_compared=n_compared,
                compared_with=self._name_of(profile),
                every=self._spacing,
                reference="held-out data" if self._accepted is None else f"{len(self._accepted):,} accepted items",
                n_accepted=self._n_accepted,
                n_followed=self._n_followed,
            )

    def _strongest(self) -> tuple[float, float]:
        """Return the logarithm of the evidence of the test that is nearest to an alarm, and what it needs."""
        items, need = self._items.evidence, self._log_needed
        values = [(items[0].log_value, need("items")), (self._block_evidence.log_value, need("blocks"))]
        if self._spacing > 1:
            thinned = zip(LEVELS[1:], items[1:], strict=True)
            own = [one.log_value for level, one in thinned if level >= self._spacing]
            values = [(max(own), need("thinned", len(LEVELS) - 1))]
        if self._repeats.n_repeats >= N_REPEATS:
            values.append((self._repeats.evidence.log_value, need("repeats")))
        return max(values, key=lambda pair: pair[0] - pair[1])

    def _window(self) -> list[RecentItem]:
        return list(islice(self._recent, max(0, len(self._recent) - self.window), None))

    def window_p_values(self) -> list[float]:
        """Return the p-values in the window, oldest first."""
        with self._lock:
            return [item.p_value for item in self._window()]

    def window_flags(self) -> list[bool]:
        """Return which inputs in the window were flagged, oldest first."""
        with self._lock:
            return [item.flagged for item in self._window()]

    def save(self, path: str | Path) -> None:
        """Write the whole state to a file, whole or not at all."""
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
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise ArtefactError(f"Expected {str(path)!r} to be the state of a monitor, but {error}.") from None

    @staticmethod
    def recent_item(values: list[float]) -> RecentItem:
        """Return an item from the numbers that a state file holds of it."""
        score, online, place, log_null, p_value, flagged, kind = values
        item = RecentItem(score, online, place, log_null, p_value, bool(flagged), int(kind))
        if not 0 <= item.kind < len(KINDS):
            raise ValueError("an item has an unknown kind")
        return item

    def _log_needed(self, test: str, n_parts: int = 1) -> float:
        return math.log(n_parts / (SHARES[test] * self.false_alarm_rate))

    def _count(self, decision: Decision, scores: Floats, notes: Floats) -> None:
        p_values, flags = decision.p_value.tolist(), decision.is_ood.tolist()
        kinds = decision.kind
        self._n_seen += len(p_values)
        self._n_ood += sum(flags)
        for kind in kinds:
            if kind in self._n_by_kind:
                self._n_by_kind[kind] += 1
        for p_value in p_values:
            self._p_value_counts[bisect.bisect_left(P_VALUE_EDGES, p_value)] += 1
            self._p_value_sum += p_value
        numbers = [KINDS.index(kind) for kind in kinds]
        rows = zip(scores.tolist(), notes.tolist(), p_values, flags, numbers, strict=True)
        self._recent.extend(
            RecentItem(score, note[0], note[1], note[2], p, flag, kind) for score, note, p, flag, kind in rows
        )

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

    def _watch_vectors(self, vectors: Tensor) -> list[float]:
        """Add vectors to the open block and return the logarithm of the evidence after each block that this completes."""
        row, found = 0, []
        while row < len(vectors):
            part = vectors[row : row + BLOCK - self._open.count]
            row += len(part)
            self._open = self._open + Moments.of(part)
            if self._open.count == BLOCK:
                found += self._close_block()
        return found

    def _close_block(self) -> list[float]:
        block, profile = self._open, self._baseline()
        self._open = Moments.empty(len(block.mean))
        self._blocks.append(block)
        if len(self._blocks) > self.window // BLOCK:
            self._blocks.popleft()
        if profile is None:
            self._learnt = self._learnt + block
            return []
        score = profile.shifts(block).mean().sqrt().item()
        gains = log_densities(self._block_ranks.p_values([score]))
        return [float(value) for value in self._block_evidence.update(gains)]

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
        window = latest[-1]
        if window.count < 2:
            return (), 0
        certain = window.count >= BLOCK  # means of fewer are not nearly normal
        names, parts = self.detector.layers, [part for part in latest if part.count >= BLOCK] or [window]
        if profile is not None:
            return layer_shifts(names, parts, profile, n_reference=profile.moments.count, certain=certain)
        # The training data's mean, 0 in these vectors. Fresh data always lies a little off it.
        bare = self._bare(replace(window, mean=torch.zeros_like(window.mean)))
        return layer_shifts(names, [window], bare, n_reference=None, certain=certain and self.drift)

    def __repr__(self) -> str:
        state = f"drift since item {self._alarm.item}" if self._alarm is not None else "no drift"
        return f"Monitor({self._n_seen} items, {self._n_ood} OOD, {state})"
