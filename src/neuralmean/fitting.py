"""How a detector learns: which scorer, which rows for what, and what the threshold is worth."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from neuralmean.calibration import examples_needed
from neuralmean.errors import CalibrationError, CalibrationWarning, InputError
from neuralmean.scorers import Observation, Scorer, make_scorer
from neuralmean.scorers.base import Scores

Source = Literal["held_out", "rotated", "kept_aside", "folds", "all"]

GUARANTEES: dict[str, str] = {
    "held_out": "The false-alarm rate holds for fresh inputs like the held-out ones, which the model must not have been "
    "trained on.",
    "rotated": "The threshold comes from `id_data` slightly turned, which stands in for images that the model has not "
    "memorised: an estimate without a guarantee. Pass `held_out` data that the model has not seen.",
    "kept_aside": "The threshold comes from a part of `id_data` kept aside. If the model was trained on these images, expect "
    "more false alarms than asked for: pass `held_out` data that the model has not seen.",
    "folds": "The threshold comes from `id_data` itself, by cross-fitting, and holds approximately. If the model was trained on "
    "these images, expect more false alarms than asked for: pass `held_out` data that the model has not seen.",
    "all": "The threshold comes from all of `id_data`, as nothing else was learnt from it. If the model was trained on these "
    "images, expect more false alarms than asked for: pass `held_out` data that the model has not seen.",
}

SPLIT_FROM = 1000  # with fewer examples none is kept aside: the scorer is cross-fitted instead
ASIDE = 0.2
FOLDS = 5
_MLP_FROM = 5000


def check_scorer(choice: str | Scorer | None) -> None:
    """Raise unless it is the name of a scorer, or an object that can be one."""
    if isinstance(choice, str):
        make_scorer(choice)
    elif choice is not None and not all(callable(getattr(choice, name, None)) for name in ("fit", "score")):
        raise InputError(f"Expected `scorer` to be a name or an object with `fit` and `score`, but got {choice!r}.")


def choose_scorer(choice: str | Scorer | None, n_outliers: int | None) -> Scorer:
    """Return a new scorer of the kind asked for, or the best one for the data: `n_outliers` is None without OOD data."""
    if isinstance(choice, str):
        return make_scorer(choice)
    if choice is not None:
        try:
            return copy.deepcopy(choice)  # so that a fit that fails, or another detector's, does not change it
        except Exception as error:
            raise InputError(
                f"Expected a `scorer` that can be copied, but {type(choice).__name__} cannot: {error}."
            ) from error
    if n_outliers is None:
        return make_scorer("typicality")
    return make_scorer("mlp" if n_outliers >= _MLP_FROM else "logistic")


def rotate_every(n_rows: int | None, rate: float) -> int:
    """Return of how many images one is turned to calibrate on: all of few, a fifth of many."""
    enough = max(examples_needed(rate), 200)
    return 1 if n_rows is None else max(1, min(5, n_rows // enough))


def needs_of(scorer: Scores) -> frozenset[str]:
    """Return what of "output" and "feature" a scorer needs besides the vector."""
    return frozenset(getattr(scorer, "needs", ()))


def view_of(scorer: Scores, observation: Observation) -> Any:
    """Return what a scorer is called with: the vectors alone, or the observation where it needs more."""
    return observation if needs_of(scorer) else observation.vector


def fit_scorer(
    scorer: Scorer, inliers: Observation, outliers: Observation | None, chosen: Tensor | None = None
) -> None:
    """Call `fit` with the rows, or those at `chosen`, and with OOD rows where the scorer takes them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [p.name for p in inspect.signature(scorer.fit).parameters.values() if p.kind in positional]
    options = {}
    if chosen is not None and "chosen" in parameters:
        options["chosen"] = chosen
    elif chosen is not None:
        inliers = inliers.take(chosen)
    if len(parameters) >= 2:
        scorer.fit(view_of(scorer, inliers), None if outliers is None else view_of(scorer, outliers), **options)
    else:
        scorer.fit(view_of(scorer, inliers))  # type: ignore[call-arg]


def score_rows(scorer: Scores, observation: Observation) -> Tensor:
    """Return one score per row, shape (N,), after checking that this is what came."""
    scores = scorer.score(view_of(scorer, observation))
    if not isinstance(scores, Tensor) or scores.shape != (len(observation),):
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"Expected `score` to return a tensor of shape ({len(observation)},), but got {shape}.")
    scores = scores.detach()
    if math.isnan(scores.sum().item()) and bool(scores.isnan().any()):  # of infinities too, which are no harm
        rows = scores.isnan().nonzero()[:, 0].tolist()
        raise InputError(
            f"Expected a score for each input, but {len(rows)} of {len(scores)} (rows {rows[:5]}) are NaN: the model's output "
            "or its activations' variances are not finite there. Check these inputs, and their scale."
        )
    return scores


def score_blocks(scorer: Scores, observation: Observation, chosen: Tensor | None = None) -> Tensor:
    """Return one score per row, or per row at `chosen`, shape (N,), a block of rows at a time; higher = more OOD."""
    return torch.cat([score_rows(scorer, block) for block in observation.blocks(chosen)])


