"""Experiments that are tables of methods under one protocol."""

from __future__ import annotations

from collections.abc import Sequence

from neuralmean.bench import baselines, protocols
from neuralmean.bench.baselines import Method
from neuralmean.bench.experiments.base import Case, Experiment
from neuralmean.bench.experiments.workbench import Workbench
from neuralmean.bench.protocols import Draw, EvalSet, FitSet, Protocol


class TableExperiment(Experiment):
    """Methods x OOD sets for each case, under one protocol.

    Attributes:
        protocol: The protocol.
        transfer_from: The OOD set from which methods learn in the transfer protocol.
    """

    protocol: Protocol
    transfer_from: str = "cifar100"
    by_method = True

    def run(self, bench: Workbench, case: Case) -> None:
        """Measure every method on every available OOD set."""
        inside = bench.judge_set(case.id, case.model)
        outside = [bench.judge_set(name, case.model) for name in case.present(bench.inputs)]
        judged = [inside, *outside]
        inliers = bench.fit_set(case.id, case.model, apart_from=judged)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for draws, against in self._draws(bench, case, inliers, outside, judged):
            for name in bench.methods(self.methods):
                method = baselines.make(name)
                if not self.leaves_out(method, case.model):
                    bench.compare(facts, name, self.draws_for(method, draws, inliers), inside, against)

    def leaves_out(self, method: Method, model: str) -> bool:
        """Whether to skip a method that would take hours on a model; `methods` covers it with a single fit."""
        return False

    def draws_for(self, method: Method, draws: list[Draw], inliers: FitSet) -> list[Draw]:
        """Return the draws for a method; an experiment may override this."""
        return draws

    def _draws(
        self, bench: Workbench, case: Case, inliers: FitSet, outside: Sequence[EvalSet], judged: Sequence[EvalSet]
    ) -> list[tuple[list[Draw], list[EvalSet]]]:
        """Yield the data to fit on and the OOD sets to test on."""
        if self.protocol == "zero-shot":
            return [(protocols.zero_shot(inliers, seed=bench.seed), list(outside))]
        if self.protocol == "transfer":
            outliers = bench.fit_set(self.transfer_from, case.model, apart_from=judged)
            names = [one.name for one in outside]
            return [(protocols.transfer(inliers, outliers, tested_on=names, seed=bench.seed), list(outside))]
        draw = protocols.few_shot if self.protocol == "few-shot" else protocols.full_access
        pairs = []
        for one in outside:
            outliers = bench.fit_set(one.name, case.model, apart_from=judged)
            pairs.append((draw(inliers, outliers, seed=bench.seed), [one]))
        return pairs
