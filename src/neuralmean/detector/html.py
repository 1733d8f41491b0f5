"""Notebook views of a decision, an explanation and a detector: small tables without scripts or styles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from neuralmean.detector.decision import Decision, Explanation
    from neuralmean.detector.state import DetectorState

MAX_ROWS = 10


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> str:
    """Return an HTML table of escaped texts.

    Example:
        >>> table(["a"], [["<b>"]])
        '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def decision_table(decision: Decision) -> str:
    """Return the first inputs of a decision as a table, with the number of flagged inputs above it."""
    flagged, count = int(decision.is_ood.sum()), len(decision)
    first = decision[:MAX_ROWS]
    shown = zip(first.score.tolist(), first.p_value.tolist(), first.is_ood.tolist(), first.kind, strict=True)
    rows = [
        (str(index), f"{score:.4g}", f"{p_value:.3g}", f"OOD, {kind}" if is_ood else "in distribution")
        for index, (score, p_value, is_ood, kind) in enumerate(shown)
    ]
    more = f"; the first {MAX_ROWS}" if count > MAX_ROWS else ""
    caption = f"{flagged} of {count} out of distribution (threshold {decision.threshold:.4g}){more}"
    return table(["input", "score", "p-value", "verdict"], rows, caption)


def explanation_table(explanation: Explanation) -> str:
    """Return the layers that contribute most to the score of each of the first inputs."""
    count = len(explanation.score)
    rows = []
    for row in range(min(count, MAX_ROWS)):
        layers = ", ".join(f"{name} {value:+.3g}" for name, value in explanation.top_layers(row, n=3))
        rows.append((str(row), f"{explanation.score[row].item():.4g}", layers))
    how = "exact" if explanation.exact else "to first order"
    more = f"; the first {MAX_ROWS} of {count}" if count > MAX_ROWS else ""
    return table(["input", "score", "largest contributions"], rows, f"Contributions of layers, {how}{more}")


def detector_table(detector: DetectorState) -> str:
    """Return a table of what a detector watches, what it learnt and the guarantee of its threshold."""
    calibration = detector.calibration
    rows = [
        ("layers, channels watched", f"{len(detector.watched)}, {len(detector.channels)}"),
        ("scorer", getattr(detector.scorer, "name", type(detector.scorer).__name__)),
    ]
    if calibration is None:
        rows.append(("threshold", "none yet: call fit or calibrate"))
    else:
        rows.append(("threshold", f"{detector.threshold:.4g} for {100 * detector.false_alarm_rate:g} % false alarms"))
        rows.append(("guarantee", detector.guarantee))
    return table(["Detector of", type(detector.model).__name__], rows)
