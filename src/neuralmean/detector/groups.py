"""Groups of inputs, each with its own threshold: given labels, the model's prediction, or ranges of lengths.

The mean over few tokens varies more than the mean over many, so token inputs are compared with others of similar length.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from neuralmean.detector.decision import Decision
from neuralmean.detector.observed import Observed, main_rows
from neuralmean.errors import InputError
from neuralmean.stats.calibration import Calibration, as_labels

PREDICTED = "predicted"
LENGTH = "length"
GROUPED_BY = ("given", PREDICTED, LENGTH)
_MOST_RANGES = 8
_RANGE = re.compile(r"(\d+) tokens or more")
Groups: TypeAlias = "Sequence[object] | str"


def length_ranges(lengths: Sequence[int], needed: int) -> list[int]:
    """Return the start of each range of lengths, so that the ranges have about equally many examples.

    Args:
        lengths: Lengths of the held-out examples.
        needed: Minimum number of examples per range.

    Example:
        >>> length_ranges([*range(1, 41)] * 20, 19)
        [0, 11, 21, 31]
    """
    ordered = sorted(lengths)
    if not ordered:
        return [0]
    count = max(1, min(_MOST_RANGES, len(ordered) // max(200, 4 * needed)))
    starts = {ordered[len(ordered) * part // count] for part in range(1, count)}
    return [0, *sorted(start for start in starts if start > ordered[0])]


def length_labels(lengths: Iterable[int], starts: Sequence[int]) -> list[str]:
    """Return the label of the range of each length.

    Example:
        >>> length_labels([3, 11, 500], [0, 11])
        ['0 tokens or more', '11 tokens or more', '11 tokens or more']
    """
    return [f"{starts[max(0, bisect_right(starts, length) - 1)]} tokens or more" for length in lengths]


def labels_of_lengths(lengths: Sequence[int] | None, names: Sequence[str]) -> list[str]:
    """Return the label of the range of each length, given the labels of all ranges."""
    if lengths is None:
        raise InputError("Expected tokens, as the detector was calibrated by length, but got inputs of another kind.")
    return length_labels(lengths, starts_of(names))


def starts_of(names: Iterable[str]) -> list[int]:
    """Return the starts of the ranges with these labels."""
    found = [_RANGE.fullmatch(name) for name in names]
    if not found or None in found:
        raise InputError("Expected groups that are ranges of lengths, but got others.")
    return sorted(int(match[1]) for match in found if match)


def predicted_labels(output: Tensor | None) -> list[str]:
    """Return the predicted class of each input as a label, given the model's output (N, K).

    Example:
        >>> import torch
        >>> predicted_labels(torch.tensor([[0.1, 2.0, 0.3], [4.0, 0.0, 0.0]]))
        ['1', '0']
    """
    if output is None or output.dim() != 2 or output.shape[1] < 2:
        shape = None if output is None else tuple(output.shape)
        raise InputError(
            f"Expected a model with an output of shape (N, classes) for groups by prediction, but got {shape}. "
            "Pass labels as `groups` instead."
        )
    return [str(label) for label in output.argmax(dim=1).tolist()]


def refuse_labels(grouped_by: str | None, what: str) -> None:
    """Raise if each input of a detector needs a label, which `what` does not take."""
    if grouped_by == "given":
        raise InputError(
            f"Expected a detector without groups for {what}, which takes no labels of inputs, but this one was calibrated with "
            "labels. Fit it without groups, or with groups by prediction."
        )


def decide_all(
    passes: Iterable[Observed], calibration: Calibration, groups: Sequence[object] | None, grouped_by: str | None
) -> Decision:
    """Return one decision on the inputs of several passes; the arguments are those of `decide_by_group`."""
    scores, kinds, labels = [], [], list[str]()
    for seen in passes:
        scores.append(seen.score)
        if (found := seen.kind_p_values()) is not None:
            kinds.append(found)
        if seen.decision is not None:
            labels.extend(seen.decision.groups or ())
    decision = Decision(torch.cat(scores), calibration, torch.cat(kinds) if kinds else None)
    if groups is None and grouped_by in (PREDICTED, LENGTH):
        groups = labels
    return decision if groups is None else decide_by_group(decision, None, groups, grouped_by)


def decide_by_group(
    decision: Decision,
    output: Any,
    groups: Sequence[object] | None,
    grouped_by: str | None,
    lengths: Sequence[int] | None = None,
) -> Decision:
    """Return a decision with the group of each input.

    Args:
        decision: The decision without groups.
        output: The model's output, for groups by prediction.
        groups: The labels that came with the inputs; None if none did.
        grouped_by: How the detector was calibrated: `"given"`, `"predicted"`, `"length"`, or None for no groups.
        lengths: How many tokens each input has; None if the inputs are not tokens.
    """
    if groups is None and grouped_by == LENGTH:
        groups = labels_of_lengths(lengths, decision.calibration.group_names)
    if groups is None and grouped_by == PREDICTED:
        groups = predicted_labels(main_rows(output, len(decision)))
    if groups is None:
        return decision  # reading its p-values raises an error that requests the groups
    if grouped_by is None:
        raise InputError(
            "Expected no `groups`, as the detector was not calibrated by group. Call `calibrate` with them."
        )
    decision.calibration.parts(groups, len(decision))  # raises if there are too few
    return replace(decision, groups=tuple(as_labels(groups)))
