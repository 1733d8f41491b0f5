"""The rules for scorers, as a check for a scorer of your own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from neuralmean.errors import InputError
from neuralmean.scorers.base import Observation, Scorer
from neuralmean.scorers.contract import contributions_of, fit_scorer, needs_of, score_rows

_COLUMNS, _CLASSES, _FEATURES = 12, 3, 5


def check_scorer(scorer: Scorer, *, columns: int = _COLUMNS, seed: int = 0) -> None:
    """Run a scorer on made-up rows and raise at the first broken rule.

    Checked: `fit` and `score` can be called as a detector calls them; there is one finite number for each row; rows far from the
    in-distribution ones score higher; a score does not depend on the other rows; rows are not modified; fitting again gives the
    same scores, also of a scorer that was in use; torch's random state does not change; `state` and `load_state`, if
    defined, transfer everything; `contributions`, if defined, add up to the score. The scorer itself is not changed.

    Args:
        scorer: An object with `fit` and `score`, as for `Detector(model, scorer=...)`. It is copied for each check.
        columns: D, the number of columns of the rows.
        seed: Seed of the rows.

    Raises:
        InputError: A rule is broken.

    Example:
        >>> from neuralmean.scorers import AverageScorer
        >>> check_scorer(AverageScorer())
    """
    if not isinstance(scorer, Scorer):
        raise InputError(f"Expected an object with `fit` and `score`, but got {type(scorer).__name__}.")
    _Check(scorer, columns, seed).run()


class _Check:
    def __init__(self, scorer: Scorer, columns: int, seed: int) -> None:
        self._scorer, self._name = scorer, type(scorer).__name__
        generator = torch.Generator().manual_seed(seed)

        def rows(count: int, shift: float) -> Observation:
            vector = torch.randn(count, columns, generator=generator) + shift
            mixed = torch.randn(columns, _CLASSES + _FEATURES, generator=generator) / columns**0.5
            logits, feature = (vector @ mixed).split((_CLASSES, _FEATURES), dim=1)
            return Observation(vector, logits.contiguous(), feature.contiguous())

        self._inliers, self._outliers = rows(150, 0.0), rows(80, 5.0)
        self._others, self._near, self._far = rows(150, 1.0), rows(64, 0.0), rows(64, 10.0)

    def run(self) -> None:
        """Check one rule after the other."""
        before, state = self._copies(), torch.get_rng_state()
        scorer = self._fitted(self._inliers)
        near, far = self._score(scorer, self._near), self._score(scorer, self._far)
        self._expect(
            bool(torch.isfinite(torch.cat([near, far])).all()), "a finite score for each row", "some are infinite"
        )
        self._expect(
            (far > near.median()).float().mean().item() >= 0.9,
            "higher scores for rows far from the in-distribution ones",
            f"their median is {far.median().item():.4g}, that of in-distribution rows {near.median().item():.4g}",
        )
        alone = torch.cat([self._score(scorer, self._near[slice(i, i + 1)]) for i in range(8)])
        self._expect_equal(near[:8], alone, "a score that does not depend on the rows beside it", rough=True)
        self._expect_equal(near, self._score(scorer, self._near), "the same scores for the same rows", rough=False)
        same = all(torch.equal(one, other) for one, other in zip(self._copies(), before, strict=True))
        self._expect(same, "rows that are left alone", "`fit` or `score` writes into them")
        self._expect(
            torch.equal(torch.get_rng_state(), state), "torch's random state to be left alone", "it is changed"
        )
        self._expect_equal(
            near, self._score(self._fitted(self._inliers), self._near), "the same scores after fitting again"
        )
        used = self._fitted(self._others)
        self._score(used, self._far)
        self._fit(used, self._inliers)
        self._expect_equal(near, self._score(used, self._near), "a scorer that is fitted again to forget what it knew")
        self._check_state(scorer, near)
        self._check_contributions(scorer, near)

    def _check_state(self, scorer: Scorer, near: Tensor) -> None:
        if not (hasattr(scorer, "state") and hasattr(scorer, "load_state")):
            return
        state: Mapping[str, Any] = scorer.state()
        tensors = isinstance(state, Mapping) and all(isinstance(value, Tensor) for value in state.values())
        self._expect(tensors, "`state` to return tensors by name", "it returns something else")
        again = self._fitted(self._others)
        self._score(again, self._near)
        again.load_state({name: value.clone() for name, value in state.items()})  # type: ignore[attr-defined]
        self._expect_equal(near, self._score(again, self._near), "the same scores from what `state` returned")

    def _check_contributions(self, scorer: Scorer, near: Tensor) -> None:
        if getattr(scorer, "contributions", None) is None:
            return
        parts, terms, is_exact = contributions_of(scorer, self._near)
        shape = self._near.vector.shape
        self._expect(parts.shape == shape, f"contributions of shape {tuple(shape)}", f"got {tuple(parts.shape)}")
        if is_exact:
            total = parts.sum(dim=1) + sum(terms.values())
            self._expect_equal(near, total, "contributions and terms that add up to the score", rough=True)

    def _fitted(self, inliers: Observation) -> Scorer:
        scorer: Scorer = self._call("be copied", lambda: copy.deepcopy(self._scorer))
        self._fit(scorer, inliers)
        return scorer

    def _fit(self, scorer: Scorer, inliers: Observation) -> None:
        self._call("be fitted", lambda: fit_scorer(scorer, inliers, self._outliers))

    def _score(self, scorer: Scorer, rows: Observation) -> Tensor:
        scores: Tensor = self._call(f"score {len(rows)} rows", lambda: score_rows(scorer, rows))
        return scores.double()

    def _call(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except Exception as error:
            needs = "observations" if needs_of(self._scorer) else "tensors"
            raise InputError(
                f"Expected {self._name} to {what}, called with {needs} as a detector calls it, but it raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def _copies(self) -> list[Tensor]:
        every = (self._inliers, self._outliers, self._others, self._near, self._far)
        return [part.clone() for rows in every for part in rows.parts() if part is not None]

    def _expect(self, holds: bool, what: str, found: str) -> None:
        if not holds:
            raise InputError(f"Expected of {self._name} {what}, but {found}.")

    def _expect_equal(self, one: Tensor, other: Tensor, what: str, *, rough: bool = False) -> None:
        largest = (one - other).abs().max().item()
        allowed = 1e-4 * (1 + one.abs().max().item()) if rough else 0.0
        self._expect(largest <= allowed, what, f"they differ by up to {largest:.3g}")
