"""The parts of the ID-only scorer, and the peers that need no OOD data either.

docs/typicality.md says on which models it was chosen, and which are for reporting only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from neuralmean.bench import protocols
from neuralmean.bench.baselines.parts import PartOfLayers
from neuralmean.bench.baselines.trial import Scored
from neuralmean.bench.experiments.base import Case, Experiment, cases
from neuralmean.bench.experiments.workbench import Workbench, summarise
from neuralmean.bench.protocols import Draw, EvalSet
from neuralmean.scorers.typicality import TERMS

OURS = "typicality"
COUNTS = (200, 500, 1000, 2000, 4000)
DRAWS = 3
THIRDS = ("first", "middle", "last")
OF_LAYERS = ("far", "angle")  # terms computed from the watched layers alone
_FOUR = ("svhn", "cifar100", "cifar10", "imagenet-crop", "imagenet-resize")


class Ablation(Experiment):
    """Single terms, all terms but one, thirds of the layers, numbers of ID images; peers in the same table."""

    name = "ablation"
    title = "ID images only: the contribution of each part, and all peers"
    reference = "stated limitation (no OOD examples available), which this goes beyond"
    cases = (
        *cases(("resnet56", "resnet20", "densenet100"), "cifar10", _FOUR),
        *cases(("densenet100",), "cifar100", _FOUR),
    )
    by_method = True
    methods = (
        "msp",
        "energy",
        "knn",
        "vim",
        "react",
        "ash",
        "rmds",
        "gen",
        "fdbd",
        "scale",
        "gram",
        "mahalanobis-id",
        "ours-avg",
        OURS,
    )

    def run(self, bench: Workbench, case: Case) -> None:
        """Measure the peers and the complete scorer, then its parts."""
        inside = bench.judge_set(case.id, case.model)
        outside = [bench.judge_set(name, case.model) for name in case.present(bench.inputs)]
        judged = [inside, *outside]
        inliers = bench.fit_set(case.id, case.model, apart_from=judged)
        draws = protocols.zero_shot(inliers, seed=bench.seed)
        chosen = bench.methods(self.methods)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for method in chosen:
            bench.compare(facts, method, draws, inside, outside)
        if OURS not in chosen:
            return
        parts = _Parts(bench, facts, inside, outside)
        parts.measure(draws, None, {f"{name} alone": (name,) for name in TERMS})
        parts.measure(draws, None, {f"without {name}": _others(name) for name in TERMS})
        parts.measure(draws, None, {"far and angle, all layers": OF_LAYERS})
        for third, name in enumerate(THIRDS):
            parts.measure(draws, third, {f"far and angle, {name} third of the layers": OF_LAYERS})
        for count in COUNTS:
            if count < len(inliers):
                seeds = range(bench.seed * DRAWS, (bench.seed + 1) * DRAWS)
                some = [protocols.zero_shot(inliers.draw(count, seed=seed), seed=seed)[0] for seed in seeds]
                parts.measure(some, None, {f"{count:,} ID images": TERMS})


def _others(left_out: str) -> tuple[str, ...]:
    return tuple(name for name in TERMS if name != left_out)


class _Parts:
    """Adds rows for parts of the scorer, several per fit."""

    def __init__(self, bench: Workbench, facts: dict[str, Any], inside: EvalSet, outside: Sequence[EvalSet]) -> None:
        self.bench, self.facts, self.inside, self.outside = bench, facts, inside, outside
        self.trained = bench.inputs.trained(facts["model"], facts["id"])
        self._kept: tuple[Any, list[list[Scored]]] = (None, [])

    def measure(self, draws: Sequence[Draw], third: int | None, settings: dict[str, tuple[str, ...]]) -> None:
        """Add the missing rows for each OOD set and setting, such as {"far alone": ("far",)}."""
        rows = []
        for setting, terms in settings.items():
            for place, one in enumerate(self.outside, start=1):
                row = self.bench.blank(
                    self.facts, one.name, OURS, draws, [self.inside, one], self.trained, setting=setting
                )
                if not self.bench.is_open(row):
                    continue
                fits = self._terms(draws, third)
                pairs = [(_add_up(fit[0], terms), _add_up(fit[place], terms)) for fit in fits]
                rows.append({**row, **summarise(pairs, seed=self.bench.seed)})
        if rows:
            self.bench.results.add(*rows)

    def _terms(self, draws: Sequence[Draw], third: int | None) -> list[list[Scored]]:
        """Return the terms of every set for every draw; the last result is cached."""
        key = ([draw.inliers.digest() for draw in draws], third)
        if self._kept[0] != key:
            self._kept = (key, [self._fit(draw, third) for draw in draws])
        return self._kept[1]

    def _fit(self, draw: Draw, third: int | None) -> list[Scored]:
        return self.bench.trial(lambda: PartOfLayers(third), self.trained, draw, [self.inside, *self.outside])


def _add_up(terms: Scored, names: Sequence[str]) -> Scored:
    """Return the sum of some terms as scores."""
    columns = [TERMS.index(name) for name in names]
    return replace(terms, scores=terms.scores[:, columns].sum(axis=1))
