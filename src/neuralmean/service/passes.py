"""One forward pass of the service: the model's output, the decision, the vectors and, where asked for, the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.channels import main_tensor
from neuralmean.data import to_batch
from neuralmean.decision import Decision, Explanation
from neuralmean.detector import Detector
from neuralmean.discrepancy import sum_by_layer, vector_layers
from neuralmean.errors import NotFittedError
from neuralmean.fitting import contributions_of, score_rows
from neuralmean.observer import Observer
from neuralmean.scorers import Observation


@dataclass(frozen=True)
class Pass:
    """What one forward pass showed of N inputs."""

    output: Tensor | None  # (N, ...) the main tensor of the model's own output
    decision: Decision
    vectors: Tensor  # (N, D)
    explanation: Explanation | None  # of the rows asked for

    def of(self, rows: Tensor) -> Pass:
        """Return what it showed of some of the inputs, without explanations."""
        output = None if self.output is None else self.output[rows]
        return Pass(output, Decision(self.decision.score[rows], self.decision.calibration), self.vectors[rows], None)

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Output, score, p-value and decision of all rows, made once for all requests that share the pass."""
        arrays: dict[str, NDArray[Any]] = {
            "score": self.decision.score.float().numpy(),
            "p_value": self.decision.p_value.float().numpy(),
            "is_ood": self.decision.is_ood.numpy(),
        }
        if self.output is not None:
            arrays["output"] = self.output.float().numpy()
        return arrays


def run_pass(
    detector: Detector, inputs: Tensor, explain: Tensor | None = None, *, observer: Observer | None = None
) -> Pass:
    """Run the model once on `inputs`.

    Args:
        detector: What decides.
        inputs: Shape (N, ...).
        explain: The rows (indices) whose score is to be explained.
        observer: What runs the model, in place of the detector's own.
    """
    if detector.calibration is None:
        raise NotFittedError("Expected a detector with a threshold to serve. Call `fit` or `calibrate` first.")
    with torch.no_grad():
        detector._watch.check()
        output, rows = (observer or detector._observer).observe(to_batch(inputs))
        observation = detector._observation(rows)
        decision = Decision(score_rows(detector.scorer, observation), detector.calibration)
        explanation = None
        if explain is not None and len(explain):
            explanation = _explain(detector, observation[explain], decision.score[explain])
    main = main_tensor(output)
    if main is not None:
        main = main.detach().cpu() if main.dim() > 0 and len(main) == len(inputs) else None
    return Pass(main, decision, observation.vector.detach(), explanation)


def _explain(detector: Detector, observation: Observation, scores: Tensor) -> Explanation:
    by_channel, terms, exact = contributions_of(detector.scorer, observation)
    columns = vector_layers(detector._layers, detector.statistic)
    by_layer = sum_by_layer(by_channel, columns, len(detector.layers))
    return Explanation(scores, detector.layers, tuple(detector.channels), by_layer, by_channel, terms, exact)
