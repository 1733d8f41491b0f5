"""What the detector answers: decisions and explanations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from neuralmean.errors import InputError
from neuralmean.stats.calibration import Calibration, check_rate
from neuralmean.stats.false_flags import benjamini_hochberg, most_false


@dataclass(frozen=True, eq=False)
class Decision:
    """What the detector says of N inputs; `is_ood` is exactly `p_value <= level`, which is `score > threshold`."""

    score: Tensor  # (N,) higher = more OOD
    calibration: Calibration

    @cached_property
    def p_value(self) -> Tensor:
        """Share of in-distribution inputs that look at least as unusual, float64 of shape (N,)."""
        return self.calibration.p_value(self.score)

    @property
    def threshold(self) -> float:
        """The score above which an input is flagged."""
        return self.calibration.threshold

    @property
    def false_alarm_rate(self) -> float:
        """The share of in-distribution inputs that may be flagged."""
        return self.calibration.false_alarm_rate

    @property
    def level(self) -> float:
        """The p-value at or below which an input is flagged: the rate, or less where a confidence was asked for."""
        return self.calibration.level

    @property
    def is_ood(self) -> Tensor:
        """Which inputs are flagged, shape (N,)."""
        return (self.p_value <= self.level).to(self.score.device)

    def select(self, fdr: float = 0.1) -> Tensor:
        """Return which inputs to look at so that on average at most a share `fdr` of them is in-distribution, shape (N,)."""
        check_rate(fdr, "fdr")
        return torch.from_numpy(benjamini_hochberg(self.p_value.numpy(), fdr))

    def most_false(self, level: float | None = None, *, confidence: float = 0.95) -> int:
        """Return how many of the inputs with a p-value of at most `level` are false flags at the most.

        It holds for all levels at once with the confidence, over the draw of held-out and fresh inputs: the level may be
        chosen after looking.

        Args:
            level: The largest p-value that is flagged; None takes that of `is_ood`.
            confidence: Of the bound.
        """
        check_rate(confidence, "confidence")
        count = len(self.calibration.scores)
        ranks = (self.p_value * (count + 1)).round().long().numpy()
        flagged = ranks[(self.p_value <= (self.level if level is None else level)).numpy()]
        return most_false(ranks, count, int(flagged.max()), confidence) if len(flagged) else 0

    def __len__(self) -> int:
        return len(self.score)

    def __bool__(self) -> bool:
        raise InputError("Expected to be asked for `is_ood`: a decision on N inputs is neither true nor false.")

    def __getitem__(self, rows: int | slice) -> Decision:
        """Return the decision on one of the inputs, or on some."""
        if not isinstance(rows, slice):
            index = range(len(self))[rows]
            rows = slice(index, index + 1)
        return Decision(self.score[rows], self.calibration)

    def __iter__(self) -> Iterator[Decision]:
        return (self[row] for row in range(len(self)))

    def __repr__(self) -> str:
        if len(self) == 1:
            word = "OOD" if self.is_ood.item() else "in distribution"
            numbers = (
                f"score {self.score.item():.4g}, threshold {self.threshold:.4g}, p-value {self.p_value.item():.3g}"
            )
            return f"Decision({word}: {numbers})"
        return f"Decision({int(self.is_ood.sum())} of {len(self)} OOD, threshold {self.threshold:.4g})"


@dataclass(frozen=True, eq=False)
class Explanation:
    """Which layers and channels made the scores of N inputs what they are.

    Attributes:
        score: The scores, shape (N,).
        layers: Names of the watched layers.
        channels: Names of the columns of the vector.
        by_layer: Contribution of each layer, shape (N, L).
        by_channel: Contribution of each channel, shape (N, D).
        terms: Contributions that belong to no layer (the model's output, say), each (N,).
        exact: Whether the contributions and terms add up to the score. Otherwise they are a first-order
            approximation: gradient times vector.
    """

    score: Tensor
    layers: tuple[str, ...]
    channels: tuple[str, ...]
    by_layer: Tensor
    by_channel: Tensor
    terms: dict[str, Tensor]
    exact: bool

    def top_layers(self, row: int = 0, *, n: int = 5) -> list[tuple[str, float]]:
        """Return the `n` layers that contribute most to the score of an input, largest first."""
        return _top(self.by_layer[row], self.layers, n)

    def top_channels(self, row: int = 0, *, n: int = 5) -> list[tuple[str, float]]:
        """Return the `n` channels that contribute most to the score of an input, largest first."""
        return _top(self.by_channel[row], self.channels, n)

    def __repr__(self) -> str:
        names = ", ".join(name for name, _ in self.top_layers())
        return f"Explanation({len(self.score)} inputs; first: {names})"


def _top(values: Tensor, names: tuple[str, ...], n: int) -> list[tuple[str, float]]:
    best = values.topk(min(n, len(names)))
    return [(names[index], value) for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
