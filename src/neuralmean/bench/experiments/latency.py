"""Figure 1 and table 5: time to fit and time for one image, CIFAR-10 against CIFAR-100.

One image is timed from its pixels to its score, alternating with a plain forward pass of the same image, so that other
load affects both alike. The library's scorers are timed twice: eagerly and, if there is a C++ compiler, with
`Detector.freeze`. A fit is timed from pixels too, computing only the features that the method reads. Only the features
for the AUROC come from the cache.
"""

from __future__ import annotations

import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from neuralmean.bench import baselines, protocols
from neuralmean.bench.baselines.base import Method, Read, View
from neuralmean.bench.baselines.measure import Meter
from neuralmean.bench.baselines.trial import Scored, fit_method, score_set
from neuralmean.bench.data import ImageSet
from neuralmean.bench.experiments.base import RESIDUAL, Case, Experiment, cases
from neuralmean.bench.experiments.workbench import Workbench, summarise
from neuralmean.bench.features import Features
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.models.evaluate import BATCH
from neuralmean.bench.protocols import Draw, EvalSet, FitSet
from neuralmean.bench.results import Row
from neuralmean.data.batch import Batch
from neuralmean.detector.detector import Detector
from neuralmean.errors import NeuralMeanError, NeuralMeanWarning
from neuralmean.models.layers import select_layers
from neuralmean.recording import Recorder, find_head

REPEATS = 100
WARM_UP = 5
ENOUGH_SECONDS = 20.0
AT_LEAST = 10
FROZEN = {"ours-avg": "average", "ours-mlp": "mlp", "typicality": "typicality"}  # scorers by method
TAKES_OUTLIERS = ("mlp",)
ENOUGH_TO_FIT = 200  # images; the time of a fitted scorer does not depend on them


class Latency(Experiment):
    """Time to fit and time for one image of every method, relative to the plain forward pass."""

    name = "latency"
    title = "Time to fit, time for one image"
    reference = "Figure 1, Table 5 (appendix)"
    cases = cases(RESIDUAL, "cifar10", ("cifar100",))
    first_only = True
    alone = True
    methods = (
        "msp",
        "energy",
        "knn",
        "vim",
        "ours-avg",
        "ours-lr",
        "ours-mlp",
        "typicality",
        "odin",
        "mahalanobis",
        "g-odin",
        "oe",
        "energy-ft",
        "acet",
        "good",
        "gram",
    )

    def run(self, bench: Workbench, case: Case) -> None:
        """Fit every method under full access, test it, and time single images."""
        trained = bench.inputs.trained(case.model, case.id)
        names = (case.id, *case.oods)
        all_judges = [bench.judge_set(name, case.model) for name in names]
        few_judges = [bench.small_judge_set(name, case.model) for name in names]
        inliers, outliers = (bench.fit_set(name, case.model, apart_from=all_judges) for name in names)
        draw = protocols.full_access(inliers, outliers, seed=bench.seed)[0]
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for name in bench.methods(self.methods):
            method = baselines.make(name)
            if not method.suits(trained):
                continue
            inside, outside = few_judges if method.heavy else all_judges
            row = bench.blank(facts, outside.name, name, [draw], [inside, outside], trained)
            if bench.is_open(row):
                self._measure(bench, row, trained, draw, inside, outside)
            if name in FROZEN:
                row = bench.blank(facts, outside.name, name, [draw], [inside, outside], trained, setting="frozen")
                times = time_frozen(FROZEN[name], trained, draw, inside.source) if bench.is_open(row) else None
                if times is not None:
                    bench.results.add({**row, **times, "fit_seconds": None})

    def _measure(
        self, bench: Workbench, row: Row, trained: TrainedModel, draw: Draw, inside: EvalSet, outside: EvalSet
    ) -> None:
        method, kept = baselines.make(row["method"]), bench.reader(trained)
        fit = fit_method(method, trained, draw, LiveReader(trained, method.reads))
        scored = [
            Scored(scores, fit, cost)
            for scores, cost in (score_set(method, trained, one, kept) for one in (inside, outside))
        ]
        row.update(summarise([(scored[0], scored[1])], seed=bench.seed))
        row.update(time_single(method, trained, inside.source))
        row.update(uses_gradients=method.uses_gradients, fine_tunes=method.fine_tunes)
        bench.results.add(row)


def time_single(method: Method, trained: TrainedModel, images: ImageSet, *, repeats: int = REPEATS) -> Row:
    """Median milliseconds for one image, by `method` and by the plain model.

    Args:
        method: A fitted method.
        trained: The model.
        images: Source of the images.
        repeats: Number of images; fewer for slow methods.
    """
    reader = LiveReader(trained, method.reads)
    singles = [EvalSet(images.take(slice(i, i + 1))) for i in range(min(len(images), repeats + WARM_UP))]
    return _in_turn(trained, singles, lambda one: method.score(_view(method, trained, one, reader)))


