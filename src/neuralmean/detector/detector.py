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

from neuralmean.data.batch import BATCH_SIZE, Batch, call_batch, count_batches, to_batch, to_batches
from neuralmean.data.progress import track
from neuralmean.detector import fitting
from neuralmean.detector.decision import Decision, Explanation
from neuralmean.detector.early_exit import CascadeScorer, start_exit_run
from neuralmean.detector.groups import Groups, decide_all, decide_by_group
from neuralmean.detector.learnt import FitOptions, check_count, learn
from neuralmean.detector.locate import locate
from neuralmean.detector.observed import Observed
from neuralmean.detector.recalibration import change_rate, recalibrate
from neuralmean.detector.regions import Boxes, RegionDecisions, learn_regions, region_map, score_regions
from neuralmean.detector.saving import from_artefact, to_artefact
from neuralmean.detector.state import DetectorState
from neuralmean.errors import InputError
from neuralmean.files.artefact import Artefact
from neuralmean.models.execution import check_device
from neuralmean.recording.graph.frozen import FrozenObserver, freeze
from neuralmean.recording.observer import ChannelStats
from neuralmean.scorers import Observation
from neuralmean.scorers.contract import contributions_of, score_rows, score_together
from neuralmean.stats.calibration import check_rate
from neuralmean.stats.discrepancy import pool_batch, sum_by_layer


