"""The interface of experiments: a name, a place in the paper, cases, and how to run a case."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuralmean.bench import titles
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench


@dataclass(frozen=True)
class Case:
    """One model trained on one set, and its OOD sets.

    Attributes:
        model: Name of the architecture.
        id: The in-distribution set.
        oods: OOD sets to test on; missing ones are skipped.
        learns_from: Further required sets, such as the OOD set of the transfer protocol.
    """

    model: str
    id: str
    oods: tuple[str, ...]
    learns_from: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{titles.of_model(self.model)} on {titles.of_set(self.id)}"

    def present(self, inputs: Inputs) -> tuple[str, ...]:
        """The available OOD sets of the case, and the user's."""
        own = (name for name in inputs.own_sets if name != self.id and name not in self.oods)
        return (*(name for name in self.oods if inputs.has_set(name)), *own)

    def missing(self, inputs: Inputs) -> list[str]:
        """What is missing to run the case; empty if it can be run."""
        lacks = [] if inputs.has_model(self.model, self.id) else [f"weights {self.model}-{self.id}"]
        lacks += [f"data {name}" for name in (self.id, *self.learns_from) if not inputs.has_set(name)]
        if not self.present(inputs):
            lacks.append(f"data {' or '.join(self.oods)}")
        return lacks


class Experiment:
    """One table or figure of the paper. A subclass sets the attributes and implements `run`.

    Attributes:
        name: Name on the command line.
        title: One-line description.
        reference: The part of the paper that it reproduces.
        cases: The cases, the paper's first.
        first_only: Whether to run only the first case that can be run.
        methods: Methods to compare, in the order of the table; unknown ones are skipped.
        alone: Whether times are measured, so that nothing else should run at the same time.
        by_method: Whether methods can be run separately.
    """

    name: str
    title: str
    reference: str
    cases: tuple[Case, ...]
    first_only: bool = False
    methods: tuple[str, ...] = ()
    alone: bool = False
    by_method: bool = False

    def runnable(self, inputs: Inputs) -> list[Case]:
        """The cases that can be run, restricted to the chosen models."""
        ready = [case for case in self.cases if inputs.wants(case.model) and not case.missing(inputs)]
        return ready[:1] if self.first_only else ready

    def lacks(self, inputs: Inputs) -> list[str]:
        """What is missing to run the first case of the chosen models."""
        wanted = [case for case in self.cases if inputs.wants(case.model)]
        lacks = [fact for case in wanted[:1] for fact in case.missing(inputs)]
        return lacks or ["one of its models, with data and weights"]

    def run(self, bench: Workbench, case: Case) -> None:
        """Measure one case and add rows to the workbench's results."""
        raise NotImplementedError


RESIDUAL = ("resnet34", "resnet56", "resnet44", "resnet32", "resnet20")  # the paper's model, then its replacements
SLOW_MODELS = ("densenet100", "wideresnet28-10")  # some 70 images a second on one core
TABLE_MODELS = ("resnet34", "resnet56", "densenet100")
ALL_OODS = ("svhn", "cifar100", "imagenet-crop", "imagenet-resize", "lsun-crop", "lsun-resize", "isun", "textures")


def cases(
    names: Sequence[str], inside: str, oods: Sequence[str], *, learns_from: Sequence[str] = ()
) -> tuple[Case, ...]:
    """Return one case for each model."""
    outside = tuple(name for name in oods if name != inside)
    return tuple(Case(name, inside, outside, tuple(learns_from)) for name in names)
