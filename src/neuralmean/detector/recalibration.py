"""A new threshold for a fitted detector, from held-out examples; the scorer and the reference stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from neuralmean.detector.groups import PREDICTED, Groups, predicted_labels
from neuralmean.detector.learnt import FitSetup, Learnt
from neuralmean.detector.observed import Observed
from neuralmean.errors import InputError
from neuralmean.scorers import Observation
from neuralmean.stats.calibration import Calibration


def recalibrate(
    setup: FitSetup,
    learnt: Learnt,
    passes: Iterable[Observed],
    groups: Groups | None,
    rate: float,
    confidence: float | None,
) -> Learnt:
    """Return what was learnt with the calibration, profile and kinds of held-out examples.

    Args:
        setup: What the detector was constructed with.
        learnt: What it has learnt so far.
        passes: Forward passes over the held-out examples.
        groups: A label for each example, `"predicted"` for the model's own predictions, or None.
        rate: The false-alarm rate.
        confidence: As for `Detector.fit`.
    """
    is_predicted = isinstance(groups, str)
    if is_predicted and groups != PREDICTED:
        raise InputError(f"Expected `groups` to be labels or {PREDICTED!r}, but got {groups!r}.")
    scores, kind_scores, predictions = [], [], list[str]()
    builder, kinds = setup.empty_profile(), learnt.kinds
    for seen in passes:
        scores.append(seen.score)
        if is_predicted:
            predictions.extend(predicted_labels(seen.main_output))
        if seen.vectors is None or seen.stats is None:
            continue
        builder.add(seen.vectors)
        if kinds is not None:
            kind_scores.append(kinds.score(Observation(seen.vectors, seen.stats.logits, seen.stats.feature)))
    labels = predictions if is_predicted else None if groups is None else list(groups)
    profile = builder.profile()
    return replace(
        learnt,
        calibration=Calibration.of(torch.cat(scores), rate, confidence=confidence, groups=labels),
        source="held_out",
        profile=profile,
        facts={**learnt.facts, "n_held_out": profile.moments.count},
        kinds=None if kinds is None else kinds.calibrated(torch.cat(kind_scores), rate),
        grouped_by=None if groups is None else PREDICTED if is_predicted else "given",
    )