class Detector(DetectorState):
    """Detects inputs of a trained model that are unlike its training data.

    Args:
        model: A trained model; it is never changed.
        layers: Dotted names or globs of the layers to watch (`"layer3.*.bn2"`), or to leave out (`"!aux.*"`); None chooses.
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
            confidence: Probability, over the draw of the held-out examples, that the threshold keeps the rate; None for a
                rate that holds on average over such draws.
            groups: A label for each held-out example (camera, class), `"predicted"` for the model's own prediction, or `"length"`
                for ranges of lengths: the rate then holds for each group. Held-out examples are run twice. None means
                `"length"` if the inputs are tokens.
            early_exit: Whether `detector(x)` may stop the forward pass once every input is certainly OOD; its output is
                None then. The false-alarm rate holds for all exits together.
            regions: Whether to call `fit_regions` too, which takes one more pass over the data.
            batch_size: Rows per forward pass if the data is one tensor, array, frame or dataset.
        """
        options = FitOptions(false_alarm_rate, early_exit, batch_size, confidence)
        options.check(self.statistic)
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
        options = FitOptions(false_alarm_rate, False, batch_size, confidence)
        options.check(self.statistic)
        check_count(held_out, True, options)
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
            held_out: In-distribution images that the model was not trained on. The p-values come from one box per image and
                range of sizes.
            boxes: A function from the model's output to the boxes of each image, (M_i, 4), such as those that a detection
                model predicts; None draws boxes of all sizes at random.
            false_alarm_rate: Share of in-distribution boxes that may be flagged; None takes that of the detector.
            batch_size: Images per forward pass if the data is one tensor, array or dataset.
        """
        rate = self.false_alarm_rate if false_alarm_rate is None else false_alarm_rate
        check_rate(rate)
        self.check_weights()
        with torch.inference_mode(False):
            found = learn_regions(self, id_data, held_out, rate, boxes=boxes, batch_size=batch_size)
        self.learnt = replace(self.learnt, regions=found)
        return self

    def set_rate(self, false_alarm_rate: float, *, confidence: float | None = None) -> Self:
        """Change the false-alarm rate, using the held-out scores of the last fit or calibration.

        Raises:
            CalibrationError: There are fewer held-out scores than the rate needs.
            InputError: The detector has early exits, whose thresholds were set together.
        """
        self.learnt = change_rate(self.learnt, self.calibrated(), false_alarm_rate, confidence)
        return self

    # Deciding.

    def __call__(
        self, x: Any = None, /, *, groups: Sequence[object] | None = None, **inputs: Any
    ) -> tuple[Any, Decision]:
        """Return the model's own output and the decision, after one forward pass.

        Takes what the model takes: an input or keyword inputs. If the detector was calibrated by group, `groups` has a label
        for each input. With `early_exit`, the output is None if the pass was stopped because every input is OOD.
        """
        if self.learnt.calibration is None:
            self.calibrated()  # raises before the pass
        seen = self._observe_batch(call_batch(x, inputs), may_exit=True, groups=groups)
        if groups is None and self.learnt.grouped_by == "given":
            self.calibrated().parts(None, len(seen))  # raises
        return seen.output, seen.decision  # type: ignore[return-value]  # calibrated

    def observe(self, x: Any = None, /, **inputs: Any) -> Observed:
        """Return everything that one forward pass gives: output, decision, logits, feature and vectors."""
        return self._observe_batch(call_batch(x, inputs), may_exit=True)

    def observe_each(self, data: Any, *, name: str = "x", batch_size: int = BATCH_SIZE) -> Iterator[Observed]:
        """Yield the result of a full forward pass over each batch of `data`, without gradients.

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
        calibration = self.calibrated()
        return decide_all(self._track(x, "x", batch_size), calibration, groups, self.learnt.grouped_by)

    def score(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Tensor:
        """Score each input, shape (N,); higher = more OOD."""
        return torch.cat([seen.score for seen in self._track(x, "x", batch_size)])

    def score_batch(self, x: Any, *, batch_size: int = BATCH_SIZE) -> float:
        """Score all inputs of `x` as one batch (the paper's Eq. 3 for more than one image); higher = more OOD."""
        return self.score_pooled(self._stats(x, batch_size))

    def score_pooled(self, stats: ChannelStats) -> float:
        """Score recorded inputs as one batch, as `score_batch` does; higher = more OOD."""
        pooled = ChannelStats(*pool_batch(stats.means, stats.variances))
        return score_together(self.scorer, self._observation(stats), self._observation(pooled))

    def discrepancy(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Tensor:
        """Return the discrepancy vector of each input, shape (N, D); `channels` names the columns."""
        return self._observation(self._stats(x, batch_size)).vector

    def explain(self, x: Any, *, batch_size: int = BATCH_SIZE) -> Explanation:
        """Return how much each layer and channel contributes to the scores of `x`."""
        observation = self._observation(self._stats(x, batch_size))
        return self._explain(observation, score_rows(self.scorer, observation))

    def locate(self, x: Any, *, by_layer: bool = False, batch_size: int = 16) -> Tensor:
        """Return how much each position of each input contributes to its score: (N, H, W) for images, (N, T) for tokens.

        The contribution of each watched layer (see `explain`) is split over the layer's positions, enlarged to the size of
        the input and summed. A scorer's `terms`, which belong to no layer, are left out; contributions without a position,
        such as those of a class token, are spread evenly.

        Args:
            x: Inputs as for `score`.
            by_layer: Whether to return a map for each layer, (N, L, H, W), which sums to that layer's contribution.
            batch_size: Inputs per forward pass; the activations of all watched layers are kept during a pass.
        """
        return locate(self, x, by_layer=by_layer, batch_size=batch_size)

    def score_regions(self, x: Any, boxes: Boxes) -> RegionDecisions:
        """Decide on boxes in images, comparing each with boxes of its size in the training data, in one forward pass.

        Args:
            x: A batch of images, as the model takes them: (N, C, H, W), or a list of (C, H, W) for detection models.
            boxes: The boxes (x0, y0, x1, y1) of each image in pixels of `x`: a list of (M_i, 4) tensors, one (N, M, 4)
                tensor, or a function from the model's output to either.

        Returns:
            A sequence with the `Decision` on the boxes of each image, and the model's output.
        """
        return score_regions(self, x, boxes)

    def region_map(self, x: Any, *, layer: str | None = None, window: float | None = None) -> Tensor:
        """Return the p-value of the surroundings of each cell of a layer, float64 (N, h, w).

        Args:
            x: A batch of images of one size, (N, C, H, W).
            layer: The watched layer that the cells belong to; None takes the deepest one with at least 8 x 8 cells.
            window: Side in pixels of the square around each cell; None takes the larger of two cells and the smallest box
                learnt.
        """
        return region_map(self, x, layer=layer, window=window)

    # Where and how the model runs.

    def freeze(self, x: Any = None, *, like: Detector | None = None) -> Self:
        """Run the model as one compiled graph from now on, which is faster, above all for single inputs.

        The graph serves float32 inputs of the shape of `x` on the CPU, in batches of any size; all other inputs run through
        the model. It is used only if it reproduces the model's numbers up to rounding and takes less time. Compiling needs a
        C++ compiler and up to a minute; the result is cached in the user's cache folder. The graph is dropped by the next
        `fit`, by copies of the detector and by forked processes. Its output carries no gradients to the weights.

        Args:
            x: Inputs of the usual shape, (N, ...).
            like: A frozen detector of the same model, or of one that shares its tensors, whose graphs to use instead of
                compiling for `x`.

        Raises:
            InputError: The detector has early exits, the model is not a fixed graph of its input, there is no compiler, or
                the graph is not faster. The detector is unchanged.
        """
        self.check_weights()
        if isinstance(self.learnt.scorer, CascadeScorer):
            raise InputError("Expected a detector without early exit to freeze: a graph cannot decide to stop.")
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
        """Move the model to a device; scores and decisions stay on the CPU.

        Raises:
            InputError: There is no such device on this machine.
        """
        self.model.to(check_device(device))
        return self

    # Files.

    def save(self, path: str | Path, *, info: Mapping[str, Any] | None = None) -> None:
        """Write the fitted detector, without the model, to one file; an interrupted write leaves no partial file.

        Args:
            path: The file to write.
            info: JSON values to store (model spec, preprocessing), added to `detector.info`.
        """
        self.check_weights()
        known = {**self.info, **(info or {})}
        to_artefact(self, known).write(path)
        self.info = known

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> Detector:
        """Load a detector saved by `save`, given the same model with the same weights."""
        with torch.inference_mode(False):  # as in `fit`
            return from_artefact(cls, Artefact.read(path), model, str(path))

    # Internals.

    def _observe_batch(
        self, batch: Batch, *, name: str = "x", may_exit: bool = False, groups: Sequence[object] | None = None
    ) -> Observed:
        self._weights_guard.check()
        scorer, calibration = self.learnt.scorer, self.learnt.calibration
        run = start_exit_run(self) if may_exit and isinstance(scorer, CascadeScorer) else None
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
