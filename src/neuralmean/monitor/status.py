"""Results of a `Monitor`: its status, an alarm, and the layers that moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Test = Literal["items", "blocks", "repeats"]
Kind = Literal["most inputs", "some inputs", "too typical", "means", "repeats"]

KIND_SENTENCES: dict[str, str] = {
    "most inputs": "The inputs as a whole look more unusual than before.",
    "some inputs": "Some inputs look unusual; the others are as before.",
    "too typical": "Inputs look more typical than they should, as if they were all much the same.",
    "means": "Single inputs look as before, but their mean has moved.",
    "repeats": "The same input comes again and again, as from a camera that froze.",
}


@dataclass(frozen=True)
class LayerShift:
    """How far the mean activation of a layer has moved.

    Attributes:
        layer: Dotted name of the layer.
        shift: Root mean square of the move over the layer's live channels, in standard deviations of single inputs, minus what
            chance explains.
        moved: Whether chance is ruled out as an explanation; without a profile, only after an alarm.
    """

    layer: str
    shift: float
    moved: bool


@dataclass(frozen=True)
class Alarm:
    """One alarm. Items are counted from 1.

    Attributes:
        item: The item that raised it.
        test: The test that raised it: scores of single items, means of blocks, or repeats.
        since: The first and the last item with which the change may have begun, with a probability of 90 % if the change is
            one of those that the monitor bets on.
        kind: The kind of change; `KIND_SENTENCES` has a sentence for each.
        n_since: Items from the end of that interval to the alarm.
        n_flagged: Number of flagged items among these.
        strangeness: Number of flagged items of each `Decision.kind`.
        examples: The most unusual items since the change, most unusual first.
    """

    item: int
    test: Test
    since: tuple[int, int]
    kind: Kind
    n_since: int
    n_flagged: int
    strangeness: dict[str, int]
    examples: tuple[int, ...]

    @property
    def sentence(self) -> str:
        """What changed, and which kind of strangeness the flagged inputs have."""
        looks, shows = (
            self.strangeness.get(name, 0) + self.strangeness.get("both", 0) for name in ("appearance", "content")
        )
        if not looks + shows:
            return KIND_SENTENCES[self.kind]
        look, show = ("looks" if looks == 1 else "look"), ("shows" if shows == 1 else "show")
        return (
            f"{KIND_SENTENCES[self.kind]} Of {self.n_flagged} flagged, {looks} {look} unlike the training data and {shows} "
            f"{show} what belongs to no known class."
        )


@dataclass(frozen=True)
class MonitorStatus:
    """The state of a `Monitor` at one moment.

    Attributes:
        n_seen: Items since the beginning.
        n_ood: Items that were flagged.
        n_by_kind: The flagged items by kind: `appearance`, `content`, `both` and `unsure`.
        n_since_reset: Items that the current test has seen.
        n_window: Items in the window.
        window_ood_rate: Share of the window that was flagged; None while it is empty.
        expected_ood_rate: Share that is flagged without a change.
        p_value_counts: Items since the beginning by p-value, for each upper edge in `P_VALUE_EDGES`.
        p_value_sum: Sum of all p-values.
        drift: Whether the alarm is on; it stays on until `reset` or `accept`.
        drift_at: The item (counted from 1) that raised it.
        drift_by: The test that raised it: `"items"`, `"blocks"` or `"repeats"`.
        alarm: The alarm with its details; None while it is off.
        log10_evidence: The strongest of the tests, as a power of ten against "nothing has changed".
        log10_needed: The value at which that test alarms.
        discrepancy: The paper's batch-level discrepancy of the window; None without vectors.
        layers: The watched layers, those that moved most first; empty without vectors.
        n_compared: Number of items behind `layers`: the window, or a latest part of it that shows the change more clearly.
        compared_with: The data they are compared with.
        every: One of every so many items is used: 1 for independent items, more for correlated ones such as video frames.
        reference: The data the stream is compared with.
        n_accepted: Number of calls of `accept`.
        n_followed: Number of mild drifts that the monitor accepted by itself.
    """

    n_seen: int
    n_ood: int
    n_by_kind: dict[str, int]
    n_since_reset: int
    n_window: int
    window_ood_rate: float | None
    expected_ood_rate: float
    p_value_counts: tuple[int, ...]
    p_value_sum: float
    drift: bool
    drift_at: int | None
    drift_by: str | None
    alarm: Alarm | None
    log10_evidence: float
    log10_needed: float
    discrepancy: float | None
    layers: tuple[LayerShift, ...]
    n_compared: int
    compared_with: str
    every: int
    reference: str
    n_accepted: int
    n_followed: int
