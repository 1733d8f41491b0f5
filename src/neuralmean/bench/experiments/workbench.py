"""What experiments share: loads sets and models, runs methods, turns scores into rows, skips existing rows."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuralmean.bench import baselines
from neuralmean.bench.baselines.base import Method, Reader
from neuralmean.bench.baselines.trial import Scored, run_trial
from neuralmean.bench.data import ImageSet
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.features import Features, Store
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.models.evaluate import expected_accuracy
from neuralmean.bench.protocols import Draw, EvalSet, FitSet
from neuralmean.bench.results import Results, Row, make_row
from neuralmean.errors import InputError
from neuralmean.models.fingerprint import fingerprint
from neuralmean.stats import metrics

RESAMPLES = 200
_ABOUT_WEIGHTS = ("weights_digest", "model_accuracy", "recipe")
_FIGURES = ("auroc", "tnr95", "accuracy", "aupr_id", "aupr_ood")


@dataclass(frozen=True)
class Sizes:
    """Maximum number of images of a set: to learn from, to test on, and to test heavy methods on."""

    fit: int
    judge: int
    heavy: int = 1000


# All but the heavy methods take less than an hour on two cores: DenseNet-100 processes some 70 images per second and
# core. A heavy method takes gradients or trains, at ten to a hundred times the cost per image.
SIZES = {
    "densenet100": Sizes(fit=3000, judge=4000, heavy=500),
    "wideresnet28-10": Sizes(fit=2000, judge=2000),
    "resnet56": Sizes(fit=6000, judge=10_000),
    "resnet44": Sizes(fit=4000, judge=5000),
    "resnet32": Sizes(fit=4000, judge=5000),
    "resnet20": Sizes(fit=4000, judge=5000),
    "convnet4": Sizes(fit=5000, judge=10_000),
}
USUAL = Sizes(fit=10_000, judge=10_000)
HEAVY_DRAWS = 3  # of the ten in the few-shot protocol


class Workbench:
    """The state shared by the experiments of one run.

    Args:
        inputs: Sets and models.
        results: The results file.
        cache: Folder of cached features and scores.
        limit: Maximum number of images of each set, for a quick run; None for the default sizes.
        seed: Seed of draws and fits.
        methods: Names of methods to run; None for all of an experiment.
        again: Whether to compute existing rows again.
    """

    def __init__(
        self,
        inputs: Inputs,
        results: Results,
        cache: Path | str,
        *,
        limit: int | None = None,
        seed: int = 0,
        methods: Sequence[str] | None = None,
        again: bool = False,
    ) -> None:
        if limit is not None and limit < 50:
            raise InputError(f"Expected `limit` to be None or at least 50 images a set, but got {limit!r}.")
        self.inputs, self.results, self.cache = inputs, results, Path(cache)
        self.limit, self.seed, self.again = limit, seed, again
        self._methods = None if methods is None else list(methods)
        self.store = Store(self.cache / "features")
        self._limited: dict[tuple[str, str, str, int], ImageSet] = {}

    def methods(self, offered: Sequence[str]) -> list[str]:
        """Return which of an experiment's methods to run."""
        return baselines.resolve(self._methods, list(offered))

    def reader(self, trained: TrainedModel) -> Reader:
        """Return a reader of a model's features that uses the cache."""

        def read(images: ImageSet, *, variance: bool) -> Features:
            return self.store.read(trained, images, variance=variance)

        return read

    def judge_set(self, name: str, model: str) -> EvalSet:
        """The test images of a set; their number depends on the model's size."""
        return EvalSet(self._limit(name, "test", model, SIZES.get(model, USUAL).judge))

    def small_judge_set(self, name: str, model: str) -> EvalSet:
        """Fewer test images of a set, for heavy methods and those compared with them."""
        return EvalSet(self._limit(name, "test", model, SIZES.get(model, USUAL).heavy))

    def fit_set(self, name: str, model: str, *, apart_from: Sequence[EvalSet], at_most: int | None = None) -> FitSet:
        """The images of a set that may be learnt from, without images of the test sets."""
        size = SIZES.get(model, USUAL).fit
        return FitSet.of(self._limit(name, "fit", model, min(size, at_most or size)), apart_from=apart_from)

    def _limit(self, name: str, part: str, model: str, size: int) -> ImageSet:
        size = size if self.limit is None else min(size, self.limit)
        shown = model if model in self.inputs.photo_models else ""  # all others share images of 32 x 32
        if (name, part, shown, size) not in self._limited:
            whole = self.inputs.fit_part(name, model) if part == "fit" else self.inputs.test_part(name, model)
            self._limited[name, part, shown, size] = whole.limit(size)
        return self._limited[name, part, shown, size]

    def trial(
        self, make: Callable[[], Method], trained: TrainedModel, draw: Draw, judged: Sequence[EvalSet]
    ) -> list[Scored]:
        """Fit a method and score sets, using the cache."""
        return run_trial(make, trained, draw, judged, self.reader(trained), cache=self.cache / "scores")

    def fresh_trial(
        self, make: Callable[[], Method], trained: TrainedModel, draw: Draw, judged: Sequence[EvalSet]
    ) -> list[Scored]:
        """Fit a method and score sets; only features come from the cache."""
        return run_trial(make, trained, draw, judged, self.reader(trained))

    def compare(
        self,
        facts: Mapping[str, Any],
        method: str,
        draws: Sequence[Draw],
        inside: EvalSet,
        outside: Sequence[EvalSet],
    ) -> None:
        """Add the missing rows of a method, fitted on each of the draws, for each OOD set.

        Args:
            facts: `experiment`, `model` and `id` of the rows.
            method: Name of the method; a heavy one gets fewer draws and test images.
            draws: The data of each fit.
            inside: ID test images.
            outside: OOD test images, one row each.
        """
        trained = self.inputs.trained(facts["model"], facts["id"])
        kind = baselines.make(method)
        if not kind.suits(trained):
            return
        if kind.heavy:
            draws = draws[:HEAVY_DRAWS]
            inside, *outside = (self.small_judge_set(one.name, facts["model"]) for one in (inside, *outside))
        waiting = []
        for one in outside:
            row = self.blank(facts, one.name, method, draws, [inside, one], trained)
            if self.is_open(row):
                waiting.append((one, row))
        if not waiting:
            return
        judged = [inside, *(one for one, _ in waiting)]
        trials = [self.trial(lambda: baselines.make(method), trained, draw, judged) for draw in draws]
        rows = []
        for place, (_, row) in enumerate(waiting, start=1):
            pairs = [(scored[0], scored[place]) for scored in trials]
            rows.append({**row, **summarise(pairs, seed=self.seed)})
        self.results.add(*rows)

    def is_open(self, row: Row) -> bool:
        """Whether a row must be computed: it is not in the results, or existing rows are computed again.

        An older row of the same weights, without later columns, is completed.
        """
        held = self.results.find(row)
        if held is not None and "weights_digest" not in held and "weights_digest" in row:
            self.results.add({**held, **{name: row[name] for name in _ABOUT_WEIGHTS}})
        return self.again or held is None

    def blank(
        self,
        facts: Mapping[str, Any],
        ood: str,
        method: str,
        draws: Sequence[Draw],
        judged: Sequence[EvalSet],
        trained: TrainedModel,
        **extra: Any,
    ) -> Row:
        """Return a row without figures: its identity and a digest of all its inputs."""
        first = draws[0]
        kind = baselines.make(method)
        n_fit_id, n_fit_ood = kind.n_used(trained, len(first.inliers), len(first.outliers or ()))
        inputs = [fingerprint(trained.model), kind.version, *(one.digest() for one in judged)]
        for draw in draws:
            inputs += [
                draw.inliers.digest() if n_fit_id else "",
                draw.outliers.digest() if n_fit_ood and draw.outliers else "",
            ]
        columns = {
            **facts,
            "ood": ood,
            "method": method,
            "protocol": first.protocol,
            "auroc": None,
            "tnr95": None,
            "accuracy": None,
            "n_id": len(judged[0]),
            "n_ood": len(judged[-1]),
            "seed": self.seed,
            "seconds": None,
        }
        return make_row(
            columns,
            n_fit_id=n_fit_id,
            n_fit_ood=n_fit_ood,
            fit_ood=first.outliers.name if n_fit_ood and first.outliers else None,
            draws=len(draws),
            weights=self._weights_name(trained, facts),
            weights_digest=fingerprint(trained.model)[:16],
            model_accuracy=expected_accuracy(trained),
            recipe=trained.metadata.get("recipe"),
            limit=self.limit,
            inputs=hashlib.sha256(repr(inputs).encode()).hexdigest()[:16],
            **extra,
        )

    def _weights_name(self, trained: TrainedModel, facts: Mapping[str, Any]) -> str:
        if "untrained" in trained.metadata:
            return f"random, seed {trained.metadata['untrained']}"
        held = self.inputs.weights.get((facts["model"], facts["id"]))
        return trained.metadata.get("weights") or trained.metadata.get("source", "") if held is None else held.name


