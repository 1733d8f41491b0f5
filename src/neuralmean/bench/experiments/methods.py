"""Every method in one table: one fit each, the same images for all. Not in the paper, whose tables show some of them each.

What learns from OOD images gets those of CIFAR-100: its own train part where CIFAR-100 is judged (full access), another
set's where others are (transfer).
"""

from __future__ import annotations

from neuralmean.bench import baselines, protocols
from neuralmean.bench.experiments.base import Case, Experiment, cases
from neuralmean.bench.experiments.workbench import Workbench

LEARNT_FROM = "cifar100"


class Methods(Experiment):
    """Every method that suits a model, judged by the images that the heavy ones are judged by."""

    name = "methods"
    title = "Every method in one table"
    reference = "tables 2 and 6 and figures 4 and 5, all columns at once"
    cases = cases(
        ("resnet56", "densenet100"),
        "cifar10",
        ("svhn", "cifar100", "imagenet-crop", "imagenet-resize"),
        learns_from=(LEARNT_FROM,),
    )
    methods = (
        "msp",
        "odin",
        "energy",
        "mahalanobis",
        "mahalanobis-id",
        "gram",
        "oe",
        "energy-ft",
        "g-odin",
        "1d",
        "acet",
        "good",
        "dk",
        "cntk",
        "scntk",
        "knn",
        "vim",
        "react",
        "ash",
        "scale",
        "rmds",
        "mds++",
        "rmds++",
        "gen",
        "fdbd",
        "nci",
        "nnguide",
        "she",
        "nac",
        "ours-avg",
        "ours-lr",
        "ours-mlp",
        "typicality",
        "guided",
    )
    by_method = True

    def run(self, bench: Workbench, case: Case) -> None:
        """Fit every method once and judge it by all OOD sets."""
        names = [case.id, *case.present(bench.inputs)]
        # As in `full-access`, so that fits are shared. `transfer` is not judged by CIFAR-100 and may learn from a few more
        # of its images, of which ODIN, say, then draws another hundred.
        apart_from = [bench.judge_set(name, case.model) for name in names]
        inliers, outliers = (bench.fit_set(name, case.model, apart_from=apart_from) for name in (case.id, LEARNT_FROM))
        inside, *outside = (bench.small_judge_set(name, case.model) for name in names)
        others = [one for one in outside if one.name != LEARNT_FROM]
        own = [one for one in outside if one.name == LEARNT_FROM]
        trained = bench.inputs.trained(case.model, case.id)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for method in bench.methods(self.methods):
            kind = baselines.make(method)
            if not kind.suits(trained):
                continue
            if not kind.uses_outliers:
                bench.compare(facts, method, protocols.zero_shot(inliers, seed=bench.seed), inside, outside)
                continue
            transfer = protocols.transfer(inliers, outliers, tested_on=[one.name for one in others], seed=bench.seed)
            bench.trial(lambda name=method: baselines.make(name), trained, transfer[0], [inside, *outside])  # type: ignore[misc]
            bench.compare(facts, method, transfer, inside, others)
            bench.compare(facts, method, protocols.full_access(inliers, outliers, seed=bench.seed), inside, own)
