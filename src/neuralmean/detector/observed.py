"""The result of one forward pass, which `Detector.observe` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuralmean.detector.decision import Decision, Explanation
from neuralmean.recording.observer import ChannelStats
from neuralmean.scorers import Observation
from neuralmean.stats.channels import main_tensor


def main_rows(output: Any, count: int) -> Tensor | None:
    """Return the main tensor of a model's output, shape (N, ...), on the CPU; None if it has no row for each input."""
    main = main_tensor(output)
    if main is None or main.dim() == 0 or len(main) != count:
        return None
    return main.detach().cpu()


@dataclass(frozen=True, eq=False)
class Observed:
    """The result of one forward pass over N inputs.

    Attributes:
        output: The model's own output; None if an early exit stopped the pass.
        decision: The decision on the inputs; None as long as the detector has no threshold.
        score: The scores, shape (N,); higher = more OOD.
        stats: Channel means and variances, logits and feature, as recorded; None if an early exit stopped the pass.
        vectors: The discrepancy vectors, shape (N, D); None if an early exit stopped the pass.
        explainer: Explains scores; see `explain`.
        lengths: How many tokens each input has, padding left out; None if the inputs are not tokens.
    """

    output: Any
    decision: Decision | None
    score: Tensor
    stats: ChannelStats | None
    vectors: Tensor | None
    explainer: Callable[[Observation, Tensor], Explanation]
    lengths: list[int] | None = None

    @property
    def logits(self) -> Tensor | None:
        """The model's logits, shape (N, K), if the scorer needs them."""
        return None if self.stats is None else self.stats.logits

    @property
    def feature(self) -> Tensor | None:
        """The input of the model's last linear layer, shape (N, F), if the scorer needs it."""
        return None if self.stats is None else self.stats.feature

    @property
    def main_output(self) -> Tensor | None:
        """The main tensor of the model's output, shape (N, ...), on the CPU; None if it has no row for each input."""
        return main_rows(self.output, len(self.score))

    def explain(self, rows: Tensor | slice = slice(None)) -> Explanation | None:
        """Return how much each layer and channel contributes to the scores, without another pass.

        Args:
            rows: Indices of the inputs to explain.

        Returns:
            None if an early exit stopped the pass: the later layers never ran.
        """
        if self.vectors is None or self.stats is None:
            return None
        with torch.inference_mode(False):
            observation = Observation(self.vectors, self.stats.logits, self.stats.feature)
            return self.explainer(observation[rows], self.score[rows])

    def kind_p_values(self) -> Tensor | None:
        """Return the p-values of appearance and content, float64 (N, 2), if the detector has learnt them."""
        found = None if self.decision is None else self.decision.kind_p_values
        return found() if callable(found) else found

    def __len__(self) -> int:
        return len(self.score)
