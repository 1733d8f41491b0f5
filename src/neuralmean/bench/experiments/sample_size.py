"""The default scorer with few and many images, where more must not make it worse. Not in the paper."""

from __future__ import annotations

from neuralmean.bench import baselines
from neuralmean.bench.data import ALTERATIONS, alter
from neuralmean.bench.experiments.base import Case, Experiment, cases
from neuralmean.bench.experiments.imagenet import MOST, OUTSIDE, PHOTOS, halves
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench, summarise
from neuralmean.bench.protocols import Draw, EvalSet, FitSet

COUNTS = (100, 300, 1000, 5000)
DRAWS = 5
JUDGED = 2000
_SETS = ("svhn", "cifar100", "imagenet-crop", "imagenet-resize")


class SampleSize(Experiment):
    """The default scorer fitted on 100 to 5,000 ID images, five draws each."""

    name = "sample-size"
    title = "More in-distribution images"
    reference = "not in the paper"
    cases = cases(("resnet56", "convnet4", "resnet34"), "cifar10", _SETS)
    methods = ("typicality",)

    def runnable(self, inputs: Inputs) -> list[Case]:
        """The cases on CIFAR-10, and one for each model of photos."""
        photos = [Case(model, PHOTOS, OUTSIDE) for model in inputs.photo_models if inputs.has_set(PHOTOS)]
        return [*super().runnable(inputs), *photos]

    def run(self, bench: Workbench, case: Case) -> None:
        """Fit on every draw and average, except for existing rows."""
        inside, outside = judged_sets(bench, case)
        inliers = FitSet.of(
            bench.inputs.fit_part(case.id, case.model).limit(max(COUNTS)), apart_from=[inside, *outside]
        )  # fmt: skip
        trained = bench.inputs.trained(case.model, case.id)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for method in bench.methods(self.methods):
            for count in (count for count in COUNTS if count <= len(inliers) * 1.01):
                seeds = range(bench.seed * DRAWS, (bench.seed + 1) * DRAWS)
                draws = [Draw("id-only", inliers.draw(min(count, len(inliers)), seed=s), None, s) for s in seeds]
                rows = [
                    bench.blank(facts, one.name, method, draws, [inside, one], trained, setting=f"{count} images")
                    for one in outside
                ]
                if any(map(bench.is_open, rows)):
                    make = lambda name=method: baselines.make(name)  # noqa: E731
                    trials = [bench.trial(make, trained, draw, [inside, *outside]) for draw in draws]
                    bench.results.add(
                        *(
                            {**row, **summarise([(one[0], one[place]) for one in trials], seed=bench.seed)}
                            for place, row in enumerate(rows, start=1)
                        )
                    )


def judged_sets(bench: Workbench, case: Case) -> tuple[EvalSet, list[EvalSet]]:
    """Return ID and OOD images to test on, including altered photos for models of photos."""
    most = JUDGED if bench.limit is None else min(JUDGED, bench.limit)
    if case.id != PHOTOS:
        first, *rest = (bench.inputs.test_part(name).limit(most) for name in (case.id, *case.present(bench.inputs)))
        return EvalSet(first), [EvalSet(one) for one in rest]
    _, inside = halves(bench.inputs.test_part(case.id, case.model))
    outside = [bench.inputs.test_part(name, case.model).limit(min(MOST, most)) for name in case.present(bench.inputs)]
    outside += [alter(inside, name) for name in ALTERATIONS]
    return EvalSet(inside), [EvalSet(one) for one in outside]
