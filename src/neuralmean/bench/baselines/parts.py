"""The terms of the ID-only scorer, on all layers or a third of them, for the ablation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from neuralmean.bench.baselines.base import Context, View
from neuralmean.bench.baselines.ours import NeuralMean
from neuralmean.models.layers import Layer
from neuralmean.scorers import Observation
from neuralmean.scorers.typicality import TERMS, TypicalityScorer


class PartOfLayers(NeuralMean):
    """The standardised terms of the scorer on a third of the watched layers, in the order of the model.

    Args:
        third: 0, 1 or 2; None for all layers.
    """

    n_terms = len(TERMS)

    def __init__(self, third: int | None) -> None:
        super().__init__("typicality")
        self.name = f"{self.name}-terms-{'all' if third is None else third}"
        self._third = third
        self._columns = slice(None)

    def fit(self, context: Context) -> None:
        """Fit the scorer on the columns of the layers."""
        self._columns = slice(None) if self._third is None else third_of(context.inliers.layers, self._third)
        super().fit(context)

    def score(self, examples: View) -> Tensor:
        """Return the terms of each image, shape (N, T); their sum is the score."""
        seen, scorer = self._observe(examples), cast(TypicalityScorer, self.scorer)
        return scorer.standard_terms(seen)

    def _observe(self, view: View) -> Observation:
        whole = super()._observe(view)
        return Observation(whole.vector[:, self._columns], whole.logits, whole.feature)


def third_of(layers: Sequence[Layer], third: int) -> slice:
    """Return the columns of the first, middle or last third of the layers."""
    cuts = [round(part * len(layers) / 3) for part in range(4)]
    widths = [layer.channels for layer in layers]
    return slice(sum(widths[: cuts[third]]), sum(widths[: cuts[third + 1]]))
