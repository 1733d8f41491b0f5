"""A fitted detector as one module of tensors: model, discrepancy, scorer and threshold.

For exporters. The module shares the model's tensors, keeps everything that was learnt in buffers, and returns the
detector's results.
"""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from neuralmean.data.batch import Batch
from neuralmean.detector.early_exit import full_of
from neuralmean.detector.kinds import kind_codes
from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.layers import unwrap
from neuralmean.recording import RecordingModule
from neuralmean.scorers import Observation
from neuralmean.scorers.contract import needs_of
from neuralmean.stats.discrepancy import Vectors

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector


KIND_NAMES = ("p_appearance", "p_content", "kind")


class DetectorGraph(nn.Module):
    """Runs the model on its inputs and returns `(output, score, p_value, is_ood)`, then `KIND_NAMES` if kinds were learnt.

    Args:
        detector: A fitted detector.
        names: Names of the inputs; those after the first `n_args` are keywords of the model.
        n_args: Number of positional inputs of the model.
    """

    calibration_scores: Tensor
    alarm_rate: Tensor
    kind_scores: Tensor

    def __init__(self, detector: Detector, names: tuple[str, ...], n_args: int) -> None:
        super().__init__()
        if detector.reference is None or detector.calibration is None:
            raise NotFittedError("Expected a fitted detector to export. Call `fit` or `calibrate` first.")
        if detector.calibration.group_of is not None:
            raise InputError(
                "Expected a detector without groups to export, as a graph has one threshold for all inputs. `calibrate` without "
                "groups."
            )
        self.names, self.n_args = names, n_args
        self.vectors = Vectors(detector.statistic, detector.reference, detector.scale)
        self.needs = needs_of(detector.scorer)
        self.scorer = copy.deepcopy(detector.scorer)
        self.recording = RecordingModule(
            unwrap(detector.model),
            detector.watched,
            variance=detector.statistic != "mean",
            head=detector.head,
        )
        # An infinite score, for the one that a p-value counts in addition to the held-out scores.
        scores = detector.calibration.scores
        self.register_buffer("calibration_scores", torch.cat([scores, scores.new_full((1,), torch.inf)]))
        self.register_buffer("alarm_rate", torch.tensor(detector.calibration.level, dtype=torch.float64))
        self.kinds, self.kind_rate = detector.learnt.kinds, detector.false_alarm_rate
        if self.kinds is not None:
            both = torch.stack([part.scores for part in (self.kinds.appearance, self.kinds.content)])
            self.register_buffer("kind_scores", torch.cat([both, both.new_full((2, 1), torch.inf)], dim=1))

    def forward(self, *inputs: Tensor) -> tuple[Any, ...]:
        """Return the model's own output and, for each input, score, p-value, whether it is OOD, and its kind."""
        args, kwargs = inputs[: self.n_args], dict(zip(self.names[self.n_args :], inputs[self.n_args :], strict=True))
        output, mean, variance, feature, logits = self.recording(args, kwargs, Batch(args, kwargs).mask)
        vector = self.vectors(mean, variance)
        observation = Observation(vector, logits, feature)
        score = self.scorer.score(observation if self.needs else vector)
        # Compare with every score, as ONNX has no `searchsorted`.
        at_least = self.calibration_scores >= score.to(self.calibration_scores.dtype).unsqueeze(1)
        p_value = at_least.double().sum(dim=1) / len(self.calibration_scores)
        is_ood = p_value <= self.alarm_rate  # a NaN score has the p-value 0
        if self.kinds is None:
            return output, score, p_value, is_ood
        return output, score, p_value, is_ood, *self._kind(observation, is_ood)

    def _kind(self, observation: Observation, is_ood: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the p-values of appearance and content, and the kind of each input as an index of `KINDS`."""
        scores = self.kinds.kind_scorer.score(observation, full_of(self.scorer))  # type: ignore[union-attr]
        at_least = self.kind_scores >= scores.to(self.kind_scores.dtype).unsqueeze(2)
        p_values = at_least.double().sum(dim=2) / self.kind_scores.shape[1]
        return p_values[:, 0], p_values[:, 1], kind_codes(is_ood, p_values, self.kind_rate) + 1


def input_names(model: nn.Module, batch: Batch) -> tuple[str, ...]:
    """Return the names of a batch's inputs, as in the model's `forward`.

    Raises:
        InputError: An input is not a tensor.
    """
    for value in (*batch.args, *batch.kwargs.values()):
        if not isinstance(value, Tensor):
            raise InputError(f"Expected inputs that are tensors to export, but got {type(value).__name__}.")
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(unwrap(model).forward).parameters.values()
    known = [parameter.name for parameter in parameters if parameter.kind in kinds]
    positional = [known[i] if i < len(known) else f"input_{i}" for i in range(len(batch.args))]
    return (*positional, *batch.kwargs)