def time_frozen(
    scorer: str, trained: TrainedModel, draw: Draw, images: ImageSet, *, repeats: int = REPEATS
) -> Row | None:
    """Median milliseconds for one image, by a frozen detector and by the plain model.

    None, with a warning, if the detector cannot be frozen (no compiler, or not faster).

    Args:
        scorer: Name of the library's scorer.
        trained: The model.
        draw: The data to fit on.
        images: Source of the images.
        repeats: Number of images.
    """

    def shown(part: FitSet | None) -> Tensor | None:
        some = None if part is None else part.source.images[part.rows[:ENOUGH_TO_FIT]]
        return None if some is None else trained.preprocess(some)

    held_out = trained.preprocess(images.images[:ENOUGH_TO_FIT])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuralMeanWarning)  # on few images, as its decisions are not used
        detector = Detector(trained.model, scorer=scorer)
        outliers = shown(draw.outliers) if scorer in TAKES_OUTLIERS else None
        detector.fit(shown(draw.inliers), outliers, held_out=held_out)
    try:
        detector.freeze(trained.preprocess(images.images[:1]))
    except NeuralMeanError as error:
        warnings.warn(f"A frozen detector was not timed: {error}", NeuralMeanWarning, stacklevel=2)
        return None
    singles = [EvalSet(images.take(slice(i, i + 1))) for i in range(min(len(images), repeats + WARM_UP))]
    return _in_turn(trained, singles, lambda one: detector.score(trained.preprocess(one.source.images)))


def _in_turn(trained: TrainedModel, singles: Sequence[EvalSet], score: Callable[[EvalSet], object]) -> Row:
    """Time `score`, alternating with the plain pass of the same image."""
    plain: list[float] = []
    own: list[float] = []
    begun = time.perf_counter()
    for number, one in enumerate(singles):
        base = _clock(lambda one=one: _plain(trained, one.source))  # type: ignore[misc]
        cost = _clock(lambda one=one: score(one))  # type: ignore[misc]
        if number >= WARM_UP:
            plain.append(base)
            own.append(cost)
        if len(own) >= AT_LEAST and time.perf_counter() - begun > ENOUGH_SECONDS:
            break
    ratio = statistics.median(mine / base for mine, base in zip(own, plain, strict=True))
    return {
        "latency_ms": round(1000 * statistics.median(own), 3),
        "plain_ms": round(1000 * statistics.median(plain), 3),
        "ratio": round(ratio, 3),
        "repeats": len(own),
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, torch {torch.__version__}",
    }


class LiveReader:
    """Runs the model, recording only what a method reads.

    Args:
        trained: The model.
        reads: What the method reads.
    """

    def __init__(self, trained: TrainedModel, reads: frozenset[Read]) -> None:
        self._trained, self._reads = trained, reads
        layers = select_layers(trained.model)
        # A recorder needs a watched layer, even if only the feature is read.
        self._layers = layers if {"means", "variances"} & reads else layers[-1:] if "feature" in reads else ()
        self._recorder: Recorder | None = None

    def __call__(self, images: ImageSet, *, variance: bool) -> Features:
        """Return the features of `images`."""
        begun = time.perf_counter()
        with torch.no_grad():
            pieces = [
                self._run(
                    Batch((self._trained.preprocess(images.images[start : start + BATCH]),)), images.name, variance
                )
                for start in range(0, len(images), BATCH)
            ]
        means, variances, logits, feature = (_join(column) for column in zip(*pieces, strict=True))
        if means is None:
            means = torch.zeros(len(images), 0)
        return Features(self._layers, means, variances, logits, feature, time.perf_counter() - begun)

    def _run(self, batch: Batch, name: str, variance: bool) -> tuple[Tensor | None, ...]:
        """Means, variances, logits and feature of one batch, if recorded."""
        if not self._layers:
            return None, None, self._trained.model(batch.first), None
        if self._recorder is None:
            wants_head = bool({"logits", "feature"} & self._reads)
            head = find_head(self._trained.model, batch) if wants_head else None
            self._recorder = Recorder(self._trained.model, self._layers, variance=variance, head=head)
        held = self._recorder(batch, name=name)
        return held.mean, held.variance, held.logits, held.feature


def _join(column: tuple[Tensor | None, ...]) -> Tensor | None:
    there = [piece for piece in column if piece is not None]
    return torch.cat(there) if len(there) > 1 else there[0] if there else None


def _view(method: Method, trained: TrainedModel, images: EvalSet, reader: LiveReader) -> View:
    return View(trained, images.source, None, reads=method.reads, reader=reader, meter=Meter())


def _plain(trained: TrainedModel, images: ImageSet) -> None:
    with torch.no_grad():
        trained.model(trained.preprocess(images.images))


def _clock(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
