"""Choices of a fit: the scorer, the rows to calibrate on, and the resulting guarantee."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from neuralmean.detector.early_exit import full_of
from neuralmean.errors import CalibrationWarning, InputError, NeuralMeanWarning
from neuralmean.models.layers import Layer, average_tokens
from neuralmean.scorers import SCORERS, Observation, Scorer, make_scorer
from neuralmean.scorers.contract import fit_scorer, score_blocks, view_of
from neuralmean.scorers.folds import FOLDS, folds
from neuralmean.stats.calibration import Calibration, check_enough, examples_for_twice, examples_needed, likely_rates

Source = Literal["held_out", "rotated", "kept_aside", "folds", "all"]

GUARANTEES: dict[str, str] = {
    "held_out": "The false-alarm rate holds for fresh inputs like the held-out ones, which the model must not have been "
    "trained on.",
    "rotated": "The threshold comes from `id_data` slightly rotated, in place of images that the model has not "
    "memorised: an estimate without a guarantee. Pass `held_out` data that the model has not seen.",
    "kept_aside": "The threshold comes from a part of `id_data` kept aside. If the model was trained on these images, expect "
    "more false alarms than requested: pass `held_out` data that the model has not seen.",
    "folds": "The threshold comes from `id_data` itself, by cross-fitting, and holds approximately. If the model was trained on "
    "these images, expect more false alarms than requested: pass `held_out` data that the model has not seen.",
    "all": "The threshold comes from all of `id_data`, because nothing else was learnt from it. If the model was trained on "
    "these images, expect more false alarms than requested: pass `held_out` data that the model has not seen.",
}

SPLIT_FROM = 1000  # with fewer examples the scorer is cross-fitted instead
ASIDE = 0.2
_MLP_FROM = 5000


def check_scorer(choice: str | Scorer | None) -> None:
    """Raise unless `choice` is the name of a scorer, or an object with its methods."""
    if isinstance(choice, str):
        make_scorer(choice)
    elif choice is not None and not all(callable(getattr(choice, name, None)) for name in ("fit", "score")):
        raise InputError(f"Expected `scorer` to be a name or an object with `fit` and `score`, but got {choice!r}.")


def choose_scorer(choice: str | Scorer | None, n_outliers: int | None, layers: Sequence[Layer] = ()) -> Scorer:
    """Return a new scorer of the requested kind, or the best one for the data: `n_outliers` is None without OOD data."""
    tokens = average_tokens(layers)
    if isinstance(choice, str):
        takes_tokens = choice in SCORERS and "tokens" in SCORERS[choice].options
        return make_scorer(choice, {"tokens": tokens} if takes_tokens else None)
    if choice is not None:
        try:
            return copy.deepcopy(choice)  # so that neither a failed fit nor another detector changes it
        except Exception as error:
            raise InputError(
                f"Expected a `scorer` that can be copied, but {type(choice).__name__} cannot: {error}."
            ) from error
    if n_outliers is None:
        return make_scorer("typicality", {"tokens": tokens})
    return make_scorer("guided", {"learner": "mlp" if n_outliers >= _MLP_FROM else "logistic", "tokens": tokens})


def rotate_every(n_rows: int | None, rate: float, confidence: float | None = None) -> int:
    """Return n such that every n-th image is rotated for calibration: all of few images, a fifth of many."""
    enough = max(examples_needed(rate, confidence), 200)
    return 1 if n_rows is None else max(1, min(5, n_rows // enough))


def fit_and_score_inliers(
    scorer: Scorer,
    inliers: Observation,
    outliers: Observation | None,
    *,
    held_out: Observation | None,
    rotated: Observation | None,
    rotated_of: Tensor | None = None,
    rate: float,
    confidence: float | None = None,
) -> tuple[Tensor, Source]:
    """Fit `scorer` and return scores of in-distribution rows to calibrate on, with their source.

    These are the held-out rows if there are any, otherwise rows of rotated images, each scored by a fit without its
    original (given by `rotated_of`). Without either, a random part of many rows is kept out of the fit; few rows are
    cross-fitted, each scored by a fit on the other folds.
    """
    if held_out is not None:
        fit_scorer(scorer, inliers, outliers)
        return score_blocks(scorer, held_out), "held_out"
    if rotated is not None and rotated_of is not None:
        whole = len(rotated) // FOLDS < examples_needed(rate, confidence)
        return _fit_and_score_made(scorer, inliers, outliers, rotated, rotated_of, whole=whole), "rotated"
    needed = check_enough(len(inliers), rate, confidence, kind="in-distribution")
    order = torch.randperm(len(inliers), generator=torch.Generator().manual_seed(0))
    if not getattr(scorer, "learnt", True):  # nothing is learnt from the rows, so all of them count as held out
        fit_scorer(scorer, inliers, outliers)
        return score_blocks(scorer, inliers), "all"
    if len(inliers) >= SPLIT_FROM and len(inliers) * ASIDE >= needed:
        aside, rest = order[: int(len(inliers) * ASIDE)], order[int(len(inliers) * ASIDE) :]
        fit_scorer(scorer, inliers, outliers, rest)
        return score_blocks(scorer, inliers, aside), "kept_aside"
    itself = torch.arange(len(inliers))
    return _fit_and_score_made(scorer, inliers, outliers, inliers, itself, whole=True), "folds"


def choose_scores(
    inliers: Tensor, held_out: Tensor | None, rate: float, confidence: float | None = None
) -> tuple[Tensor, Source]:
    """Return the scores to calibrate on, with their source, for a scorer that learns nothing."""
    if held_out is not None:
        return held_out, "held_out"
    check_enough(len(inliers), rate, confidence, kind="in-distribution")
    return inliers, "all"


def _fit_and_score_made(
    scorer: Scorer,
    inliers: Observation,
    outliers: Observation | None,
    made: Observation,
    origin: Tensor,
    *,
    whole: bool,
) -> Tensor:
    """Fit `scorer` on all rows, and score rows derived from them, each by a fit without its origin."""
    own = getattr(scorer, "fit_and_score", None)
    if own is None:
        return _cross_fit(scorer, inliers, outliers, made, origin)
    views = (None if rows is None else view_of(scorer, rows) for rows in (inliers, outliers, made))
    scores: Tensor = own(*views, origin, whole=whole)
    return scores[~scores.isnan()]


def _cross_fit(
    scorer: Scorer, inliers: Observation, outliers: Observation | None, made: Observation, origin: Tensor
) -> Tensor:
    """Fit `scorer` on all rows, and score rows derived from them by copies fitted on the other folds.

    Each copy has its own scale; its scores are mapped to that of `scorer` by mean and deviation of the scores of its own rows.
    """
    fit_scorer(scorer, inliers, outliers)
    known = score_blocks(scorer, inliers)
    scores = known.new_full((len(made),), torch.nan)
    for apart in folds(len(inliers)):
        twin, rest, scored = copy.deepcopy(scorer), (~apart).nonzero()[:, 0], apart[origin].nonzero()[:, 0]
        if not len(scored):
            continue
        fit_scorer(twin, inliers, outliers, rest)
        fitted = score_blocks(twin, inliers, rest)
        ratio = known.std() / fitted.std().clamp_min(torch.finfo(fitted.dtype).tiny)
        scores[scored] = (score_blocks(twin, made, scored) - fitted.mean()) * ratio + known.mean()
    return scores[~scores.isnan()]


def warn_if_weak(source: Source, calibration: Calibration | None) -> None:
    """Warn if the threshold does not come from held-out data, with the likely range of its rate."""
    if source == "held_out":
        return
    text = GUARANTEES[source]
    if calibration is not None:
        rate = calibration.false_alarm_rate
        low, high = likely_rates(len(calibration.scores), calibration.level)
        text += f" From {len(calibration.scores)} scores, the rate is {100 * low:.2g} to {100 * high:.2g} % at best."
        if high > 2 * rate:
            enough = examples_for_twice(rate)
            text += f" {enough} examples would keep it below twice the {100 * rate:g} % requested."
    warnings.warn(text, CalibrationWarning, stacklevel=3)


def warn_if_left_out(scorer: Scorer) -> None:
    """Warn about terms of the scorer that are left out for lack of examples."""
    left_out: dict[str, str] = getattr(full_of(scorer), "left_out", dict)()
    few = {name: reason for name, reason in left_out.items() if "examples" in reason}
    for name, reason in few.items():
        warnings.warn(f"The term {name!r} of the score is left out, as {reason}.", NeuralMeanWarning, stacklevel=3)


def warn_if_shared(inliers: Sequence[bytes], held_out: Sequence[bytes]) -> None:
    """Warn if some held-out rows are also among the rows that were fitted on, given a digest of each."""
    seen = set(inliers)
    shared = sum(digest in seen for digest in held_out)
    if shared:
        warnings.warn(
            f"{shared} of {len(held_out)} held-out examples are also in `id_data`: the threshold will be too low and false "
            "alarms more frequent than requested. Keep the two apart.",
            CalibrationWarning,
            stacklevel=3,
        )
