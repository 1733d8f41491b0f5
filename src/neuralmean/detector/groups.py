"""Groups of inputs, each with a false-alarm rate of its own: labels that come with the inputs, or the model's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor

from neuralmean.detector.decision import Decision
from neuralmean.detector.observed import main_rows
from neuralmean.errors import InputError

PREDICTED = "predicted"
Groups: TypeAlias = "Sequence[object] | str"


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


def decide_by_group(
    decision: Decision, output: Any, groups: Sequence[object] | None, grouped_by: str | None
) -> Decision:
    """Return a decision with the group of each input.

    Args:
        decision: The decision without groups.
        output: The model's output, from which groups by prediction are taken.
        groups: The labels that came with the inputs; None if none did.
        grouped_by: How the detector was calibrated: `"given"`, `"predicted"`, or None for no groups.
    """
    if groups is None and grouped_by == PREDICTED:
        groups = predicted_labels(main_rows(output, len(decision)))
    if groups is None:
        return decision  # reading its p-values raises an error that asks for the groups
    if grouped_by is None:
        raise InputError(
            "Expected no `groups`, as the detector was not calibrated by group. Call `calibrate` with them."
        )
    decision.calibration.parts(groups, len(decision))  # raises if there are too few
    return replace(decision, groups=tuple(map(str, groups)))
