"""Runs a scorer, the library's own or the user's: prepares its arguments and checks its result."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from neuralmean.errors import InputError
from neuralmean.scorers.base import Observation, Scorer, Scores


def needs_of(scorer: Scores) -> frozenset[str]:
    """Return which of "logits" and "feature" a scorer needs besides the vector."""
    return frozenset(getattr(scorer, "needs", ()))


def view_of(scorer: Scores, observation: Observation) -> Any:
    """Return the argument of a scorer: the vectors alone, or the observation if it needs more."""
    return observation if needs_of(scorer) else observation.vector


def fit_scorer(
    scorer: Scorer, inliers: Observation, outliers: Observation | None, chosen: Tensor | None = None
) -> None:
    """Call `fit` with the rows, or those at `chosen`, and with OOD rows if the scorer takes them."""
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
    """Return one score per row, shape (N,), after checking the scorer's result."""
    scores = scorer.score(view_of(scorer, observation))
    if not isinstance(scores, Tensor) or scores.shape != observation.vector.shape[:1]:
        shape = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(f"Expected `score` to return a tensor of shape ({len(observation)},), but got {shape}.")
    scores = scores.detach()
    if math.isnan(scores.sum().item()) and bool(scores.isnan().any()):  # also NaN for infinities, which are allowed
        rows = scores.isnan().nonzero()[:, 0].tolist()
        raise InputError(
            f"Expected a score for each input, but {len(rows)} of {len(scores)} (rows {rows[:5]}) are NaN: the model's output "
            "or its activations' variances are not finite there. Check these inputs, and their scale."
        )
    return scores


def score_blocks(scorer: Scores, observation: Observation, chosen: Tensor | None = None) -> Tensor:
    """Return one score per row, or per row at `chosen`, shape (N,), a block of rows at a time; higher = more OOD."""
    return torch.cat([score_rows(scorer, block) for block in observation.blocks(chosen)])


def score_together(scorer: Scorer, rows: Observation, pooled: Observation) -> float:
    """Return one score for all rows; higher = more OOD.

    Args:
        scorer: The scorer; its own `score_batch` is used if it has one.
        rows: The rows.
        pooled: The same rows pooled to one.
    """
    own = getattr(scorer, "score_batch", None)
    if own is not None:
        return float(own(view_of(scorer, rows)))
    if needs := needs_of(scorer):
        raise InputError(
            f"Expected a scorer with `score_batch`, as {type(scorer).__name__} needs the model's "
            f"{' and '.join(sorted(needs))}."
        )
    return score_rows(scorer, pooled).item()


def contributions_of(scorer: Scorer, observation: Observation) -> tuple[Tensor, dict[str, Tensor], bool]:
    """Return the contribution of each channel, (N, D), other terms, (N,) each, and whether they add up exactly.

    A scorer without `contributions` is approximated to first order: gradient times vector.
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
