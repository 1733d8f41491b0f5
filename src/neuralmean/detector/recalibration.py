"""A new threshold for a fitted detector, whose scorer and reference are kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from neuralmean.detector.early_exit import CascadeScorer
from neuralmean.detector.groups import LENGTH, PREDICTED, Groups, length_labels, length_ranges, predicted_labels
from neuralmean.detector.learnt import FitSetup, Learnt
from neuralmean.detector.observed import Observed
from neuralmean.errors import InputError
from neuralmean.scorers import Observation
from neuralmean.stats.calibration import Calibration, as_labels, examples_needed


def recalibrate(
    setup: FitSetup,
    learnt: Learnt,
    passes: Iterable[Observed],
    groups: Groups | None,
    rate: float,
    confidence: float | None,
) -> Learnt:
    """Return what was learnt, with calibration, profile and kinds from held-out examples.

    Args:
        setup: The constructor's arguments.
        learnt: What was learnt so far.
        passes: Forward passes over the held-out examples.
        groups: A label for each example, `"predicted"` for the model's own predictions, `"length"`, or None.
        rate: The false-alarm rate.
        confidence: As for `Detector.fit`.
    """
    if isinstance(groups, str) and groups not in (PREDICTED, LENGTH):
        raise InputError(f"Expected `groups` to be labels, {PREDICTED!r} or {LENGTH!r}, but got {groups!r}.")
    groups = groups if groups is None or isinstance(groups, str) else as_labels(groups)
    scores, kind_scores, predictions, lengths = [], [], list[str](), list[int]()
    builder, kinds = setup.empty_profile(), learnt.kinds
    for seen in passes:
        scores.append(seen.score)
        lengths.extend(seen.lengths or ())
        if groups == PREDICTED:
            predictions.extend(predicted_labels(seen.main_output))
        if seen.vectors is None or seen.stats is None:
            continue
        builder.add(seen.vectors)
        if kinds is not None:
            kind_scores.append(kinds.score(Observation(seen.vectors, seen.stats.logits, seen.stats.feature)))
    starts = length_ranges(lengths, examples_needed(rate, confidence))
    if groups is None and len(starts) > 1 and not isinstance(learnt.scorer, CascadeScorer):
        groups = LENGTH
    if groups == LENGTH and not lengths:
        raise InputError("Expected tokens with groups by length, but got inputs of another kind.")
    by_name = {PREDICTED: predictions, LENGTH: length_labels(lengths, starts)}
    labels = None if groups is None else by_name[groups] if isinstance(groups, str) else groups
    profile = builder.profile()
    return replace(
        learnt,
        calibration=Calibration.of(torch.cat(scores), rate, confidence=confidence, groups=labels),
        source="held_out",
        profile=profile,
        facts={**learnt.facts, "n_held_out": profile.moments.count},
        kinds=None if kinds is None else kinds.calibrated(torch.cat(kind_scores), rate),
        grouped_by=groups if groups is None or isinstance(groups, str) else "given",
    )


def change_rate(learnt: Learnt, known: Calibration, rate: float, confidence: float | None) -> Learnt:
    """Return what was learnt, with the threshold of another false-alarm rate from the scores of a calibration."""
    if isinstance(learnt.scorer, CascadeScorer):
        raise InputError("Expected a detector without early exit, whose thresholds were set together. Fit again.")
    groups = None if known.group_of is None else [known.group_names[number] for number in known.group_of.tolist()]
    return replace(learnt, calibration=Calibration.of(known.scores, rate, confidence=confidence, groups=groups))
