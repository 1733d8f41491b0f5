"""Ours-LR on the first layers, for the figure on the importance of layers."""

from __future__ import annotations

from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.ours import PAPER
from neuralmean.models.layers import Layer, layer_slices
from neuralmean.scorers.logistic import LogisticScorer


class FirstLayers(Method):
    """Ours-LR on the first k layers; the scorer standardises the vector, as the paper's ablation does.

    Args:
        count: Number of layers.
    """

    title = "Ours-LR, first layers"
    paper = PAPER
    reads = frozenset({"means"})
    uses_outliers = True

    def __init__(self, count: int) -> None:
        self.count = count
        self.name = f"ours-lr-first-{count}"
        self._scorer = LogisticScorer()
        self._layers: tuple[Layer, ...] = ()

    def fit(self, context: Context) -> None:
        """Fit on the columns of the first layers."""
        self._layers = context.inliers.layers[: self.count]
        outliers = None if context.outliers is None else self._columns(context.outliers)
        self._scorer.fit(self._columns(context.inliers), outliers)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        return self._scorer.score(self._columns(examples))

    def importance(self) -> dict[str, float]:
        """Mean magnitude of the weights of each layer's channels, all standardised."""
        self._scorer.check_fitted()
        weights = self._scorer.weight_.abs()
        return {name: weights[columns].mean().item() for name, columns in layer_slices(self._layers).items()}

    def _columns(self, view: View) -> Tensor:
        # NMD is the channel mean minus a constant, which standardising removes again.
        return view.means[:, : sum(layer.channels for layer in self._layers)]
