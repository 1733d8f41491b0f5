"""`Detector` combines a model, its reference, a scorer and a threshold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from neuralmean.data.batch import BATCH_SIZE, Batch, count_batches, to_batch, to_batches
from neuralmean.data.progress import track
from neuralmean.detector import early_exit as exits
from neuralmean.detector import fitting, html
from neuralmean.detector.decision import Decision, Explanation
from neuralmean.detector.groups import LENGTH, PREDICTED, Groups, decide_by_group
from neuralmean.detector.learnt import FitOptions, FitSetup, Learnt, check_count, learn
from neuralmean.detector.locate import locate
from neuralmean.detector.observed import Observed
from neuralmean.detector.recalibration import recalibrate
from neuralmean.detector.regions import Boxes, RegionDecisions, learn_regions, region_map, score_regions
from neuralmean.detector.saving import from_artefact, to_artefact
from neuralmean.errors import InputError, NotFittedError
from neuralmean.files.artefact import Artefact
from neuralmean.models.execution import check_device
from neuralmean.models.fingerprint import WeightsGuard
from neuralmean.models.layers import Layer, has_running_mean, select_layers, unwrap
from neuralmean.recording.graph.frozen import FrozenObserver, freeze
from neuralmean.recording.observer import ChannelStats, Observer
from neuralmean.recording.reference import Reference
from neuralmean.scorers import Observation, Scorer
from neuralmean.scorers.contract import contributions_of, needs_of, score_rows, view_of
from neuralmean.stats.calibration import Calibration, check_confidence, check_rate
from neuralmean.stats.discrepancy import (
    Statistic,
    Vectors,
    check_statistic,
    pool_batch,
    sum_by_layer,
    vector_layers,
    vector_names,
)
from neuralmean.stats.held_out_profile import HeldOutProfile
from neuralmean.stats.moments import Moments


class Detector:
    """Detects inputs of a trained model that are unlike its training data.

    Args:
        model: A trained model; it is never changed.
        layers: Dotted names or globs of the layers to watch (`"layer3.*.bn2"`); None chooses.
        statistic: `"mean"` (the paper's NMD), `"variance"` (NVD) or `"both"`, standardised and concatenated.
        scorer: A name (see `neuralmean.scorers.SCORERS`) or an object with `fit` and `score`, which is copied; None chooses
            the best one for the data given to `fit`.
        reference: Channel statistics of the training data; None reads the batch-norm buffers if every watched layer has
            them, and otherwise computes them from the `id_data` given to `fit`.
        head: Name of the layer whose output is the logits and whose input is the penultimate feature, for scorers that
            need them; None finds it; False means that the model has no classes.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).train()
        >>> images = torch.rand(64, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> _ = [model(images) for _ in range(50)]  # instead of training
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
        self._params: dict[str, Any] = {
            "layers": layers,
            "statistic": statistic,
            "scorer": scorer,
            "reference": reference,
            "head": head,
        }
        self.model = model
        self.statistic: Statistic = check_statistic(statistic)
        if layers is None and reference is not None:
            layers = [layer.name for layer in reference.layers]
        self.watched: tuple[Layer, ...] = select_layers(model, layers)
        if reference is not None and reference.layers != self.watched:
            raise InputError("Expected a reference of the watched layers. Make it with the same `layers`.")
        if isinstance(head, str) and head not in dict(unwrap(model).named_modules()):
            raise InputError(f"Expected `head` to be a layer of {type(unwrap(model)).__name__}, but got {head!r}.")
        fitting.check_scorer(scorer)  # so that a wrong name is an error now rather than in `fit`
        self.info: dict[str, Any] = {}
        self._reset()

    def _reset(self) -> None:
        """Start from the current model with nothing learnt."""
        self._weights_guard = WeightsGuard(self.model)
        reference = self._params["reference"] or self._free_reference()
        # Until `fit`, the only scorer that needs no data: the paper's average.
        scorer = fitting.choose_scorer(self._params["scorer"] or "average", None)
        self.adopt(Learnt(reference, scorer))

    def _free_reference(self) -> Reference | None:
        core = unwrap(self.model)
        if all(has_running_mean(core.get_submodule(layer.name)) for layer in self.watched):
            return Reference.from_batchnorm(self.model, list(self.layers))
        return None

    def adopt(self, learnt: Learnt, observer: Observer | None = None) -> None:
        """Replace what was learnt, after `fit` or from a saved file.

        Args:
            learnt: What was learnt on this model and these layers.
            observer: Runs the model; None makes a new one.
        """
        self.learnt = learnt
        self._observer = observer or self.setup.observer(learnt.head)
        self._vectors = Vectors(self.statistic, learnt.reference, learnt.scale)

    @property
    def calibration_source(self) -> fitting.Source | None:
        """Where the calibration scores come from; None before `fit`."""
        return self.learnt.source

    @property
    def setup(self) -> FitSetup:
        """The constructor's arguments, as `learn` takes them."""
        return FitSetup(
            self.model,
            self.watched,
            self.statistic,
            self._params["scorer"],
            self.learnt.reference,
            self._params["head"],
        )

    # What was learnt.

    @property
    def reference(self) -> Reference | None:
        """Channel statistics of the training data; None if they are unknown until `fit`."""
        return self.learnt.reference

    @property
    def scorer(self) -> Scorer:
        """The scorer, which turns vectors into scores."""
        return self.learnt.scorer

    @property
    def calibration(self) -> Calibration | None:
        """The held-out scores and the threshold; None before `fit`."""
        return self.learnt.calibration

    @property
    def scale(self) -> Moments | None:
        """Moments of the vectors, with which those of `statistic="both"` are standardised."""
        return self.learnt.scale

    @property
    def profile(self) -> HeldOutProfile | None:
        """Statistics of held-out data, for `Monitor`; None without held-out data."""
        return self.learnt.profile

    @property
    def head(self) -> str | None:
        """Name of the layer that gives the logits; None if the scorer does not need them."""
        return self.learnt.head

    @property
    def fitted(self) -> dict[str, Any]:
        """When the detector was fitted, and on how many examples."""
        return self.learnt.facts

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the watched layers."""
        return tuple(layer.name for layer in self.watched)

    @property
    def channels(self) -> list[str]:
        """Names of the columns of the discrepancy vector: `"bn1[3]"` is channel 3 of layer bn1."""
        return vector_names(self.watched, self.statistic)

    @property
    def column_layers(self) -> Tensor:
        """Index in `layers` of each column of the discrepancy vector, shape (D,)."""
        return vector_layers(self.watched, self.statistic)

    @property
    def fingerprint(self) -> str:
        """Digest of the weights that the detector was made for."""
        return self._weights_guard.digest

    @property
    def settings_digest(self) -> str:
        """Digest of the settings of the model's layers (strides, epsilons) that the detector was made for."""
        return self._weights_guard.settings

    @property
    def threshold(self) -> float:
        """The score above which an input is flagged."""
        return self.calibrated().threshold

    @property
    def false_alarm_rate(self) -> float:
        """The share of in-distribution inputs that may be flagged."""
        return self.calibrated().false_alarm_rate

    @property
    def guarantee(self) -> str:
        """A sentence on when the false-alarm rate holds."""
        confidence = self.calibrated().confidence
        own = fitting.GUARANTEES[self.learnt.source or "held_out"]
        if confidence is None or self.learnt.source != "held_out":
            return own
        return f"{own} It holds for this threshold with a confidence of {100 * confidence:g} %."

    def calibrated(self) -> Calibration:
        """Return the calibration, or raise if there is none yet."""
        if self.learnt.calibration is None:
            raise NotFittedError("The detector has no threshold yet. Call `fit` or `calibrate` first.")
        return self.learnt.calibration

    def check_weights(self) -> None:
        """Raise `ModelMismatchError` if the model's weights have changed since the detector was made."""
        self._weights_guard.check()

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's arguments, as scikit-learn's `clone` reads them."""
        return {"model": self.model, **self._params}

    def set_params(self, **params: Any) -> Self:
        """Change constructor arguments; what was learnt is forgotten."""
        known = self.get_params()
        unknown = sorted(set(params) - set(known))
        if unknown:
            raise InputError(f"Expected parameters out of {sorted(known)}, but got {unknown}.")
        if params:
            known.update(params)
            self.__init__(known.pop("model"), **known)  # type: ignore[misc]
        return self

    # Learning.

    def fit(
        self,
        id_data: Any,
        ood_data: Any = None,
        *,
        false_alarm_rate: float = 0.05,
        held_out: Any = None,
        confidence: float | None = None,
        groups: Groups | None = None,
        early_exit: bool = False,
        regions: bool = False,
        batch_size: int = BATCH_SIZE,
    ) -> Self:
        """Learn from in-distribution examples and, optionally, from out-of-distribution ones.

        Data may be a tensor, an array, a DataFrame, a DataLoader, a Dataset or an iterable of batches; a batch may be `x`,
        `(x, y)` or a dict of keyword inputs. A fit that fails leaves the detector as it was.

        Args:
            id_data: In-distribution examples; the model's own training data is fine.
            ood_data: Out-of-distribution examples. Without them a scorer that needs some (`"logistic"`, `"mlp"`) is given
                crafted ones, as in the paper's zero-shot protocol: `id_data` with its blocks permuted.
            false_alarm_rate: Share of in-distribution inputs that may be flagged.
            held_out: In-distribution examples that the model was *not* trained on: the threshold and the p-values come
                from them. Without them a part of `id_data` is used, with a warning on how reliable that is.
            confidence: Probability, over the draw of the held-out examples, with which the rate holds for the threshold that
                they set; None for a rate that holds on average over such draws.
            groups: A label for each held-out example (camera, class), `"predicted"` for the model's own prediction, or `"length"`
                for ranges of lengths: the rate then holds for each group. Held-out examples are run twice. Where inputs
                are tokens, None takes `"length"`.
            early_exit: Whether `detector(x)` may stop the forward pass once every input is certainly OOD; its output is
                None then. The false-alarm rate holds for all exits together.
            regions: Whether to learn regions of images too, for `score_regions`: one more pass over all data, see `fit_regions`.
            batch_size: Rows per forward pass if the data is one tensor, array, frame or dataset.
        """
        check_rate(false_alarm_rate)
        check_confidence(confidence)
        if early_exit:
            exits.check_statistic(self.statistic)
        if groups is not None and (held_out is None or early_exit):
            raise InputError(
                "Expected `held_out` examples and no `early_exit` with `groups`. Pass held-out examples, or leave `groups` out."
            )
        if regions and held_out is None:
            raise InputError("Expected `held_out` images with `regions`: the p-values of boxes come from them.")
        before = dict(self.__dict__)
        try:
            # Tensors made in inference mode have no gradients, which `explain` may need.
            with torch.inference_mode(False):
                self._reset()
                options = FitOptions(false_alarm_rate, early_exit, batch_size, confidence)
                self.adopt(*learn(self.setup, id_data, ood_data, held_out, options))
                if groups is not None:
                    limits: dict[str, Any] = {"false_alarm_rate": false_alarm_rate, "confidence": confidence}
                    self.calibrate(held_out, **limits, groups=groups, batch_size=batch_size)
                if regions:
                    self.fit_regions(id_data, held_out)
        except BaseException:
            self.__dict__ = before
            raise
        fitting.warn_if_weak(self.learnt.source or "held_out", self.calibration)
        fitting.warn_if_left_out(self.scorer)
        return self

    def calibrate(
        self,
        held_out: Any,
        *,
        false_alarm_rate: float = 0.05,
        confidence: float | None = None,
        groups: Groups | None = None,
        batch_size: int = BATCH_SIZE,
    ) -> Self:
        """Set the threshold and the p-values from in-distribution examples that the model was not trained on.

        Args:
            held_out: The examples.
            false_alarm_rate: Share of in-distribution inputs that may be flagged.
            confidence: As for `fit`.
            groups: As for `fit`.
            batch_size: Rows per forward pass if the data is one tensor, array, frame or dataset.
        """
        check_rate(false_alarm_rate)
        check_confidence(confidence)
        check_count(held_out, True, FitOptions(false_alarm_rate, False, batch_size, confidence))
        passes = self._track(held_out, "held_out", batch_size)
        self.learnt = recalibrate(self.setup, self.learnt, passes, groups, false_alarm_rate, confidence)
        return self

    def fit_regions(
        self,
        id_data: Any,
        held_out: Any,
        *,
        boxes: Callable[[Any], Sequence[Tensor]] | None = None,
        false_alarm_rate: float | None = None,
        batch_size: int = 16,
    ) -> Self:
        """Learn what regions of in-distribution images look like, for `score_regions`; nothing else changes.

        Args:
            id_data: In-distribution images, as for `fit`; at most 8,192 boxes are taken from them.
            held_out: In-distribution images that the model was not trained on: the p-values come from them, with one box of each
                range of sizes per image.
            boxes: Returns the boxes of each image, (M_i, 4), given the model's output, to learn from what a detection model
                finds; None draws boxes of all sizes at random.
            false_alarm_rate: Share of in-distribution boxes that may be flagged; None takes that of the detector.
            batch_size: Images per forward pass where data comes in one piece.
        """
        rate = self.false_alarm_rate if false_alarm_rate is None else false_alarm_rate
        check_rate(rate)
        self.check_weights()
        with torch.inference_mode(False):
            found = learn_regions(self, id_data, held_out, rate, boxes=boxes, batch_size=batch_size)
        self.learnt = replace(self.learnt, regions=found)
        return self

    def set_rate(self, false_alarm_rate: float, *, confidence: float | None = None) -> Self:
        """Move the threshold to another false-alarm rate, using the held-out scores of the last fit or calibration.

        Raises:
            CalibrationError: There are fewer held-out scores than the rate needs.
            InputError: The detector has early exits, whose thresholds were set together.
        """
        if isinstance(self.learnt.scorer, exits.CascadeScorer):
            raise InputError("Expected a detector without early exit, whose thresholds were set together. Fit again.")
        known = self.calibrated()
        groups = None if known.group_of is None else [known.group_names[number] for number in known.group_of.tolist()]
        calibration = Calibration.of(known.scores, false_alarm_rate, confidence=confidence, groups=groups)
        self.learnt = replace(self.learnt, calibration=calibration)
        return self

    # Deciding.

    def __call__(
        self, x: Any = None, /, *, groups: Sequence[object] | None = None, **inputs: Any
    ) -> tuple[Any, Decision]:
        """Return the model's own output and the decision, after one forward pass.

        Call it as the model is called, with an input or with keyword inputs; `groups` has a label for each input if the detector
        was calibrated by group. With `early_exit` the output is None if the pass was stopped because every input is OOD.
        """
        self.calibrated()
        seen = self._observe_batch(_to_batch(x, inputs), may_exit=True, groups=groups)
        if groups is None and self.learnt.grouped_by == "given":
            self.calibrated().parts(None, len(seen))  # raises
        return seen.output, seen.decision  # type: ignore[return-value]  # calibrated

    def observe(self, x: Any = None, /, **inputs: Any) -> Observed:
        """Return everything that one forward pass gives: output, decision, logits, feature and vectors."""
        return self._observe_batch(_to_batch(x, inputs), may_exit=True)

    def observe_each(self, data: Any, *, name: str = "x", batch_size: int = BATCH_SIZE) -> Iterator[Observed]:
        """Yield what a full forward pass over each batch of `data` gives, without gradients.

        Args:
            data: As for `fit`.
            name: The argument's name in error messages.
            batch_size: Rows per forward pass if the data is one tensor, array, frame or dataset.
        """
        self.check_weights()
        for batch in to_batches(data, name=name, batch_size=batch_size):
            with torch.no_grad():
                seen = self._observe_batch(batch, name=name)
            yield seen

    def predict(self, x: Any, *, groups: Sequence[object] | None = None, batch_size: int = BATCH_SIZE) -> Decision:
        """Decide on each input of `x`.

        Args:
            x: The inputs, as for `fit`.
            groups: A label for each input, if the detector was calibrated by group with labels.
            batch_size: Rows per forward pass if the data is one tensor, array, frame or dataset.
        """
        calibration, scores, kinds, labels = self.calibrated(), [], [], list[str]()
        for seen in self._track(x, "x", batch_size):
            scores.append(seen.score)
            if (found := seen.kind_p_values()) is not None:
                kinds.append(found)
            if groups is None and self.learnt.grouped_by in (PREDICTED, LENGTH) and seen.decision is not None:
                labels.extend(seen.decision.groups or ())
        decision = Decision(torch.cat(scores), calibration, torch.cat(kinds) if kinds else None)
        known = labels if groups is None and self.learnt.grouped_by in (PREDICTED, LENGTH) else groups
        return decision if known is None else decide_by_group(decision, None, known, self.learnt.grouped_by)

    def score(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Tensor:
        """Score each input, shape (N,); higher = more OOD."""
        return torch.cat([seen.score for seen in self._track(x, "x", batch_size)])

    def score_batch(self, x: Any, *, batch_size: int = BATCH_SIZE) -> float:
        """Score all inputs of `x` as one batch (the paper's Eq. 3 for more than one image); higher = more OOD."""
        return self.score_pooled(self._stats(x, batch_size))

    def score_pooled(self, stats: ChannelStats) -> float:
        """Score recorded inputs as one batch, as `score_batch` does; higher = more OOD."""
        own = getattr(self.scorer, "score_batch", None)
        if own is not None:
            return float(own(view_of(self.scorer, self._observation(stats))))
        if needs := needs_of(self.scorer):
            name = type(self.scorer).__name__
            raise InputError(
                f"Expected a scorer with `score_batch`, as {name} needs the model's {' and '.join(sorted(needs))}."
            )
        pooled = ChannelStats(*pool_batch(stats.means, stats.variances))
        return score_rows(self.scorer, self._observation(pooled)).item()

    def discrepancy(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Tensor:
        """Return the discrepancy vector of each input, shape (N, D); `channels` names the columns."""
        return self._observation(self._stats(x, batch_size)).vector

    def explain(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Explanation:
        """Return how much each layer and channel contributes to the scores of `x`."""
        observation = self._observation(self._stats(x, batch_size))
        return self._explain(observation, score_rows(self.scorer, observation))

    def locate(self, x: Any, *, by_layer: bool = False, batch_size: int = 16) -> Tensor:
        """Return how much each place of each input contributes to its score: (N, H, W) for images, (N, T) for tokens.

        Each watched layer's contribution (see `explain`) is split over the positions of the layer, enlarged to the size of
        the input and added up. Contributions of no layer (a scorer's `terms`) are not in the maps; those of no place,
        such as a class token, are spread evenly.

        Args:
            x: Inputs as for `score`.
            by_layer: Return the map of each layer, (N, L, H, W); each adds up to that layer's contribution.
            batch_size: Inputs per forward pass; the activations of all watched layers are kept during a pass.
        """
        return locate(self, x, by_layer=by_layer, batch_size=batch_size)

    def score_regions(self, x: Any, boxes: Boxes) -> RegionDecisions:
        """Decide on boxes in images, in one forward pass: is what is inside like boxes of its size in the training data?

        Args:
            x: A batch of images, as the model takes them: (N, C, H, W), or a list of (C, H, W) for detection models.
            boxes: The boxes of each image: a list with an (M_i, 4) for each, or one tensor (N, M, 4), of x0, y0, x1, y1 in
                pixels of the image as it is in `x`. Or a function that returns them given the model's output.

        Returns:
            A sequence with a `Decision` for each image, on its boxes; it has the model's output too.
        """
        return score_regions(self, x, boxes)

    def region_map(self, x: Any, *, layer: str | None = None, window: float | None = None) -> Tensor:
        """Return the p-value of the surroundings of each cell of a layer, float64 (N, h, w).

        Args:
            x: A batch of images of one size, (N, C, H, W).
            layer: The watched layer whose cells these are; None takes the deepest one with at least 8 x 8.
            window: Side of the square around each cell that is looked at, in pixels; None takes twice a cell, or the smallest
                box that was learnt.
        """
        return region_map(self, x, layer=layer, window=window)

    # Where and how the model runs.

    def freeze(self, x: Any = None, *, like: Detector | None = None) -> Self:
        """Run the model as one compiled graph from now on: faster, most of all for single inputs.

        Holds for inputs of the shape of `x` in float32 on the CPU, one at a time or many; all others go through the model. The
        graph is used only if it gives the model's own numbers, but for their last digits, and takes less time. It is compiled
        once, which takes a C++ compiler and up to a minute, and kept in the user's cache folder. It holds until the next `fit`;
        a copy of the detector runs the model, and so does a forked process. Its output carries no gradients to the weights.

        Args:
            x: Inputs of the usual shape, (N, ...).
            like: A frozen detector of the same model, or of one that shares its tensors, whose graphs are used; in place of `x`.

        Raises:
            InputError: The detector has early exits, the model is no fixed graph of its input, there is no compiler, or the
                graph is not faster. The detector is as it was.
        """
        self.check_weights()
        if isinstance(self.learnt.scorer, exits.CascadeScorer):
            raise InputError(
                "Expected a detector without early exit to freeze: an exit is a choice that a graph cannot make."
            )
        if like is None:
            graphs = freeze(self._observer, to_batch(x), self.fingerprint)
        elif isinstance(like._observer, FrozenObserver) and like.fingerprint == self.fingerprint:
            graphs = like._observer.graphs
        else:
            raise InputError(
                "Expected `like` to be a frozen detector of a model with the same weights. Call its `freeze`."
            )
        self._observer = FrozenObserver(self._observer, graphs)
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether inputs of the usual shape run through a compiled graph."""
        return isinstance(self._observer, FrozenObserver)

    def to(self, device: str | torch.device) -> Self:
        """Move the model, and with it every later pass, to a device; scores and decisions are on the CPU.

        Raises:
            InputError: There is no such device on this machine.
        """
        self.model.to(check_device(device))
        return self

    # Files.

    def save(self, path: str | Path, *, info: Mapping[str, Any] | None = None) -> None:
        """Write the fitted detector to one file, whole or not at all; the model is not in it.

        Args:
            path: The file to write.
            info: JSON values to store with it (model spec, preprocessing), added to `detector.info`.
        """
        self.check_weights()
        known = {**self.info, **(info or {})}
        to_artefact(self, known).write(path)
        self.info = known

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Detector:
        """Read a detector that `save` wrote, for the same model with the same weights."""
        with torch.inference_mode(False):  # as in `fit`
            return from_artefact(cls, Artefact.read(path), model, str(path))

    def _observe_batch(
        self, batch: Batch, *, name: str = "x", may_exit: bool = False, groups: Sequence[object] | None = None
    ) -> Observed:
        self._weights_guard.check()
        scorer, calibration = self.learnt.scorer, self.learnt.calibration
        run = exits.start_exit_run(self) if may_exit and isinstance(scorer, exits.CascadeScorer) else None
        output, stats = self._observer.observe(batch, name=name, exits=run)
        if run is not None and run.stopped and run.scores is not None:
            decision = None if calibration is None else Decision(run.scores, calibration)
            return Observed(None, decision, run.scores, None, None, self._explain)
        observation = self._observation(stats)
        lengths = None if stats.lengths is None else stats.lengths.tolist()
        scores = score_rows(run or scorer, observation)
        # P-values of kinds are computed on first access.
        kinds = None if self.learnt.kinds is None else partial(self.learnt.kinds.p_values, observation)
        decision = None if calibration is None else Decision(scores, calibration, kinds)
        if decision is not None and (groups is not None or self.learnt.grouped_by is not None):
            decision = decide_by_group(decision, output, groups, self.learnt.grouped_by, lengths)
        return Observed(output, decision, scores, stats, observation.vector, self._explain, lengths)

    def _observation(self, stats: ChannelStats) -> Observation:
        return Observation(self._vectors(stats.means, stats.variances), stats.logits, stats.feature)

    def _explain(self, observation: Observation, scores: Tensor) -> Explanation:
        """Return how much each layer and channel contributes to the scores, (N,), of an observation."""
        by_channel, terms, exact = contributions_of(self.scorer, observation)
        by_layer = sum_by_layer(by_channel, self.column_layers, len(self.watched))
        return Explanation(scores, self.layers, tuple(self.channels), by_layer, by_channel, terms, exact)

    def _track(self, x: Any, name: str, batch_size: int) -> Iterable[Observed]:
        """Return `observe_each` with a progress bar."""
        seen = self.observe_each(x, name=name, batch_size=batch_size)
        return track(seen, description="Scoring", total=count_batches(x, batch_size=batch_size), unit="batches")

    def _stats(self, x: Any, batch_size: int) -> ChannelStats:
        self.check_weights()
        return self._observer.observe_all(x, name="x", batch_size=batch_size)

    def _repr_html_(self) -> str:
        return html.detector_table(self)

    def __repr__(self) -> str:
        name, scorer = type(unwrap(self.model)).__name__, getattr(self.scorer, "name", type(self.scorer).__name__)
        state = "not calibrated" if self.calibration is None else f"threshold {self.threshold:.4g}"
        return f"Detector({name}: {len(self.watched)} layers, {len(self.channels)} channels, {scorer}, {state})"


def _to_batch(x: Any, inputs: Mapping[str, Any]) -> Batch:
    """Return the inputs of a call as a batch."""
    if x is None:
        return to_batch(inputs)
    batch = to_batch(x)
    return Batch(batch.args, {**batch.kwargs, **inputs}) if inputs else batch
