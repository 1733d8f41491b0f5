"""Counters of a `Monitor`: items, flagged items by kind, and p-values."""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass, field
from typing import Any

from neuralmean.detector.decision import Decision
from neuralmean.detector.kinds import FLAGGED_KINDS
from neuralmean.monitor.checked import whole

P_VALUE_EDGES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@dataclass
class Counters:
    """Counts since the beginning, unaffected by resets; see `MonitorStatus`."""

    n_seen: int = 0
    n_ood: int = 0
    n_by_kind: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FLAGGED_KINDS, 0))
    p_value_counts: list[int] = field(default_factory=lambda: [0] * len(P_VALUE_EDGES))
    p_value_sum: float = 0.0

    def add(self, decision: Decision) -> None:
        """Count the next items."""
        self.n_seen += len(decision)
        self.n_ood += int(decision.is_ood.sum())
        for kind in decision.kind:
            if kind != "typical":
                self.n_by_kind[kind] += 1
        for p_value in decision.p_value.tolist():
            self.p_value_counts[bisect.bisect_left(P_VALUE_EDGES, p_value)] += 1
            self.p_value_sum += p_value

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON values."""
        return asdict(self)

    @classmethod
    def restore(cls, values: dict[str, Any]) -> Counters:
        """Return the counters as they were at `state`.

        Raises:
            ValueError: Values that no `state` could have returned.
        """
        n_seen, n_ood = (whole(values[name], "count") for name in ("n_seen", "n_ood"))
        by_kind: dict[str, int] = {kind: whole(values["n_by_kind"][kind], "count") for kind in FLAGGED_KINDS}
        counts, total = [whole(count, "count") for count in values["p_value_counts"]], values["p_value_sum"]
        if len(counts) != len(P_VALUE_EDGES) or sum(counts) != n_seen or n_ood > n_seen:
            raise ValueError("the counts do not add up")
        if sum(by_kind.values()) != n_ood:
            raise ValueError("the counts by kind do not add up")
        if not isinstance(total, (int, float)) or not 0 <= total <= n_seen:
            raise ValueError("the p-values do not add up")
        return cls(n_seen, n_ood, by_kind, counts, float(total))
