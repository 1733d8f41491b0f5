"""Figure 8 (appendix): the mini-batches of `batch-size` with an untrained network."""

from __future__ import annotations

from neuralmean.bench import models
from neuralmean.bench.experiments.base import RESIDUAL, Case, Experiment, cases
from neuralmean.bench.experiments.batch_size import batchnorm_means, measure
from neuralmean.bench.experiments.workbench import Workbench

SEEDS = (0, 1, 2)  # for a run with seed 0; other runs use other seeds
SIZES = (1, 4, 8, 32)


class Untrained(Experiment):
    """Three random initialisations, with two references: the initial buffers (zero), and means measured on ID images.

    The paper does not say which of the two its figure shows.
    """

    name = "untrained"
    title = "The same with random weights"
    reference = "Figure 8 (appendix)"
    cases = cases(RESIDUAL, "cifar10", ("svhn", "cifar100"))
    first_only = True
    methods = ("ours-avg",)

    def run(self, bench: Workbench, case: Case) -> None:
        """Score mini-batches with untrained networks of the case's architecture."""
        known = bench.inputs.trained(case.model, case.id)
        for seed in (bench.seed * len(SEEDS) + seed for seed in SEEDS):
            model = models.untrained(
                case.model, num_classes=max(known.num_classes, 2), seed=seed, mean=known.mean, std=known.std
            )
            inside = bench.judge_set(case.id, case.model)
            inliers = bench.fit_set(case.id, case.model, apart_from=[inside], at_most=2000)
            measured = bench.reader(model)(inliers.source, variance=False).means.double().mean(dim=0)
            references = {"buffers as born": batchnorm_means(model), "reference from data": measured}
            for kind, reference in references.items():
                for name in case.present(bench.inputs):
                    measure(
                        bench,
                        self.name,
                        case,
                        model,
                        name,
                        reference=reference,
                        sizes=SIZES,
                        kind=f", {kind}",
                        seed=seed,
                    )
