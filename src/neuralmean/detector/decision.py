"""Results of a detector: decisions and explanations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from neuralmean.detector import html
from neuralmean.detector.kinds import SENTENCES, Kind, name_kinds
from neuralmean.errors import InputError
from neuralmean.stats.calibration import Calibration, check_rate
from neuralmean.stats.false_flags import benjamini_hochberg, most_false_flags


@dataclass(frozen=True, eq=False)
class Decision:
    """The decision on N inputs; `is_ood` is exactly `p_value <= level`, which is `score > threshold`."""

    score: Tensor  # (N,) higher = more OOD
    calibration: Calibration
    kind_p_values: Callable[[], Tensor] | Tensor | None = (
        None  # (N, 2), or a function that computes them on first access
    )
    groups: tuple[str, ...] | None = None  # of each input, if the false-alarm rate holds by group

    @cached_property
    def _kind_p_values(self) -> Tensor | None:
        return self.kind_p_values() if callable(self.kind_p_values) else self.kind_p_values

    @property
    def p_appearance(self) -> Tensor | None:
        """Share of in-distribution inputs that look at least as unusual (noise, blur, another sensor), float64 (N,).

        None if the detector has not learnt it: without `fit`, with the `"average"` scorer, after an early exit.
        """
        return None if self._kind_p_values is None else self._kind_p_values[:, 0]

    @property
    def p_content(self) -> Tensor | None:
        """Share of in-distribution inputs whose content is at least as unusual, float64 (N,); None as for `p_appearance`."""
        return None if self._kind_p_values is None else self._kind_p_values[:, 1]

    @cached_property
    def kind(self) -> list[Kind]:
        """The kind of each input: `typical` if it is not flagged, else `appearance`, `content`, `both` or `unsure`."""
        flags = self.is_ood
        return name_kinds(flags, self._kind_p_values if bool(flags.any()) else None, self.false_alarm_rate)

    @property
    def sentence(self) -> list[str]:
        """The kind of each input in plain words."""
        return [SENTENCES[kind] for kind in self.kind]

    @cached_property
    def _parts(self) -> list[tuple[Tensor, Calibration]]:
        return self.calibration.parts(self.groups, len(self.score))

    def _by_part(self, value: Callable[[Calibration, Tensor], Tensor | float]) -> Tensor:
        """Return a number for each input from the calibration of its group, float64 of shape (N,)."""
        numbers = torch.empty(len(self.score), dtype=torch.float64)
        for rows, calibration in self._parts:
            numbers[rows] = torch.as_tensor(value(calibration, rows), dtype=torch.float64)
        return numbers

    @cached_property
    def p_value(self) -> Tensor:
        """Share of in-distribution inputs, or of those of the input's group, that look at least as unusual; float64 (N,)."""
        if self.calibration.group_of is None:
            return self.calibration.p_value(self.score)
        scores = self.score.detach().cpu()
        return self._by_part(lambda calibration, rows: calibration.p_value(scores[rows]))

    @property
    def threshold(self) -> float:
        """The score above which an input is flagged; with groups, the threshold of all held-out scores (see `thresholds`)."""
        return self.calibration.threshold

    @property
    def thresholds(self) -> Tensor:
        """The score above which each input is flagged, by group if there are groups; float64 of shape (N,)."""
        return self._by_part(lambda calibration, _: calibration.threshold)

    @property
    def false_alarm_rate(self) -> float:
        """The share of in-distribution inputs that may be flagged."""
        return self.calibration.false_alarm_rate

    @property
    def level(self) -> float:
        """The p-value at or below which an input is flagged: the rate, or less with a confidence.

        With groups and a confidence, each group has its own level (see `levels`).
        """
        if self.calibration.group_of is None:
            return self.calibration.level
        own = {calibration.level for _, calibration in self._parts}
        return own.pop() if len(own) == 1 else self.calibration.level

    @property
    def levels(self) -> Tensor:
        """The p-value at or below which each input is flagged, by group if there are groups; float64 of shape (N,)."""
        return self._by_part(lambda own, _: own.level)

    @property
    def is_ood(self) -> Tensor:
        """Which inputs are flagged, shape (N,)."""
        return (self.p_value <= (self.level if self.calibration.group_of is None else self.levels)).to(
            self.score.device
        )

    def select(self, fdr: float = 0.1) -> Tensor:
        """Return which inputs to review so that on average at most a share `fdr` of them is in-distribution, shape (N,)."""
        check_rate(fdr, "fdr")
        return torch.from_numpy(benjamini_hochberg(self.p_value.numpy(), fdr))

    def most_false(self, level: float | None = None, *, confidence: float = 0.95) -> int:
        """Return an upper bound on the number of false flags among the inputs with a p-value of at most `level`.

        The bound holds for all levels at once with the given confidence, over the draw of held-out and fresh inputs, so
        the level may be chosen after looking at the p-values.

        Args:
            level: The largest p-value that is flagged; None takes the level of `is_ood`.
            confidence: Confidence of the bound.
        """
        check_rate(confidence, "confidence")
        if level is not None and (isinstance(level, bool) or not isinstance(level, (int, float)) or math.isnan(level)):
            raise InputError(f"Expected `level` to be a p-value, a number, but got {level!r}.")
        # Each group has its own held-out scores; the bounds of all groups hold together.
        confidence = 1 - (1 - confidence) / max(1, len(self._parts))
        return sum(
            most_false_flags(
                self.p_value[rows].numpy(), len(own.scores), own.level if level is None else level, confidence
            )
            for rows, own in self._parts
        )

    def __len__(self) -> int:
        return len(self.score)

    def __bool__(self) -> bool:
        raise InputError("Expected `is_ood`: a decision on N inputs is neither true nor false.")

    def __getitem__(self, rows: int | slice | Tensor) -> Decision:
        """Return the decision on one or some of the inputs, given an index, a slice, indices or a mask."""
        if not isinstance(rows, (slice, Tensor)) or (isinstance(rows, Tensor) and rows.dim() == 0):
            index = range(len(self))[int(rows)]
            rows = slice(index, index + 1)
        return self.take(rows)

    def take(self, rows: Tensor | slice) -> Decision:
        """Return the decision on some of the inputs, given a slice, indices or a mask."""
        if isinstance(rows, Tensor) and rows.dtype == torch.bool:
            if rows.shape != self.score.shape:
                raise InputError(
                    f"Expected a mask of {len(self)} inputs, but got one of shape {tuple(rows.shape)}. Pass one for each input."
                )
            rows = rows.nonzero().flatten()
        chosen = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        groups = None if self.groups is None else tuple(self.groups[row] for row in chosen)
        found = self.kind_p_values
        if callable(found):
            later = lambda: self._kind_p_values[rows]  # type: ignore[index]  # noqa: E731
            return Decision(self.score[rows], self.calibration, later, groups)
        return Decision(self.score[rows], self.calibration, None if found is None else found[rows], groups)

    def __iter__(self) -> Iterator[Decision]:
        return (self[row] for row in range(len(self)))

    def _repr_html_(self) -> str:
        return html.decision_table(self)

    def __repr__(self) -> str:
        if len(self) == 1:
            word = f"OOD, {self.kind[0]}" if self.is_ood.item() else "in distribution"
            numbers = (
                f"score {self.score.item():.4g}, threshold {self.threshold:.4g}, p-value {self.p_value.item():.3g}"
            )
            return f"Decision({word}: {numbers})"
        return f"Decision({int(self.is_ood.sum())} of {len(self)} OOD, threshold {self.threshold:.4g})"


@dataclass(frozen=True, eq=False)
class Explanation:
    """Contributions of layers and channels to the scores of N inputs.

    Attributes:
        score: The scores, shape (N,).
        layers: Names of the watched layers.
        channels: Names of the columns of the vector.
        by_layer: Contribution of each layer, shape (N, L).
        by_channel: Contribution of each channel, shape (N, D).
        terms: Contributions that belong to no layer, such as those of the logits, each (N,).
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

    def _repr_html_(self) -> str:
        return html.explanation_table(self)

    def __repr__(self) -> str:
        names = ", ".join(name for name, _ in self.top_layers())
        return f"Explanation({len(self.score)} inputs; first: {names})"


def _top(values: Tensor, names: tuple[str, ...], n: int) -> list[tuple[str, float]]:
    best = values.topk(min(n, len(names)))
    return [(names[index], value) for index, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
