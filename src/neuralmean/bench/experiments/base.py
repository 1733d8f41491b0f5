"""What an experiment is: a name, a place in the paper, the cases it consists of, and how one case is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neuralmean.bench import titles
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench


@dataclass(frozen=True)
class Case:
    """One model trained on one set, and the OOD sets that it meets.

    Attributes:
        model: Name of the architecture.
        id: The in-distribution set.
        oods: OOD sets to judge by; those that are not there are left out.
        learns_from: Further sets that must be there, such as the OOD set of the transfer protocol.
    """

    model: str
    id: str
    oods: tuple[str, ...]
    learns_from: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{titles.of_model(self.model)} on {titles.of_set(self.id)}"

    def present(self, inputs: Inputs) -> tuple[str, ...]:
        """The OOD sets of the case that are there, and those of the user's own."""
        own = (name for name in inputs.own_sets if name != self.id and name not in self.oods)
        return (*(name for name in self.oods if inputs.has_set(name)), *own)

    def missing(self, inputs: Inputs) -> list[str]:
        """What keeps the case from being run at all; empty when it can be."""
        lacks = [] if inputs.has_model(self.model, self.id) else [f"weights {self.model}-{self.id}"]
        lacks += [f"data {name}" for name in (self.id, *self.learns_from) if not inputs.has_set(name)]
        if not self.present(inputs):
            lacks.append(f"data {' or '.join(self.oods)}")
        return lacks


class Experiment:
    """One table or figure of the paper. A subclass sets the attributes and implements `run`.

    Attributes:
        name: What it is called on the command line.
        title: One line for people.
        reference: The part of the paper that it reproduces.
        cases: What it consists of, the paper's own cases first.
        first_only: Whether one case is enough: the first that can be run.
        methods: Methods that it compares, in the order of its table; those not there are left out.
        alone: Whether it measures time, so that nothing else should run at the same time.
        by_method: Whether each method can be run by itself.
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
        """The cases that data and weights allow, restricted to the chosen models."""
        ready = [case for case in self.cases if inputs.wants(case.model) and not case.missing(inputs)]
        return ready[:1] if self.first_only else ready

    def lacks(self, inputs: Inputs) -> list[str]:
        """What is missing to run the first case of the chosen models."""
        wanted = [case for case in self.cases if inputs.wants(case.model)]
        lacks = [fact for case in wanted[:1] for fact in case.missing(inputs)]
        return lacks or ["a model that it is about, with its data and weights"]

    def run(self, bench: Workbench, case: Case) -> None:
        """Measure one case; rows go to the workbench's results."""
        raise NotImplementedError


RESIDUAL = ("resnet34", "resnet56", "resnet44", "resnet32", "resnet20")  # the paper's model, then its substitutes
SLOW_MODELS = ("densenet100", "wideresnet28-10")  # some 70 images a second on one core
TABLE_MODELS = ("resnet34", "resnet56", "densenet100")
ALL_OODS = ("svhn", "cifar100", "imagenet-crop", "imagenet-resize", "lsun-crop", "lsun-resize", "isun", "textures")


def cases(
    names: Sequence[str], inside: str, oods: Sequence[str], *, learns_from: Sequence[str] = ()
) -> tuple[Case, ...]:
    """Return one case for each model."""
    outside = tuple(name for name in oods if name != inside)
    return tuple(Case(name, inside, outside, tuple(learns_from)) for name in names)
