"""Thresholds and p-values with a finite-sample guarantee, from scores of held-out in-distribution data.

Split conformal prediction: if the n held-out scores and a fresh in-distribution score are exchangeable, the fresh one
is flagged with probability at most the requested rate, whatever the model and the scorer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from neuralmean.errors import CalibrationError, CalibrationWarning, InputError

MAX_SCORES = 10_000


@dataclass(frozen=True, eq=False)
class Calibration:
    r"""Held-out scores and the threshold they set.

    The p-value of a score is :math:`(1 + \#\{s_i \ge s\}) / (n + 1)`. An input is flagged exactly if its p-value is at
    most `level`, which is the same as a score above `threshold`, the :math:`(n + 1 - j)`-th smallest held-out score for
    the largest j with :math:`j / (n + 1)` at most the level.

    Without `confidence` the level is the rate :math:`r`, and the rate holds on average over held-out sets. With it, the
    rate holds for *this* held-out set with that probability: the share of fresh inputs above the threshold follows
    :math:`\mathrm{Beta}(j, n + 1 - j)` (or less, with ties), and j is the largest number for which that is at most r
    with the requested probability.

    Attributes:
        scores: Sorted scores of held-out in-distribution inputs, shape (n,).
        false_alarm_rate: The requested rate.
        confidence: Probability over the draw of the held-out set with which the rate holds; None if it holds on average.
        group_names: Names of the groups for each of which the rate holds; empty if it holds over all inputs.
        group_of: Index in `group_names` of each score, (n,); None without groups.
    """

    scores: Tensor
    false_alarm_rate: float
    confidence: float | None = None
    group_names: tuple[str, ...] = ()
    group_of: Tensor | None = None

    @classmethod
    def of(
        cls,
        scores: Tensor,
        false_alarm_rate: float,
        *,
        confidence: float | None = None,
        groups: Sequence[object] | None = None,
    ) -> Calibration:
        """Calibrate on the scores of held-out in-distribution inputs, shape (n,), in any order.

        With `groups`, a label for each score, the rate holds for each group on its own. Groups with fewer examples than the rate
        needs are pooled, with a warning that names them; if even the pool has too few, it is compared with all scores.

        More than 10,000 scores are thinned to a random (seeded) 10,000, or as many as the rate needs: small in a file, and a
        random part of an exchangeable whole keeps the guarantee.

        Raises:
            CalibrationError: Fewer scores than the rate needs; the message says how many.
        """
        check_rate(false_alarm_rate)
        check_confidence(confidence)
        if not torch.isfinite(scores).all():
            raise InputError("Expected finite scores to calibrate on, but got NaN or Inf. Check the held-out data.")
        needed = check_enough(len(scores), false_alarm_rate, confidence)
        scores, most = scores.detach().cpu(), max(MAX_SCORES, needed)
        if groups is not None:
            return cls._of_groups(scores, as_labels(groups), float(false_alarm_rate), confidence, most)
        if len(scores) > most:
            scores = scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))[:most]]
        return cls(scores.sort().values, float(false_alarm_rate), confidence)

    @classmethod
    def _of_groups(
        cls, scores: Tensor, labels: list[str], rate: float, confidence: float | None, most: int
    ) -> Calibration:
        if len(labels) != len(scores):
            raise InputError(f"Expected a group for each of {len(scores)} held-out examples, but got {len(labels)}.")
        names = tuple(sorted(set(labels)))
        numbers = {name: number for number, name in enumerate(names)}
        group_of = torch.tensor([numbers[label] for label in labels])
        order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(0))
        kept = torch.cat([order[group_of[order] == number][:most] for number in range(len(names))])
        by_score = kept[scores[kept].argsort()]
        calibration = cls(scores[by_score], rate, confidence, names, group_of[by_score])
        calibration.warn_of_pool()
        return calibration

    @cached_property
    def groups(self) -> dict[str, Calibration]:
        """The calibration of each group that has enough examples of its own."""
        if self.group_of is None:
            return {}
        needed = examples_needed(self.false_alarm_rate, self.confidence)
        parts = {name: self.scores[self.group_of == number] for number, name in enumerate(self.group_names)}
        return {
            name: Calibration(part, self.false_alarm_rate, self.confidence)
            for name, part in parts.items()
            if len(part) >= needed
        }

    @cached_property
    def pooled(self) -> tuple[str, ...]:
        """Names of the groups with too few examples, which share one calibration."""
        return tuple(name for name in self.group_names if name not in self.groups)

    @cached_property
    def pool(self) -> Calibration:
        """The calibration of the pooled groups, and of groups that were not in the held-out data."""
        if self.group_of is None:
            return self
        numbers = torch.tensor([self.group_names.index(name) for name in self.pooled], dtype=torch.int64)
        scores = self.scores[torch.isin(self.group_of, numbers)]
        enough = len(scores) >= examples_needed(self.false_alarm_rate, self.confidence)
        return Calibration(scores if enough else self.scores, self.false_alarm_rate, self.confidence)

    def warn_of_pool(self) -> None:
        """Warn if some groups have too few examples for a threshold of their own."""
        if not self.pooled:
            return
        needed = examples_needed(self.false_alarm_rate, self.confidence)
        if len(self.pool.scores) < len(self.scores) or len(self.pooled) == len(self.group_names):
            holds = "The false-alarm rate holds for them together, not for each."
        else:
            holds = (
                "Together they have fewer as well, so they are compared with the examples of all groups, and the "
                "false-alarm rate holds over all inputs, not for them."
            )
        warnings.warn(
            f"{len(self.pooled)} of {len(self.group_names)} groups have fewer than {needed} held-out examples and are pooled: "
            f"{_some(self.pooled)}. {holds}",
            CalibrationWarning,
            stacklevel=4,
        )

    def parts(self, groups: Sequence[object] | None, count: int) -> list[tuple[Tensor, Calibration]]:
        """Return which rows, as indices, each calibration is for, given the groups of `count` inputs."""
        if self.group_of is None:
            return [(torch.arange(count), self)]
        if groups is None:
            raise InputError(
                "Expected `groups`, a label for each input, as the detector was calibrated by group. Pass them."
            )
        labels = as_labels(groups)
        if len(labels) != count:
            raise InputError(f"Expected a group for each of {count} inputs, but got {len(labels)}.")
        rows: dict[str | None, list[int]] = {}
        for row, label in enumerate(labels):
            rows.setdefault(label if label in self.groups else None, []).append(row)
        if unknown := {labels[row] for row in rows.get(None, ())} - set(self.group_names):
            known = "the pooled groups" if len(self.pool.scores) < len(self.scores) else "all held-out examples"
            warnings.warn(
                f"{len(unknown)} of the groups had no held-out examples: {_some(sorted(unknown))}. Their inputs are compared "
                f"with {known}, and the false-alarm rate may not hold for them. Calibrate with examples of them.",
                CalibrationWarning,
                stacklevel=4,
            )
        return [(torch.tensor(found), self.pool if name is None else self.groups[name]) for name, found in rows.items()]

    @cached_property
    def level(self) -> float:
        """The p-value at or below which an input is flagged: the rate, or less with a confidence."""
        if self.confidence is None:
            return self.false_alarm_rate
        count = len(self.scores)
        return _largest_rank(count, self.false_alarm_rate, self.confidence) / (count + 1)

    @cached_property
    def threshold(self) -> float:
        """The score above which an input is flagged."""
        n_flagging = int((self._by_count <= self.level).sum())
        return self.scores[len(self.scores) - n_flagging].item()

    def p_value(self, scores: Tensor) -> Tensor:
        """Return the share of held-out scores at least as large, float64 of shape (N,): small means unusual.

        Example:
            >>> Calibration.of(torch.arange(19.0), 0.05).p_value(torch.tensor([-1.0, 9.0, 30.0])).tolist()
            [1.0, 0.55, 0.05]
        """
        below = torch.searchsorted(self._doubles, scores.detach().cpu().double().contiguous())
        return self._by_count[below]

    @cached_property
    def _doubles(self) -> Tensor:
        return self.scores.double()

    @cached_property
    def _by_count(self) -> Tensor:
        """P-values of scores with 0, 1, ..., n held-out scores below, (n + 1,)."""
        count = len(self.scores)
        return torch.arange(count + 1, 0, -1, dtype=torch.float64) / (count + 1)


def as_labels(groups: Iterable[object]) -> list[str]:
    """Return the labels of groups as texts, from a list, an array, a tensor or a column of a frame.

    Example:
        >>> as_labels([1, "door"]), as_labels(torch.tensor([1, 2]))
        (['1', 'door'], ['1', '2'])
    """
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise InputError(f"Expected `groups` to be a label for each input, but got {groups!r}.")
    return [str(label) for label in (groups.tolist() if hasattr(groups, "tolist") else groups)]


@lru_cache
def examples_needed(false_alarm_rate: float, confidence: float | None = None) -> int:
    """Return the smallest number of held-out examples that a false-alarm rate needs.

    Example:
        >>> examples_needed(0.05), examples_needed(0.001), examples_needed(0.05, 0.95)
        (19, 999, 59)
    """
    if confidence is None:
        return math.ceil(1 / _exact(false_alarm_rate)) - 1
    # The smallest n for which one of n scores is above the rate's quantile with the confidence: (1 - r)^n <= 1 - c.
    needed = max(1, math.floor(math.log1p(-confidence) / math.log1p(-false_alarm_rate)) - 1)
    while math.exp(needed * math.log1p(-false_alarm_rate)) > _largest_tail(confidence):
        needed += 1
    return needed


def likely_rates(count: int, level: float, *, share: float = 0.95) -> tuple[float, float]:
    r"""Return the range of the false-alarm rate of a threshold over a share of all draws of scores.

    The rate of a threshold with j of n + 1 scores above it follows :math:`\mathrm{Beta}(j, n + 1 - j)`.

    Args:
        count: Number of scores that set the threshold.
        level: The average rate.
        share: Share of the draws.

    Example:
        >>> [round(rate, 3) for rate in likely_rates(199, 0.05)]
        [0.024, 0.084]
    """
    from scipy.special import betaincinv  # comes with scikit-learn

    rank = max(1, math.floor(_exact(level) * (count + 1)))
    low, high = (float(betaincinv(rank, max(count + 1 - rank, 1), tail)) for tail in ((1 - share) / 2, (1 + share) / 2))
    return low, high


def examples_for_twice(rate: float) -> int:
    """Return how many scores keep the rate of a threshold below twice the requested rate, in 39 of 40 draws.

    Example:
        >>> examples_for_twice(0.05)
        119
    """
    needed = examples_needed(rate)
    count = needed
    while likely_rates(count, rate)[1] > 2 * rate:
        count += needed + 1
    return count


def check_enough(
    count: int, false_alarm_rate: float, confidence: float | None = None, *, kind: str = "held-out"
) -> int:
    """Return how many examples of a kind a false-alarm rate needs, or raise if there are fewer."""
    needed = examples_needed(false_alarm_rate, confidence)
    if count < needed:
        least = 1 / (count + 1) if confidence is None else 1 - (1 - confidence) ** (1 / max(count, 1))
        sure = "" if confidence is None else f" that holds with a confidence of {confidence:g}"
        raise CalibrationError(
            f"Expected at least {needed} {kind} examples for a false-alarm rate of {false_alarm_rate:g}{sure}, but got "
            f"{count}. Pass more, or ask for a rate of at least {least:.3g}."
        )
    return needed


def check_confidence(value: float | None) -> None:
    """Raise unless `value` is None or a number strictly between 0 and 1."""
    if value is not None:
        check_rate(value, "confidence")


def check_rate(value: float, name: str = "false_alarm_rate") -> None:
    """Raise unless `value` is a number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 < value < 1.0:
        raise InputError(f"Expected `{name}` to be a number in the (0, 1) range, but got {value!r}.")


@lru_cache
def _largest_rank(count: int, rate: float, confidence: float) -> int:
    r"""Return the largest j with :math:`P(\mathrm{Beta}(j, n + 1 - j) \le r) \ge c`, 0 if there is none.

    That probability is the one of at least j successes in n trials of probability r.
    """
    ks = np.arange(count + 1)
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    logs = log_factorials[count] - log_factorials[ks] - log_factorials[count - ks]
    below = np.cumsum(np.exp(logs + ks * math.log(rate) + (count - ks) * math.log1p(-rate)))  # P(successes <= k)
    return int(np.searchsorted(below, _largest_tail(confidence), side="right"))


def _largest_tail(confidence: float) -> float:
    """Return the largest probability to fail, with a margin for rounding: it is compared with sums of up to 10,000 numbers."""
    return (1 - confidence) * (1 + 1e-12)


def _some(names: Sequence[str]) -> str:
    """Return up to ten names and the number of the others."""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(repr(name) for name in names[:10]) + more


def _exact(rate: float) -> Fraction:
    """Return the rate as the decimal number that was typed: 0.05 rather than 0.05000000000000000277."""
    return Fraction(repr(float(rate)))
