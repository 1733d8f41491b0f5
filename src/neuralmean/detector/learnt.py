"""What `fit` learns: one pass over the data, then the scorer, then the threshold.

Nothing here changes a detector: `learn` returns a `Learnt`, which the detector adopts as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuralmean.data.batch import count_rows
from neuralmean.detector import fitting
from neuralmean.detector.early_exit import CascadeScorer, check_statistic, full_of
from neuralmean.detector.fit_rows import FitData, RowStore, gather
from neuralmean.detector.groups import LENGTH, length_labels, length_ranges
from neuralmean.detector.kinds import Kinds
from neuralmean.models.layers import Layer
from neuralmean.recording.observer import FIND_HEAD, ChannelStats, HeadChoice, Observer, PermuteBlocks, RotateSome
from neuralmean.recording.reference import Reference
from neuralmean.scorers import AverageScorer, Observation, Scorer
from neuralmean.scorers.contract import needs_of, score_rows
from neuralmean.stats.calibration import Calibration, check_confidence, check_enough, check_rate, examples_needed
from neuralmean.stats.discrepancy import Statistic, Vectors, vector_layers
from neuralmean.stats.held_out_profile import HeldOutProfile, ProfileBuilder
from neuralmean.stats.moments import Moments

if TYPE_CHECKING:
    from neuralmean.detector.regions import Regions


@dataclass(frozen=True, eq=False)
class Learnt:
    """Everything that `fit` and `calibrate` set.

    Attributes:
        reference: Channel statistics of the training data; None if they are unknown until `fit`.
        scorer: Turns vectors into scores.
        calibration: The held-out scores and the threshold; None before `fit`.
        source: Where the calibration scores come from.
        scale: Moments of the vectors, for `statistic="both"`.
        profile: Statistics of held-out data, for a `Monitor`; None without held-out data.
        head: Name of the layer that gives the logits; None if the scorer does not need them.
        facts: When the detector was fitted, and on how many examples.
        grouped_by: `"given"` if each call brings the groups of its inputs, `"predicted"` if the model's prediction is the group,
            `"length"` if it is the range of the number of tokens; None without groups.
        kinds: Distinguishes appearance from content; None if no rows were kept to learn it from.
        regions: Statistics of regions of images; None unless `fit_regions` was called.
    """

    reference: Reference | None
    scorer: Scorer
    calibration: Calibration | None = None
    source: fitting.Source | None = None
    scale: Moments | None = None
    profile: HeldOutProfile | None = None
    head: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    grouped_by: str | None = None
    kinds: Kinds | None = None
    regions: Regions | None = None


@dataclass(frozen=True, eq=False)
class FitSetup:
    """The constructor's arguments that `fit` needs.

    Attributes:
        model: The model.
        layers: The watched layers.
        statistic: The statistic of the discrepancy.
        scorer: The requested scorer; None chooses the best one for the data.
        reference: The reference, if it is known already.
        head: The requested head: a name, False for none, None to find it.
    """

    model: nn.Module
    layers: tuple[Layer, ...]
    statistic: Statistic
    scorer: str | Scorer | None
    reference: Reference | None
    head: str | bool | None

    def observer(self, head: HeadChoice) -> Observer:
        """Return an observer of the model."""
        return Observer(self.model, self.layers, variance=self.statistic != "mean", head=head)

    def empty_profile(self) -> ProfileBuilder:
        """Return a profile of no examples."""
        return ProfileBuilder(vector_layers(self.layers, self.statistic), len(self.layers))

    def head_for(self, scorer: Scorer) -> HeadChoice:
        """Return the head that a scorer needs: none, the requested one, or the one to be found."""
        if not needs_of(scorer) or self.head is False:
            return None
        return self.head if isinstance(self.head, str) else FIND_HEAD


@dataclass(frozen=True)
class FitOptions:
    """The options of one `fit`; see `Detector.fit`."""

    rate: float
    early_exit: bool
    batch_size: int
    confidence: float | None = None

    def check(self, statistic: Statistic) -> None:
        """Raise if an option is out of range or incompatible with the statistic."""
        check_rate(self.rate)
        check_confidence(self.confidence)
        if self.early_exit:
            check_statistic(statistic)


def learn(setup: FitSetup, id_data: Any, ood_data: Any, held_out: Any, options: FitOptions) -> tuple[Learnt, Observer]:
    """Fit a scorer and its threshold, and return what was learnt with the observer that was used."""
    check_count(id_data if held_out is None else held_out, held_out is not None, options)
    n_outliers = None if ood_data is None else count_rows(ood_data) or 0
    scorer = fitting.choose_scorer(setup.scorer, n_outliers, setup.layers)
    observer = setup.observer(setup.head_for(scorer))
    # The average learns nothing from the rows, so they are scored batch by batch. (A user's scorer has a `fit`.)
    streams = setup.reference is not None and setup.statistic != "both" and not options.early_exit
    streams = streams and type(scorer) is AverageScorer
    profile = setup.empty_profile()
    augment = _augmentation(scorer, id_data, ood_data, held_out, options)
    data = gather(
        observer,
        id_data,
        ood_data,
        held_out,
        make=partial(
            RowStore,
            statistic=setup.statistic,
            score=partial(_score, scorer, Vectors(setup.statistic, setup.reference)) if streams else None,
            digests=held_out is not None,
            layers=() if setup.reference else setup.layers,
        ),
        seen=profile,
        augment=augment,
        batch_size=options.batch_size,
    )
    if data.held_out is not None:
        fitting.warn_if_shared(data.inliers.digests, data.held_out.digests)
    reference = setup.reference or data.inliers.reference
    scale = data.inliers.moments(reference) if setup.statistic == "both" else None
    if options.early_exit:
        scorer = CascadeScorer.around(scorer, setup.layers, repeated=observer.recorder.repeated)
    kinds = None
    if streams:
        scores, source = _streamed_scores(data, options)
    else:
        parts = data.into_observations(partial(observe, Vectors(setup.statistic, reference, scale)))
        origin = torch.tensor(augment.origin) if isinstance(augment, RotateSome) else None
        scores, source = fitting.fit_and_score_inliers(
            scorer, **parts, rotated_of=origin, rate=options.rate, confidence=options.confidence
        )
        kinds = _learn_kinds(setup, scorer, parts, options.rate)
    facts = {"when": datetime.now(timezone.utc).isoformat(timespec="seconds"), **data.counts()}
    by_length = _by_length(data.held_out, options)
    grouped_by = LENGTH if by_length else None
    calibration = Calibration.of(scores, options.rate, confidence=options.confidence, groups=by_length)
    learnt = Learnt(
        reference,
        scorer,
        calibration,
        source,
        scale,
        head=observer.head,
        facts=facts,
        kinds=kinds,
        grouped_by=grouped_by,
    )
    return (learnt if held_out is None else replace(learnt, profile=profile.profile())), observer


def _by_length(held_out: RowStore | None, options: FitOptions) -> list[str] | None:
    """Return the range of lengths of each held-out row; None unless the inputs are tokens of varying length."""
    if held_out is None or options.early_exit:
        return None
    starts = length_ranges(held_out.lengths, examples_needed(options.rate, options.confidence))
    return length_labels(held_out.lengths, starts) if len(starts) > 1 else None


def _learn_kinds(setup: FitSetup, scorer: Scorer, parts: dict[str, Any], rate: float) -> Kinds:
    """Learn appearance and content from the rows of a fit, calibrated on those that the threshold comes from."""
    inliers = parts["inliers"]
    # Without other rows, calibrate on those learnt from: only a few numbers are learnt.
    others = next((rows for name in ("held_out", "rotated") if (rows := parts[name]) is not None), inliers)
    layers = vector_layers(setup.layers, setup.statistic)
    return Kinds.learn(full_of(scorer), inliers, others, layers, len(setup.layers), rate)


def check_count(data: Any, is_held_out: bool, options: FitOptions) -> None:
    """Raise before any work if there are known to be too few examples for the requested threshold."""
    count = count_rows(data)
    if count:  # empty data is reported when it is read
        kind = "held-out" if is_held_out else "in-distribution"
        check_enough(count, options.rate, options.confidence, kind=kind)


def observe(vectors: Vectors, stats: ChannelStats) -> Observation:
    """Return a scorer's view of channel statistics."""
    return Observation(vectors(stats.means, stats.variances), stats.logits, stats.feature)


def _augmentation(
    scorer: Scorer, id_data: Any, ood_data: Any, held_out: Any, options: FitOptions
) -> PermuteBlocks | RotateSome | None:
    """Return how to augment the in-distribution images: crafted outliers, images to calibrate on, or None."""
    if ood_data is None and getattr(scorer, "uses_outliers", False):
        return PermuteBlocks()
    if held_out is None and needs_of(scorer):
        # Logits and features of memorised images differ from those of fresh images.
        return RotateSome(fitting.rotate_every(count_rows(id_data), options.rate, options.confidence))
    return None


def _score(scorer: Scorer, vectors: Vectors, stats: ChannelStats) -> tuple[Tensor, Tensor]:
    observation = observe(vectors, stats)
    return score_rows(scorer, observation), observation.vector


def _streamed_scores(data: FitData, options: FitOptions) -> tuple[Tensor, fitting.Source]:
    held_out = None if data.held_out is None else data.held_out.scores
    return fitting.choose_scores(data.inliers.scores, held_out, options.rate, options.confidence)
