"""One forward pass of the service: the model's output, the decision, the vectors and, if requested, explanations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.detector.decision import Decision, Explanation
from neuralmean.detector.detector import Detector


@dataclass(frozen=True)
class Pass:
    """The result of one forward pass over N inputs."""

    output: Tensor | None  # (N, ...) the main tensor of the model's own output
    decision: Decision
    vectors: Tensor | None  # (N, D); None if an early exit stopped the pass
    explanation: Explanation | None  # of the requested rows

    def of(self, rows: Tensor) -> Pass:
        """Return the result for some of the inputs, without explanations."""
        output = None if self.output is None else self.output[rows]
        vectors = None if self.vectors is None else self.vectors[rows]
        return Pass(output, self.decision.take(rows), vectors, None)

    @cached_property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Output, score, p-value and decision of all rows, made once for all requests that share the pass."""
        arrays: dict[str, NDArray[Any]] = {
            "score": self.decision.score.float().numpy(),
            "p_value": self.decision.p_value.numpy(),
            "is_ood": self.decision.is_ood.numpy(),
        }
        if self.output is not None:
            arrays["output"] = self.output.float().numpy()
        return arrays


def run_pass(detector: Detector, inputs: Tensor, explain: Tensor | None = None) -> Pass:
    """Run the model once on `inputs`.

    Args:
        detector: The detector.
        inputs: Shape (N, ...).
        explain: The rows (indices) whose score is to be explained.
    """
    detector.calibrated()
    with torch.no_grad():
        seen = detector.observe(inputs)
        explanation = seen.explain(explain) if explain is not None and len(explain) else None
    vectors = None if seen.vectors is None else seen.vectors.detach()
    return Pass(seen.main_output, cast(Decision, seen.decision), vectors, explanation)
