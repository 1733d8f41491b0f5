"""The interface of scorers: (N, D) discrepancy vectors in, (N,) scores out, higher = more OOD.

A scorer receives tensors, never a model. `needs` lists the parts of the forward pass it uses besides the vector; a
scorer that needs only the vector is called with tensors, any other with `Observation`s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import parts_of, take
from neuralmean.errors import InputError, NotFittedError

JSON = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Observation:
    """The result of one forward pass over N inputs: the discrepancy vector and other inputs of scorers."""

    vector: Tensor  # (N, D)
    logits: Tensor | None = None  # (N, K) the model's logits
    feature: Tensor | None = None  # (N, F) the input of the model's last linear layer

    def __len__(self) -> int:
        return len(self.vector)

    def __getitem__(self, rows: Tensor | slice) -> Observation:
        """Return the observation of some of the rows."""
        return Observation(*(None if part is None else part[rows] for part in self.parts()))  # type: ignore[arg-type]

    def blocks(self, chosen: Tensor | None = None) -> Iterator[Observation]:
        """Yield the rows, or those at `chosen`, a block at a time."""
        parts = parts_of(len(self) if chosen is None else len(chosen), self.vector.shape[1])
        return (self[part if chosen is None else chosen[part]] for part in parts)

    def take(self, chosen: Tensor) -> Observation:
        """Return a copy of the rows at `chosen`, in memory or, if it is large, on disk."""
        return Observation(*(None if part is None else take(part, chosen) for part in self.parts()))  # type: ignore[arg-type]

    def parts(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Vector, logits and feature, in this order."""
        return self.vector, self.logits, self.feature


class Scores(Protocol):
    """A scorer that is fitted."""

    def score(self, vectors: Any) -> Tensor:
        """Score each row, shape (N,); higher = more OOD."""


@runtime_checkable
class Scorer(Scores, Protocol):
    """The interface of a user's own scorer."""

    def fit(self, inliers: Any, outliers: Any) -> Any:
        """Learn from in-distribution rows and, if given, out-of-distribution rows."""


class VectorScorer:
    """Base of the scorers that come with the library.

    A subclass sets `name`, stores its keyword-only arguments under their own names and lists them in `options`, keeps
    what it learns in tensors whose names end in `_` and lists them in `learnt`, and implements `fit`, `score` and, where
    a score is a sum over channels, `contributions`. Rows may be on disk, so `fit` reads them in blocks. Where it has an
    argument `chosen`, int64 indices of the in-distribution rows to learn from (None for all), no copy of these is made for it.
    """

    name: ClassVar[str]
    needs: ClassVar[frozenset[str]] = frozenset()  # of "logits" and "feature"
    uses_outliers: ClassVar[bool] = False  # whether `fit` needs out-of-distribution rows
    options: ClassVar[tuple[str, ...]] = ()
    learnt: ClassVar[tuple[str, ...]] = ()

    def fit(self, inliers: Any, outliers: Any = None) -> Self:
        """Learn from in-distribution rows (N, D) and, where used, out-of-distribution rows (M, D)."""
        raise NotImplementedError

    def score(self, vectors: Any) -> Tensor:
        """Score each row of (N, D), shape (N,); higher = more OOD."""
        raise NotImplementedError

    def contributions(self, vectors: Any) -> Tensor | None:
        """Return the contribution of each channel, shape (N, D), whose rows add up to the score; None if there is no such sum."""
        return None

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt, by name, for a saved file."""
        self.check_fitted()
        return {name: getattr(self, name) for name in self.learnt}

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Load what another scorer of the same kind has learnt."""
        missing = sorted(set(self.learnt) - set(state))
        if missing:
            raise InputError(
                f"Expected the state of a {self.name!r} scorer to hold {missing}, but got {sorted(state)}."
            )
        self.forget_derived()
        for name in self.learnt:
            setattr(self, name, state[name])
        return self

    def forget_derived(self) -> None:
        """Drop cached values (every `cached_property`) before a new fit."""
        for name in [name for name in self.__dict__ if isinstance(getattr(type(self), name, None), cached_property)]:
            del self.__dict__[name]

    def get_options(self) -> dict[str, JSON]:
        """Return the constructor's arguments, as JSON values."""
        return {name: getattr(self, name) for name in self.options}

    def check_fitted(self) -> None:
        """Raise unless `fit` was called."""
        if any(not hasattr(self, name) for name in self.learnt):
            raise NotFittedError(f"The {self.name!r} scorer is not fitted yet. Call `fit` before `score`.")


class CrossFittedScorer(VectorScorer):
    """Base of scorers that learn their scale on rows kept apart, and can score rows that were made of those they learn from."""

    def fit(self, inliers: Any, outliers: Any = None, chosen: Tensor | None = None) -> Self:
        """Learn from an `Observation` of in-distribution inputs and, where used, one of out-of-distribution inputs."""
        self.fit_and_score(inliers, outliers, inliers[slice(0, 0)], torch.zeros(0, dtype=torch.int64), chosen=chosen)
        return self

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
        """Learn as `fit` does, and score rows that were made of the inliers, each by what was learnt without its origin.

        Args:
            inliers: As for `fit`.
            outliers: As for `fit`.
            others: An `Observation` of M inputs, say of rotated copies.
            origin: Which of the rows that are learnt from each was made of, int64 (M,).
            chosen: As for `fit`.
            whole: Whether to score all of them, where a fifth of many would be enough to measure on.

        Returns:
            Scores, shape (M,); NaN where the origin was in no fold.
        """
        raise NotImplementedError


def check_two_classes(inliers: Tensor, outliers: Tensor | None, scorer: str) -> Tensor:
    """Return `outliers`, or raise unless there are rows of both kinds with the same columns."""
    if outliers is None or len(outliers) == 0 or len(inliers) == 0:
        got = f"{len(inliers)} in-distribution and {0 if outliers is None else len(outliers)} OOD rows"
        raise InputError(
            f"Expected examples of both kinds to fit the {scorer!r} scorer, but got {got}. "
            "Pass `ood_data`, or use a scorer that needs none."
        )
    if inliers.shape[1] != outliers.shape[1]:
        raise InputError(
            f"Expected in-distribution and OOD rows with the same columns, but got {inliers.shape[1]} and {outliers.shape[1]}."
        )
    return outliers
