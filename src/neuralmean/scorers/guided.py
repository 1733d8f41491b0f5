"""The default with out-of-distribution examples: a score learnt from them is added to the score from ID data alone.

A detector that learns from examples recognises inputs like them, and may miss everything else: logistic regression on
4,000 images of CIFAR-100 does worse on other sets than a detector without examples. Here examples can only raise a score.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.errors import InputError
from neuralmean.scorers.base import CrossFittedScorer, Observation, VectorScorer
from neuralmean.scorers.folds import folds
from neuralmean.scorers.logistic import LogisticScorer
from neuralmean.scorers.mlp import MlpScorer
from neuralmean.scorers.typicality import TypicalityScorer

SHARE = 1 / 3  # weight of the learnt part; the typicality score has deviation 1
_LEARNERS: dict[str, type[LogisticScorer] | type[MlpScorer]] = {"logistic": LogisticScorer, "mlp": MlpScorer}


class GuidedScorer(CrossFittedScorer):
    r"""Scores an input by its typicality, plus the positive part of a score learnt from examples.

    .. math::
        s(x) = \frac{t(x) - \mathrm{mean}(t)}{\mathrm{std}(t)}
            + \frac{1}{3} \max\Big(0, \frac{l(x) - \mathrm{mean}(l)}{\mathrm{std}(l)}\Big)

    with :math:`t` the typicality score and :math:`l` the learnt one; means and deviations are those of in-distribution rows
    that neither was learnt from.

    Args:
        learner: `"logistic"` or `"mlp"`.
        tokens: As for `TypicalityScorer`.
        seed: Seed of the typicality score and the folds.
    """

    name = "guided"
    needs = TypicalityScorer.needs
    uses_outliers = True
    options = ("learner", "tokens", "seed")
    learnt = ("mean_", "std_")

    mean_: Tensor  # (2,), of typicality and learnt score
    std_: Tensor

    def __init__(self, *, learner: str = "logistic", tokens: bool = False, seed: int = 0) -> None:
        if learner not in _LEARNERS:
            raise InputError(f"Expected `learner` to be one of {sorted(_LEARNERS)}, but got {learner!r}.")
        self.learner, self.tokens, self.seed = learner, tokens, seed
        self.typicality = TypicalityScorer(tokens=tokens, seed=seed)
        self.learned: LogisticScorer | MlpScorer = _LEARNERS[learner]()

    def fit_and_score(
        self,
        inliers: Any,
        outliers: Any,
        others: Any,
        origin: Tensor,
        *,
        chosen: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        """Learn from inputs of both kinds; see `CrossFittedScorer`."""
        if outliers is None or not len(outliers):
            raise InputError(
                "Expected `ood_data` to fit the 'guided' scorer, but got none. Pass some, or leave `scorer` out."
            )
        rows = torch.arange(len(inliers)) if chosen is None else chosen
        # Both in one call: the rows themselves, to measure on, and those made of them.
        known, made = len(rows), len(others)
        everything = _stack(inliers.take(rows), others)
        parts = torch.cat([torch.arange(known), origin])
        typical = self.typicality.fit_and_score(inliers, None, everything, parts, chosen=chosen, whole=whole)
        learnt = torch.full((known + made,), torch.nan)
        for apart in folds(known, seed=self.seed, whole=whole):
            self.learned.fit(inliers.vector, outliers.vector, rows[~apart])
            scored = apart[parts].nonzero()[:, 0]
            learnt[scored] = _score(self.learned, everything.vector[scored])
        self.learned.fit(inliers.vector, outliers.vector, rows)
        both = torch.stack([typical, learnt], dim=1).double()
        fresh = both[:known][~both[:known].isnan().any(dim=1)]
        self.mean_, self.std_ = fresh.mean(dim=0).float(), fresh.std(dim=0).clamp_min(1e-12).float()
        return self._add(both[known:].float())

    def score(self, vectors: Any) -> Tensor:
        """Score each input of an `Observation`, shape (N,); higher = more OOD."""
        self.check_fitted()
        return self._add(self._both(vectors))

    def score_batch(self, vectors: Any) -> Tensor:
        r"""Score an `Observation` as one batch; the learnt part is that of the mean vector, scaled by :math:`\sqrt{N}`."""
        self.check_fitted()
        pooled = self.learned.score(vectors.vector.float().mean(dim=0, keepdim=True))[0]
        scaled = self.mean_[1] + (pooled - self.mean_[1]) * len(vectors) ** 0.5
        return self._add(torch.stack([self.typicality.score_batch(vectors), scaled])[None])[0]

    def contributions(self, vectors: Any) -> Tensor:
        """Return the contribution of each channel to the typicality, shape (N, D); with `terms` they add up to the score."""
        self.check_fitted()
        return self.typicality.contributions(vectors) / self.std_[0]

    def terms(self, vectors: Any) -> dict[str, Tensor]:
        """Return the terms of no channel, (N,) each: the terms of the typicality, and *learnt*."""
        own = {name: value / self.std_[0] for name, value in self.typicality.terms(vectors).items()}
        own["constant"] = own["constant"] - self.mean_[0] / self.std_[0]
        return {**own, "learnt": self._evidence(self.learned.score(vectors.vector.float()))}

    def left_out(self) -> dict[str, str]:
        """Return the terms that are left out, each with the reason."""
        return self.typicality.left_out()

    def _both(self, vectors: Observation) -> Tensor:
        return torch.stack([self.typicality.score(vectors), self.learned.score(vectors.vector.float())], dim=1)

    def _standard(self, both: Tensor) -> Tensor:
        return (both - self.mean_) / self.std_

    def _add(self, both: Tensor) -> Tensor:
        return self._standard(both)[:, 0] + self._evidence(both[:, 1])

    def _evidence(self, learnt: Tensor) -> Tensor:
        return SHARE * ((learnt - self.mean_[1]) / self.std_[1]).clamp_min(0)

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt, by name, prefixed with the part."""
        state = super().state()
        for prefix, part in self._parts():
            state |= {f"{prefix}.{name}": tensor for name, tensor in part.state().items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Load what another scorer of the same kind has learnt."""
        super().load_state(state)
        for prefix, part in self._parts():
            start = f"{prefix}."
            part.load_state({name[len(start) :]: value for name, value in state.items() if name.startswith(start)})
        return self

    def _parts(self) -> tuple[tuple[str, VectorScorer], ...]:
        return (("typicality", self.typicality), ("learned", self.learned))


def _score(scorer: VectorScorer, vectors: Tensor) -> Tensor:
    return scorer.score(vectors.float()).detach().float()


def _stack(first: Observation, second: Observation) -> Observation:
    """Return the rows of both; missing parts are missing in both."""
    pairs = zip(first.parts(), second.parts(), strict=True)
    return Observation(*(None if a is None or b is None else torch.cat([a, b]) for a, b in pairs))  # type: ignore[arg-type]
