"""Your models on your data: every method that needs ID images only. Not in the paper."""

from __future__ import annotations

from neuralmean.bench import baselines, protocols
from neuralmean.bench.experiments.base import ALL_OODS, Case, Experiment
from neuralmean.bench.experiments.imagenet import ImageNet
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench


class Own(Experiment):
    """Models given as specs, trained on the set named by `--id`, against all other available sets."""

    name = "own"
    title = "Models and data of your own"
    reference = "not in the paper"
    cases = ()
    methods = ImageNet.methods
    by_method = True

    def runnable(self, inputs: Inputs) -> list[Case]:
        """One case for each model given as a spec, if its training set is named."""
        if inputs.id_set is None or not inputs.has_set(inputs.id_set):
            return []
        outside = tuple(name for name in (*inputs.own_sets, *ALL_OODS) if name != inputs.id_set)
        present = tuple(dict.fromkeys(name for name in outside if inputs.has_set(name)))
        return [Case(model, inputs.id_set, present) for model in inputs.specs] if present else []

    def lacks(self, inputs: Inputs) -> list[str]:
        """What is missing."""
        if not inputs.specs:
            return ["a model, as `--model package:build`"]
        if inputs.id_set is None:
            return ["the set that the model was trained on, as `--id NAME`"]
        if not inputs.has_set(inputs.id_set):
            return [f"data {inputs.id_set}, as `--ood {inputs.id_set}=DIR` or in the data folder"]
        return ["a set to test on, as `--ood NAME=DIR`"]

    def run(self, bench: Workbench, case: Case) -> None:
        """Fit every method on the train split of the ID set and test it on the test splits."""
        judged = [bench.judge_set(name, case.model) for name in (case.id, *case.oods)]
        inliers = bench.fit_set(case.id, case.model, apart_from=judged)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for method in bench.methods(self.methods):
            if "labels" in baselines.make(method).reads and inliers.source.labels is None:
                continue  # a folder without classes
            bench.compare(facts, method, protocols.id_only(inliers, seed=bench.seed), judged[0], judged[1:])