def summarise(pairs: Sequence[tuple[Scored, Scored]], *, seed: int) -> dict[str, Any]:
    """Compute the figures of a row from the scores of ID and OOD images, one pair per draw.

    With one draw, the figures have a bootstrap interval; with several, they are means with the standard deviation over draws.
    """
    figures = [metrics.evaluate(inside.scores, outside.scores) for inside, outside in pairs]
    values = {name: [getattr(one, name) for one in figures] for name in _FIGURES}
    summary: dict[str, Any] = {name: round(float(np.mean(values[name])), 3) for name in _FIGURES}
    if len(pairs) == 1:
        inside, outside = (one.scores for one in pairs[0])
        intervals = metrics.bootstrap(inside, outside, resamples=RESAMPLES, seed=seed, aupr=False)
        for name in ("auroc", "tnr95", "accuracy"):
            summary[f"{name}_ci"] = [round(intervals[name].low, 3), round(intervals[name].high, 3)]
    else:
        for name in ("auroc", "tnr95", "accuracy"):
            summary[f"{name}_std"] = round(float(np.std(values[name], ddof=1)), 3)
    return {**summary, **_costs(pairs)}


def _costs(pairs: Sequence[tuple[Scored, Scored]]) -> dict[str, Any]:
    fit = [inside.fit for inside, _ in pairs]
    score = [one.score for pair in pairs for one in pair]
    images = sum(len(one.scores) for pair in pairs for one in pair)
    peaks = [cost.peak_mb for cost in (*fit, *score) if cost.peak_mb is not None]
    fit_seconds, score_seconds = sum(cost.seconds for cost in fit), sum(cost.seconds for cost in score)
    return {
        "seconds": round(fit_seconds + score_seconds, 3),
        "fit_seconds": round(fit_seconds / len(pairs), 3),
        "score_ms_per_image": round(1000 * score_seconds / images, 4),
        "fit_passes": sum(cost.passes for cost in fit) // len(pairs),
        "passes_per_image": round(sum(cost.passes for cost in score) / images, 2),
        "peak_mb": round(max(peaks), 1) if peaks else None,
    }