def fit_and_score_inliers(
    scorer: Scorer,
    inliers: Observation,
    outliers: Observation | None,
    *,
    held_out: Observation | None,
    turned: Observation | None,
    rate: float,
) -> tuple[Tensor, Source]:
    """Fit `scorer` and return scores of in-distribution rows to calibrate on, with where they come from.

    Held-out rows are used where there are any, else rows of turned images. Otherwise, of many rows a random part is
    kept out of the fit; few rows are all used, and scored by scorers that were fitted on the other folds.
    """
    if held_out is not None:
        fit_scorer(scorer, inliers, outliers)
        return score_blocks(scorer, held_out), "held_out"
    if turned is not None:
        fit_scorer(scorer, inliers, outliers)
        return score_blocks(scorer, turned), "rotated"
    needed = check_enough(len(inliers), rate)
    order = torch.randperm(len(inliers), generator=torch.Generator().manual_seed(0))
    if not getattr(scorer, "learnt", True):  # nothing is learnt from the rows, so all of them are as good as held out
        fit_scorer(scorer, inliers, outliers)
        return score_blocks(scorer, inliers), "all"
    if len(inliers) >= SPLIT_FROM and len(inliers) * ASIDE >= needed:
        aside, rest = order[: int(len(inliers) * ASIDE)], order[int(len(inliers) * ASIDE) :]
        fit_scorer(scorer, inliers, outliers, rest)
        return score_blocks(scorer, inliers, aside), "kept_aside"
    return _cross_fit(scorer, inliers, outliers, order), "folds"


def choose_scores(inliers: Tensor, held_out: Tensor | None, rate: float) -> tuple[Tensor, Source]:
    """Return which scores to calibrate on where nothing is learnt, with where they come from."""
    if held_out is not None:
        return held_out, "held_out"
    check_enough(len(inliers), rate)
    return inliers, "all"


def check_enough(count: int, rate: float) -> int:
    """Return how many in-distribution examples a false-alarm rate needs, or raise if there are fewer."""
    needed = examples_needed(rate)
    if count < needed:
        raise CalibrationError(
            f"Expected at least {needed} in-distribution examples for a false-alarm rate of {rate:g}, but got {count}. "
            f"Pass more, or ask for a rate of at least {1 / (count + 1):.3g}."
        )
    return needed


def _cross_fit(scorer: Scorer, inliers: Observation, outliers: Observation | None, order: Tensor) -> Tensor:
    """Fit `scorer` on all rows, and return a score of each row by a twin that was fitted on the other folds.

    Each twin has a scale of its own; its scores are brought to that of `scorer` by the mean and deviation of the scores
    of the rows that it was fitted on.
    """
    fit_scorer(scorer, inliers, outliers)
    known = score_blocks(scorer, inliers)
    scores = torch.empty_like(known)
    for fold in range(FOLDS):
        apart = torch.zeros(len(inliers), dtype=torch.bool)
        apart[order[fold::FOLDS]] = True
        if not apart.any():
            continue
        twin = copy.deepcopy(scorer)
        rest, apart = (~apart).nonzero()[:, 0], apart.nonzero()[:, 0]
        fit_scorer(twin, inliers, outliers, rest)
        fitted = score_blocks(twin, inliers, rest)
        ratio = known.std() / fitted.std().clamp_min(torch.finfo(fitted.dtype).tiny)
        scores[apart] = (score_blocks(twin, inliers, apart) - fitted.mean()) * ratio + known.mean()
    return scores


def warn_if_weak(source: Source) -> None:
    """Say plainly what a threshold is worth that does not come from held-out data."""
    if source != "held_out":
        warnings.warn(GUARANTEES[source], CalibrationWarning, stacklevel=3)


def warn_if_shared(inliers: Sequence[bytes], held_out: Sequence[bytes]) -> None:
    """Warn if some held-out rows are also among the rows that were fitted on, given a digest of each."""
    seen = set(inliers)
    shared = sum(digest in seen for digest in held_out)
    if shared:
        warnings.warn(
            f"{shared} of {len(held_out)} held-out examples are also in `id_data`: the threshold will be too low and false "
            "alarms more frequent than asked for. Keep the two apart.",
            CalibrationWarning,
            stacklevel=3,
        )


def contributions_of(scorer: Scorer, observation: Observation) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Return the share of each channel in the scores, (N, D), other terms, (N,) each, and whether they add up exactly.

    A scorer without `contributions` is taken to first order: gradient times vector.
    """
    own = getattr(scorer, "contributions", None)
    parts = None if own is None else own(view_of(scorer, observation))
    if parts is not None:
        terms = getattr(scorer, "terms", None)
        return parts, {} if terms is None else terms(view_of(scorer, observation)), True
    with torch.inference_mode(False), torch.enable_grad():
        observation = Observation(*(None if part is None else part.detach().clone() for part in observation.parts()))  # type: ignore[arg-type]
        vector = observation.vector.requires_grad_()
        score = scorer.score(view_of(scorer, observation))
        if not score.requires_grad:
            name = type(scorer).__name__
            raise InputError(
                f"Expected a scorer with `contributions` or a gradient to explain, but {name} has neither."
            )
        (gradient,) = torch.autograd.grad(score.sum(), vector)
    return gradient * vector.detach(), {}, False
