"""Figure 7: the importance of each layer in the logistic detector, and AUROC of the first k layers."""

from __future__ import annotations

from neuralmean.bench import protocols
from neuralmean.bench.baselines.first_layers import FirstLayers
from neuralmean.bench.experiments.base import RESIDUAL, Case, Experiment, cases
from neuralmean.bench.experiments.workbench import Workbench, summarise
from neuralmean.bench.protocols import EvalSet, FitSet

FIT_IMAGES = 2000  # of each kind, as there are some thirty fits per OOD set


class Layers(Experiment):
    """Standardised NMD, logistic regression, CIFAR-10 against SVHN (far) and CIFAR-100 (near)."""

    name = "layers"
    title = "Which layers matter"
    reference = "Figure 7"
    cases = cases(RESIDUAL, "cifar10", ("svhn", "cifar100"))
    first_only = True
    methods = ("ours-lr",)

    def run(self, bench: Workbench, case: Case) -> None:
        """Fit on the first k layers for some twenty k; the row of all layers has the importance of each layer."""
        inside = bench.judge_set(case.id, case.model)
        outside = [bench.judge_set(name, case.model) for name in case.present(bench.inputs)]
        judged = [inside, *outside]
        inliers = bench.fit_set(case.id, case.model, apart_from=judged, at_most=FIT_IMAGES)
        for one in outside:
            outliers = bench.fit_set(one.name, case.model, apart_from=judged, at_most=FIT_IMAGES)
            self._run_pair(bench, case, inside, one, inliers, outliers)

    def _run_pair(
        self, bench: Workbench, case: Case, inside: EvalSet, outside: EvalSet, inliers: FitSet, outliers: FitSet
    ) -> None:
        trained = bench.inputs.trained(case.model, case.id)
        draws = protocols.full_access(inliers, outliers, seed=bench.seed)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        total = len(bench.reader(trained)(inside.source, variance=False).layers)
        for count in first_counts(total):
            row = bench.blank(
                facts,
                outside.name,
                "ours-lr",
                draws,
                [inside, outside],
                trained,
                setting=f"first {count} layers",
                layers=count,
            )
            if not bench.is_open(row):
                continue
            method = FirstLayers(count)
            # The importance comes from the fitted method, so cached scores are not enough for all layers.
            trial = bench.fresh_trial if count == total else bench.trial
            scored = trial(lambda: method, trained, draws[0], [inside, outside])  # noqa: B023 - called at once
            row.update(summarise([(scored[0], scored[1])], seed=bench.seed))
            if count == total:
                row["importance"] = {name: round(value, 6) for name, value in method.importance().items()}
            bench.results.add(row)


def first_counts(total: int) -> list[int]:
    """Return the numbers of layers to try: all small ones, then ever sparser ones, and the last.

    Example:
        >>> first_counts(20)
        [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20]
    """
    counts, step = [1], 1
    while counts[-1] + step < total:
        counts.append(counts[-1] + step)
        step = max(1, counts[-1] // 4) if counts[-1] < 12 else 4
    return counts if counts[-1] == total else [*counts, total]
