"""Scorers: from discrepancy vectors to one number per input, higher = more OOD.

`make_scorer` makes one by name. Each kind has its own file. `check_scorer` checks a scorer of your own.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from neuralmean.errors import InputError
from neuralmean.scorers.average import AverageScorer
from neuralmean.scorers.base import JSON, Observation, Scorer, VectorScorer
from neuralmean.scorers.check import check_scorer
from neuralmean.scorers.guided import GuidedScorer
from neuralmean.scorers.logistic import LogisticScorer
from neuralmean.scorers.mlp import MlpScorer
from neuralmean.scorers.typicality import TypicalityScorer

__all__ = [
    "SCORERS",
    "AverageScorer",
    "GuidedScorer",
    "LogisticScorer",
    "MlpScorer",
    "Observation",
    "Scorer",
    "TypicalityScorer",
    "VectorScorer",
    "check_scorer",
    "make_scorer",
]

_KINDS: tuple[type[VectorScorer], ...] = (
    AverageScorer,
    GuidedScorer,
    LogisticScorer,
    MlpScorer,
    TypicalityScorer,
)
SCORERS = {kind.name: kind for kind in _KINDS}


def make_scorer(name: str, options: Mapping[str, JSON] | None = None) -> VectorScorer:
    """Return a new scorer of the kind called `name`.

    Raises:
        InputError: The name or an option is unknown.
    """
    if name not in SCORERS:
        close = difflib.get_close_matches(str(name), SCORERS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise InputError(
            f"Expected `scorer` to be one of {sorted(SCORERS)} or an object with `fit`, `score`, but got {name!r}.{hint}"
        )
    kind = SCORERS[name]
    unknown = sorted(set(options or {}) - set(kind.options))
    if unknown:
        raise InputError(f"Expected only the options {list(kind.options)} for the {name!r} scorer, but got {unknown}.")
    return kind(**(options or {}))
