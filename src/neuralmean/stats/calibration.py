"""Thresholds and p-values with a finite-sample guarantee, from scores of held-out in-distribution data.

Split conformal prediction: if the n held-out scores and a fresh in-distribution score are exchangeable, the fresh one
is flagged with probability at most the rate asked for, whatever the model and the scorer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from neuralmean.errors import CalibrationError, InputError

MAX_SCORES = 10_000


@dataclass(frozen=True, eq=False)
class Calibration:
    r"""Held-out scores and the threshold they set.

    With the held-out scores sorted, the threshold is the k-th smallest for :math:`k = \lceil (n + 1)(1 - r) \rceil`; an
    input is flagged if its score is above it. Its p-value is :math:`(1 + \#\{s_i \ge s\}) / (n + 1)`. The two agree: an
    input is flagged exactly if its p-value is at most the rate :math:`r`.

    Attributes:
        scores: Sorted scores of held-out in-distribution inputs, shape (n,).
        false_alarm_rate: The rate asked for.
    """

    scores: Tensor
    false_alarm_rate: float

    @classmethod
    def of(cls, scores: Tensor, false_alarm_rate: float) -> Calibration:
        """Calibrate on the scores of held-out in-distribution inputs, shape (n,), in any order.

        More than 10,000 scores are thinned to a random (seeded) 10,000, or as many as the rate needs: small in a file, and a
        random part of an exchangeable whole keeps the guarantee.

        Raises:
            CalibrationError: Fewer scores than the rate needs; the message says how many.
        """
        check_rate(false_alarm_rate)
        if not torch.isfinite(scores).all():
            raise InputError("Expected finite scores to calibrate on, but got NaN or Inf. Check the held-out data.")
        needed = examples_needed(false_alarm_rate)
        if len(scores) < needed:
            raise CalibrationError(
                f"Expected at least {needed} held-out examples for a false-alarm rate of {false_alarm_rate:g}, but got "
                f"{len(scores)}. Pass more, or ask for a rate of at least {1 / (len(scores) + 1):.3g}."
            )
        most = max(MAX_SCORES, needed)
        if len(scores) > most:
            scores = scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))[:most]]
        return cls(scores.detach().cpu().sort().values, float(false_alarm_rate))

    @cached_property
    def threshold(self) -> float:
        """The score above which an input is flagged."""
        return self.scores[_rank(len(self.scores), self.false_alarm_rate) - 1].item()

    def p_value(self, scores: Tensor) -> Tensor:
        """Return the share of held-out scores at least as large, shape (N,): small means unusual.

        Example:
            >>> Calibration.of(torch.arange(19.0), 0.05).p_value(torch.tensor([-1.0, 9.0, 30.0]))
            tensor([1.0000, 0.5500, 0.0500])
        """
        below = torch.searchsorted(self.scores, scores.detach().cpu().to(self.scores.dtype).contiguous())
        return self._by_count[below]

    @cached_property
    def _by_count(self) -> Tensor:
        """P-values of scores with 0, 1, ..., n held-out scores below, (n + 1,)."""
        count = len(self.scores)
        return torch.arange(count + 1, 0, -1).float() / (count + 1)


@lru_cache
def examples_needed(false_alarm_rate: float) -> int:
    """Return how many held-out examples a false-alarm rate needs at the least.

    Example:
        >>> examples_needed(0.05), examples_needed(0.001)
        (19, 999)
    """
    return math.ceil(1 / _exact(false_alarm_rate)) - 1


def check_rate(value: float, name: str = "false_alarm_rate") -> None:
    """Raise unless `value` is a number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
        raise InputError(f"Expected `{name}` to be a number in the (0, 1) range, but got {value!r}.")


@lru_cache
def _rank(count: int, rate: float) -> int:
    """Return which of `count` sorted scores is the threshold; the first is 1."""
    return math.ceil((count + 1) * (1 - _exact(rate)))


def _exact(rate: float) -> Fraction:
    """Return the rate as the decimal that was meant: 0.05 rather than 0.05000000000000000277."""
    return Fraction(repr(float(rate)))
