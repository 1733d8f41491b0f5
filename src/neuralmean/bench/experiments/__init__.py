"""The paper's tables and figures as experiments, by name: which can be run here, and how to run them.

To add an experiment, write a subclass of `Experiment` in a file of its own and list it in `_EXPERIMENTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuralmean.bench.experiments.ablation import Ablation
from neuralmean.bench.experiments.base import Case, Experiment
from neuralmean.bench.experiments.batch_size import BatchSize
from neuralmean.bench.experiments.false_alarms import FalseAlarms
from neuralmean.bench.experiments.few_shot import FewShot
from neuralmean.bench.experiments.full_access import FullAccess
from neuralmean.bench.experiments.imagenet import ImageNet
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.jobs import Piece, Settings, run_at_once, run_in_turn
from neuralmean.bench.experiments.latency import Latency
from neuralmean.bench.experiments.layers import Layers
from neuralmean.bench.experiments.methods import Methods
from neuralmean.bench.experiments.more_datasets import MoreDatasets
from neuralmean.bench.experiments.own import Own
from neuralmean.bench.experiments.readings import Readings
from neuralmean.bench.experiments.sample_size import SampleSize
from neuralmean.bench.experiments.statistical import Statistical
from neuralmean.bench.experiments.transfer import Transfer
from neuralmean.bench.experiments.untrained import Untrained
from neuralmean.bench.experiments.variance import Variance
from neuralmean.bench.experiments.zero_shot import ZeroShot
from neuralmean.bench.models.registry import suggestion
from neuralmean.bench.results import Results, Row
from neuralmean.errors import InputError

__all__ = ["Availability", "Case", "Experiment", "available", "get", "names", "run"]

_EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        Statistical(),
        FullAccess(),
        ZeroShot(),
        FewShot(),
        Transfer(),
        MoreDatasets(),
        Latency(),
        Layers(),
        Variance(),
        BatchSize(),
        Untrained(),
        Methods(),
        Ablation(),
        ImageNet(),
        SampleSize(),
        FalseAlarms(),
        Readings(),
        Own(),
    )
}


@dataclass(frozen=True)
class Availability:
    """Whether an experiment can be run with the available data and weights.

    Attributes:
        name: Name of the experiment.
        title: One line about the experiment.
        reference: The part of the paper that it reproduces.
        ready: Cases that can be run, such as "ResNet-56 on CIFAR-10".
        missing: What the paper's other cases still need.
    """

    name: str
    title: str
    reference: str
    ready: tuple[str, ...]
    missing: tuple[str, ...]


def names() -> list[str]:
    """Names of all experiments, in the order of the paper."""
    return list(_EXPERIMENTS)


def get(name: str) -> Experiment:
    """Look up an experiment by its name."""
    if name not in _EXPERIMENTS:
        raise InputError(f"Expected the name of an experiment, but got {name!r}. {suggestion(name, _EXPERIMENTS)}")
    return _EXPERIMENTS[name]


def available(data_root: Path | str, weights_root: Path | str) -> list[Availability]:
    """Return for every experiment what can be run with the given data and weights, and what is missing."""
    inputs = Inputs(data_root, weights_root)
    found = []
    for experiment in _EXPERIMENTS.values():
        ready = experiment.runnable(inputs)
        lacks: dict[str, None] = {}  # a set that preserves order
        for case in experiment.cases:
            lacks.update(dict.fromkeys(case.missing(inputs)))
            lacks.update(dict.fromkeys(f"data {name}" for name in case.oods if not inputs.has_set(name)))
        found.append(
            Availability(experiment.name, experiment.title, experiment.reference, tuple(map(str, ready)), tuple(lacks))
        )
    return found


def run(
    names: Sequence[str] | None = None,
    *,
    out: Path | str,
    data: Path | str = "data",
    weights: Path | str = "weights",
    cache: Path | str | None = None,
    limit: int | None = None,
    seed: int = 0,
    methods: Sequence[str] | None = None,
    models: Sequence[str] = (),
    oods: Mapping[str, Path | str] | None = None,
    id_set: str | None = None,
    again: bool = False,
    jobs: int = 1,
    announce: Callable[[str], None] | None = None,
) -> list[Row]:
    """Run experiments and add their rows to a results file; existing rows are not computed again.

    Args:
        names: Experiments; None for all that can be run.
        out: The results file, updated after every fit.
        data: Folder of the image sets; optional if `oods` is given.
        weights: Folder of the weights; optional if `models` has specs.
        cache: Folder of cached features and scores; None creates one next to `out`.
        limit: Maximum number of images of each set, for a quick run.
        seed: Seed of draws and fits.
        methods: Methods to run; None for all that the experiment compares, `["quick"]` for those without fine-tuning.
        models: Models to run; all if empty. Names of architectures or installed models, or specs such as
            `timm:resnet50@FILE` and `package.module:build`.
        oods: Your own OOD sets, by name: folders of pictures, `.npz` or `.npy` files.
        id_set: The training set of the models given as specs: a known set or one of `oods`.
        again: Whether to compute existing rows again.
        jobs: Number of processes; on two cores, two processes are a third faster than one with two threads.
        announce: Called with a line of text for each case, such as "few-shot: ResNet-56 on CIFAR-10 (3 of 25)".

    Returns:
        All rows of the file.

    Raises:
        InputError: A name is unknown, a folder is missing, or a named experiment has no data or weights.
    """
    if jobs < 1:
        raise InputError(f"Expected `jobs` to be at least 1, but got {jobs!r}.")
    chosen = [get(name) for name in (list(_EXPERIMENTS) if names is None else names)]
    out = Path(out)
    folder = out.parent / f".{out.stem}-cache" if cache is None else Path(cache)
    chosen_methods = None if methods is None else tuple(methods)
    own = tuple((name, Path(path)) for name, path in (oods or {}).items())
    settings = Settings(
        Path(data), Path(weights), out, folder, limit, seed, chosen_methods, tuple(models), own, id_set, again
    )  # fmt: skip
    inputs = settings.inputs()
    settings.workbench(inputs)  # raises for a wrong limit or results file before any work is done
    pieces: list[Piece] = []
    for experiment in chosen:
        ready = experiment.runnable(inputs)
        if not ready and names is not None:
            lacks = experiment.lacks(inputs)
            raise InputError(
                f"Expected data and weights for the experiment {experiment.name!r}, but these are missing: "
                f"{', '.join(lacks)}. `nmd bench list` shows what is available."
            )
        pieces += [Piece(experiment, case) for case in ready]
    say = announce or (lambda line: None)
    if jobs == 1:
        run_in_turn(pieces, settings, inputs, say)
    else:
        run_at_once(pieces, settings, inputs, say, jobs)
    return list(Results(out))
