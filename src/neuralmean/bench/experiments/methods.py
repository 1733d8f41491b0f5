"""Every method in one table: one fit each, on the same images. Not in the paper, whose tables each show a few.

Methods that learn from OOD images get the train split of CIFAR-100, which is full access for CIFAR-100 and transfer for
the other sets.
"""

from __future__ import annotations

from neuralmean.bench import baselines, protocols
from neuralmean.bench.experiments.base import Case, Experiment, cases
from neuralmean.bench.experiments.workbench import Workbench

LEARNT_FROM = "cifar100"


class Methods(Experiment):
    """Every method that supports a model, tested on the same images as heavy methods."""

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
        """Fit every method once and test it on all OOD sets."""
        names = [case.id, *case.present(bench.inputs)]
        # As in `full-access`, so that fits are shared. `transfer` does not test on CIFAR-100 and may learn from a few
        # more of its images, so its random draws differ.
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
