"""`Detector` joins the steps: a model, its reference, a scorer and a threshold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from neuralmean import cascade, fitting
from neuralmean.artefact import Artefact
from neuralmean.baseline import Baseline, Seen
from neuralmean.calibration import Calibration, check_rate
from neuralmean.data import BATCH_SIZE, count_batches, count_rows, to_batch, to_batches
from neuralmean.decision import Decision, Explanation
from neuralmean.discrepancy import (
    Statistic,
    check_statistic,
    discrepancy,
    pool_batch,
    scale_of,
    sum_by_layer,
    vector_layers,
    vector_names,
)
from neuralmean.errors import InputError, NotFittedError
from neuralmean.fingerprint import WeightsWatch
from neuralmean.gathering import Gathered, gather
from neuralmean.layers import has_running_mean, select_layers, unwrap
from neuralmean.moments import Moments
from neuralmean.observer import FIND_HEAD, Craft, Observer, Rows, Turn
from neuralmean.progress import track
from neuralmean.reference import Reference
from neuralmean.running import uncompiled
from neuralmean.saving import from_artefact, to_artefact
from neuralmean.scorers import AverageScorer, Observation, Scorer
from neuralmean.traced import trace


class Detector:
    """Tells whether inputs of a trained model are like its training data.

    Args:
        model: A trained model; it is never changed.
        layers: Dotted names or globs of the layers to watch (`"layer3.*.bn2"`); None chooses.
        statistic: `"mean"` (the paper's NMD), `"variance"` (NVD) or `"both"`, standardised and side by side.
        scorer: A name (see `neuralmean.scorers.SCORERS`) or an object with `fit` and `score`, which is copied; None takes
            the best one for the data given to `fit`.
        reference: What the training data looks like; None reads the batch-norm buffers where every watched layer has
            them, and otherwise makes it from the `id_data` given to `fit`.
        head: Name of the layer whose output is the logits and whose input is the penultimate feature, for scorers that
            need them; None finds it, False says that the model has no classes.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
        >>> images = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> _ = [model(images) for _ in range(50)]  # stands for training
        >>> detector = Detector(model, scorer="average").calibrate(images)
        >>> output, decision = detector(torch.full((1, 3, 8, 8), 9.0))
        >>> decision.is_ood
        tensor([True])
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layers: str | Sequence[str] | None = None,
        statistic: str = "mean",
        scorer: str | Scorer | None = None,
        reference: Reference | None = None,
        head: str | bool | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError(f"Expected `model` to be a torch.nn.Module, but got {type(model).__name__}.")
        self.model = model
        self.statistic: Statistic = check_statistic(statistic)
        if layers is None and reference is not None:
            layers = [layer.name for layer in reference.layers]
        self._layers = select_layers(model, layers)
        if reference is not None and reference.layers != self._layers:
            raise InputError("Expected a reference of the layers that are watched. Make it with the same `layers`.")
        if isinstance(head, str) and head not in dict(unwrap(model).named_modules()):
            raise InputError(f"Expected `head` to be a layer of {type(unwrap(model)).__name__}, but got {head!r}.")
        fitting.check_scorer(scorer)  # a wrong name is an error now rather than in `fit`
        self._scorer_choice = scorer
        self._reference_given = reference
        self._head_choice = head
        self.info: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        """Take the model as it is now, with nothing learnt."""
        self._watch = WeightsWatch(self.model)
        self.reference = self._reference_given or self._free_reference()
        # Until `fit`, the one scorer that needs nothing: the paper's average.
        self.scorer = fitting.choose_scorer(self._scorer_choice or "average", None)
        self.calibration: Calibration | None = None
        self.calibration_source: fitting.Source | None = None
        self.scale: Moments | None = None  # of the vectors, for `statistic="both"`
        self.baseline: Baseline | None = None  # what held-out data looks like: what a `Monitor` compares with
        self.fitted: dict[str, Any] = {}
        self.head: str | None = None
        self._observer = self._make_observer(None)

    def _free_reference(self) -> Reference | None:
        core = unwrap(self.model)
        if all(has_running_mean(core.get_submodule(layer.name)) for layer in self._layers):
            return Reference.from_batchnorm(self.model, [layer.name for layer in self._layers])
        return None

    def _make_observer(self, head: str | None) -> Observer:
        return Observer(self.model, self._layers, variance=self.statistic != "mean", head=head)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the watched layers."""
        return tuple(layer.name for layer in self._layers)

    @property
    def channels(self) -> list[str]:
        """Names of the columns of the discrepancy vector: `"bn1[3]"` is channel 3 of layer bn1."""
        return vector_names(self._layers, self.statistic)

    @property
    def threshold(self) -> float:
        """The score above which an input is flagged."""
        return self._calibrated().threshold

    @property
    def guarantee(self) -> str:
        """What the false-alarm rate is worth, in a sentence."""
        self._calibrated()
        return fitting.GUARANTEES[self.calibration_source or "held_out"]

    def fit(
        self,
        id_data: Any,
        ood_data: Any = None,
        *,
        false_alarm_rate: float = 0.05,
        held_out: Any = None,
        early_exit: bool = False,
        batch_size: int = BATCH_SIZE,
    ) -> Self:
        """Learn from in-distribution examples and, where there are any, examples of what is not.

        Args:
            id_data: In-distribution examples; the model's own training data is fine.
            ood_data: Examples of out-of-distribution inputs. Without them a scorer that needs some (`"logistic"`,
                `"mlp"`) gets crafted ones, as in the paper's zero-shot protocol: `id_data` with its blocks permuted.
            false_alarm_rate: Share of in-distribution inputs that may be flagged.
            held_out: In-distribution examples that the model was *not* trained on: the threshold and the p-values come
                from them. Without them a part of `id_data` serves, with a warning on what that is worth.
            early_exit: Whether `detector(x)` may stop the forward pass once every input is certainly OOD; its output is
                None then. The false-alarm rate holds for all exits together.
            batch_size: Rows per forward pass where data comes in one piece.

        Data may be a tensor, an array, a DataLoader, a Dataset or an iterable of batches; a batch may be `x`, `(x, y)`
        or a dict of keyword inputs.
        """
        check_rate(false_alarm_rate)
        if early_exit:
            cascade.check_statistic(self.statistic)
        before = dict(self.__dict__)
        try:
            with torch.inference_mode(False):  # what is learnt there has no gradients, which `explain` may need
                source = self._fit(id_data, ood_data, false_alarm_rate, held_out, batch_size, early_exit)
        except BaseException:
            self.__dict__ = before  # a fit that fails leaves the detector as it was
            raise
        fitting.warn_if_weak(source)
        return self

    def _fit(
        self, id_data: Any, ood_data: Any, rate: float, held_out: Any, batch_size: int, early_exit: bool
    ) -> fitting.Source:
        self._reset()
        scorer = self._scorer_for(ood_data)
        observer = self._make_observer(self._head_for(scorer))
        beside: Craft | Turn | None = None
        if ood_data is None and getattr(scorer, "uses_outliers", False):
            beside = Craft()
        elif held_out is None and fitting.needs_of(scorer):
            # What the model says of images that it has memorised is no measure of what it says of fresh ones.
            beside = Turn(fitting.rotate_every(count_rows(id_data), rate))
        # Whether rows can be scored as they come, as nothing is learnt from them. (A scorer of the user's own has its `fit`.)
        at_once = self.reference is not None and self.statistic != "both" and not early_exit
        at_once = at_once and type(scorer) is AverageScorer
        make = partial(
            Gathered,
            statistic=self.statistic,
            score=partial(self._score_rows, scorer) if at_once else None,
            digests=held_out is not None,
            layers=() if self.reference else self._layers,
        )
        seen = self._nothing_seen()
        sets = gather(observer, id_data, ood_data, held_out, make=make, seen=seen, beside=beside, batch_size=batch_size)
        if sets.held_out is not None:
            fitting.warn_if_shared(sets.inliers.digests, sets.held_out.digests)
        self.reference = self.reference or sets.inliers.reference
        if self.statistic == "both":
            self.scale = sets.inliers.moments(self.reference)
        if early_exit:
            scorer = cascade.CascadeScorer.around(scorer, self._layers, repeated=observer.recorder.repeated)
        self._observer, self.head, self.scorer = observer, observer.head, scorer
        if at_once:
            held = None if sets.held_out is None else sets.held_out.scores
            scores, source = fitting.choose_scores(sets.inliers.scores, held, rate)
        else:
            parts = sets.into_observations(self._observation)
            scores, source = fitting.fit_and_score_inliers(scorer, **parts, rate=rate)
        baseline = None if held_out is None else seen.baseline()
        self.calibration, self.calibration_source, self.baseline = Calibration.of(scores, rate), source, baseline
        self.fitted = {"when": datetime.now(timezone.utc).isoformat(timespec="seconds"), **sets.counts()}
        return source

    def calibrate(self, held_out: Any, *, false_alarm_rate: float = 0.05, batch_size: int = BATCH_SIZE) -> Self:
        """Set the threshold and the p-values from in-distribution examples that the model was not trained on."""
        check_rate(false_alarm_rate)
        scores, seen = [], self._nothing_seen()
        for found, vectors in self._score_each(held_out, "held_out", batch_size):
            scores.append(found)
            seen.add(vectors)
        calibration, baseline = Calibration.of(torch.cat(scores), false_alarm_rate), seen.baseline()
        self.calibration, self.calibration_source, self.baseline = calibration, "held_out", baseline
        self.fitted = {**self.fitted, "n_held_out": baseline.moments.count}
        return self

    def __call__(self, x: Any) -> tuple[Any, Decision]:
        """Return the model's own output and the decision, after one forward pass.

        With `early_exit` the output is None where the pass was stopped, every input being OOD.
        """
        calibration = self._calibrated()
        self._watch.check()
        watch = cascade.watch_of(self)
        output, rows = self._observer.observe(to_batch(x), exits=watch)
        if watch is not None and watch.stopped and watch.scores is not None:
            return None, Decision(watch.scores, calibration)
        return output, Decision(fitting.score_rows(watch or self.scorer, self._observation(rows)), calibration)

    def predict(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Decision:
        """Decide on each input of `x`."""
        calibration = self._calibrated()
        return Decision(self.score(x, batch_size=batch_size), calibration)

    def score(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Tensor:
        """Score each input, shape (N,); higher = more OOD."""
        return torch.cat([scores for scores, _ in self._score_each(x, "x", batch_size)])

    def score_batch(self, x: Any, *, batch_size: int = BATCH_SIZE) -> float:
        """Score all inputs of `x` as one batch (the paper's Eq. 3 for |I| > 1); higher = more OOD."""
        self._watch.check()
        rows = self._observer.observe_all(x, name="x", batch_size=batch_size)
        own = getattr(self.scorer, "score_batch", None)
        if own is not None:
            return float(own(fitting.view_of(self.scorer, self._observation(rows))))
        if needs := fitting.needs_of(self.scorer):
            name = type(self.scorer).__name__
            raise InputError(
                f"Expected a scorer with `score_batch`, as {name} needs the model's {' and '.join(sorted(needs))}."
            )
        means, variances = pool_batch(rows.means, rows.variances)
        return fitting.score_rows(self.scorer, self._observation(Rows(means, variances))).item()

    def discrepancy(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Tensor:
        """Return the discrepancy vector of each input, shape (N, D); `channels` names the columns."""
        self._watch.check()
        return self._observation(self._observer.observe_all(x, name="x", batch_size=batch_size)).vector

    def explain(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Explanation:
        """Say which layers and channels made the scores of `x` what they are."""
        self._watch.check()
        observation = self._observation(self._observer.observe_all(x, name="x", batch_size=batch_size))
        by_channel, terms, exact = fitting.contributions_of(self.scorer, observation)
        return Explanation(
            score=fitting.score_rows(self.scorer, observation),
            layers=self.layers,
            channels=tuple(self.channels),
            by_layer=sum_by_layer(by_channel, vector_layers(self._layers, self.statistic), len(self._layers)),
            by_channel=by_channel,
            terms=terms,
            exact=exact,
        )

    def freeze(self, x: Any) -> Self:
        """Run the model as one graph from now on, without Python between its layers: faster, most of all for single inputs.

        Batch norms are folded into the convolutions before them; early exits stay exits. Holds for inputs of the shape of `x` on
        the CPU; others go through the model as ever. A model that went through `torch.compile` is run as this graph, too. The
        graph is used only if it gives the model's own numbers, but for their last digits, and until the next `fit`; a copy of the
        detector runs the model. Its output carries no gradients to the weights.

        Args:
            x: Inputs of the usual shape, (N, ...).

        Raises:
            InputError: The model is no fixed graph: what it does depends on values, or its output is no tensor.
        """
        self._watch.check()
        batch, observer = to_batch(x), self._observer.on(uncompiled(self.model))
        with torch.no_grad():
            output = observer.observe(batch)[0]
        if not isinstance(output, Tensor):
            raise InputError(f"Expected a model whose output is a tensor to freeze, but got {type(output).__name__}.")
        watch = cascade.watch_of(self)
        traced = trace(observer, batch.first, fold=True, depths=() if watch is None else watch.depths)
        self._observer = traced.around(self._observer)
        return self

    def save(self, path: str | Path, *, info: Mapping[str, Any] | None = None) -> None:
        """Write the fitted detector to one file, whole or not at all; the model is not in it.

        Args:
            path: Where to.
            info: JSON values to keep beside it (model spec, preprocessing), added to `detector.info`.
        """
        self._watch.check()
        known = {**self.info, **(info or {})}
        to_artefact(self, known).write(path)
        self.info = known

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Detector:
        """Read a detector that `save` wrote, for the same model with the same weights."""
        with torch.inference_mode(False):  # as in `fit`
            return from_artefact(cls, Artefact.read(path), model, str(path))

    def _scorer_for(self, ood_data: Any) -> Scorer:
        if ood_data is None:
            return fitting.choose_scorer(self._scorer_choice, None)
        return fitting.choose_scorer(self._scorer_choice, count_rows(ood_data) or 0)

    def _head_for(self, scorer: Scorer) -> str | None:
        if not fitting.needs_of(scorer) or self._head_choice is False:
            return None
        return self._head_choice if isinstance(self._head_choice, str) else FIND_HEAD

    def _score_each(self, x: Any, name: str, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield scores and vectors of each batch of `x`."""
        self._watch.check()
        steps = count_batches(x, batch_size=batch_size)
        batches = to_batches(x, name=name, batch_size=batch_size)
        for batch in track(batches, description="Scoring", total=steps, unit="batches"):
            with torch.no_grad():
                found = self._score_rows(self.scorer, self._observer.observe(batch, name=name)[1])
            yield found

    def _nothing_seen(self) -> Seen:
        return Seen(vector_layers(self._layers, self.statistic), len(self._layers))

    def _score_rows(self, scorer: Scorer, rows: Rows) -> tuple[Tensor, Tensor]:
        observation = self._observation(rows)
        return fitting.score_rows(scorer, observation), observation.vector

    def _observation(self, rows: Rows) -> Observation:
        if self.reference is None:
            raise NotFittedError(
                "The detector has no reference yet, as the model has no batch-norm buffers. Call `fit` first."
            )
        vector = discrepancy(rows.means, rows.variances, self.reference, self.statistic)
        if self.statistic == "both":
            if self.scale is None:
                raise NotFittedError("`statistic='both'` is standardised on in-distribution data. Call `fit` first.")
            vector = ((vector - self.scale.mean) / scale_of(self.scale)).to(vector.dtype)
        return Observation(vector, rows.output, rows.feature)

    def _calibrated(self) -> Calibration:
        if self.calibration is None:
            raise NotFittedError("The detector has no threshold yet. Call `fit` or `calibrate` first.")
        return self.calibration

    def __repr__(self) -> str:
        name, scorer = type(unwrap(self.model)).__name__, getattr(self.scorer, "name", type(self.scorer).__name__)
        state = "not calibrated" if self.calibration is None else f"threshold {self.threshold:.4g}"
        return f"Detector({name}: {len(self._layers)} layers, {len(self.channels)} channels, {scorer}, {state})"
