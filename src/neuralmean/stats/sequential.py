"""The mathematics of a sequential test on a stream: exact online ranks, and evidence that may be looked at any time.

`OnlineRanks` turns scores into p-values that are independent and uniform as long as the stream is exchangeable with the
scores it starts from, although that set is small and never changes. `Evidence` bets on those p-values. Numbers in,
numbers out: nothing here knows what a model, a window or a file is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CAPACITY = 10_000


class OnlineRanks:
    r"""P-values of a stream against all that came before it, exact at any sample size, in bounded memory.

    The usual conformal p-value compares every item with the same n held-out scores. Those p-values are uniform one by
    one but not independent: a held-out set that happens to lie low makes all of them small, and any test over a long
    stream ends in a false alarm. Here an item is ranked among the held-out scores *and* the stream so far, with ties
    broken at random (Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", Prop. 2.4):

    .. math::
        p_t = \frac{\#\{i < t : s_i > s_t\} + U_t (1 + \#\{i < t : s_i = s_t\})}{t}

    where t counts the held-out scores too. If all scores are exchangeable, the :math:`p_t` are independent and uniform.

    Memory is bounded: the first `capacity` scores are kept as they are and cut the line into intervals. Of later scores
    only the interval is kept. Given the intervals so far, the next score falls into interval j with probability
    :math:`(1 + c_j) / t` whatever its distribution (a Pólya urn), so an item that shares an interval with others counts
    as tied with them, and the p-values stay independent and uniform.

    Args:
        scores: Held-out scores to start from, in any order; may be empty.
        capacity: How many scores are kept as they are.
        seed: Of the ties and the U.

    Example:
        >>> ranks = OnlineRanks([1.0, 2.0, 3.0])
        >>> bool(ranks.p_values([9.0])[0] < 0.25)  # largest of 4
        True
    """

    def __init__(self, scores: Sequence[float] | Floats = (), *, capacity: int = CAPACITY, seed: int = 0) -> None:
        self._random = np.random.Generator(np.random.PCG64(seed))
        start = np.asarray(scores, np.float64)
        ties = self._random.random(len(start))
        order = np.lexsort((ties, start))
        self.capacity = max(capacity, len(start))
        self._allocate(start[order], ties[order], np.zeros(self.capacity + 1, np.int64))

    def _allocate(self, scores: Floats, ties: Floats, counts: NDArray[np.int64]) -> None:
        self._n_kept = len(scores)
        self._scores, self._ties = np.empty(self.capacity), np.empty(self.capacity)
        self._scores[: self._n_kept], self._ties[: self._n_kept] = scores, ties  # `_ties` orders equal scores
        self._counts = counts  # of later items in each interval, once `capacity` is reached
        self._n_counted = int(counts.sum())

    def __len__(self) -> int:
        return self._n_kept + self._n_counted

    def p_values(self, scores: Sequence[float] | Floats) -> Floats:
        """Rank the next scores of the stream one after the other, and remember them: small means larger than most."""
        values = np.asarray(scores, np.float64)
        draws = self._random.random((len(values), 2)).tolist()
        return np.array([self._next(score, *pair) for score, pair in zip(values.tolist(), draws, strict=True)])

    def _next(self, score: float, tie: float, within: float) -> float:
        n_kept = self._n_kept
        kept = self._scores[:n_kept]
        place = int(kept.searchsorted(score, "left"))
        if place < n_kept and kept[place] == score:  # equal scores are ordered by their ties
            high = int(kept.searchsorted(score, "right"))
            place += int(self._ties[place:high].searchsorted(tie))
        above, tied = n_kept - place, 1
        if self._n_counted:
            above += int(self._counts[place + 1 :].sum())
            tied += int(self._counts[place])
        p_value = (above + within * tied) / (n_kept + self._n_counted + 1)
        if n_kept < self.capacity:
            for column, value in ((self._scores, score), (self._ties, tie)):
                column[place + 1 : n_kept + 1] = column[place:n_kept]
                column[place] = value
            self._n_kept += 1
        else:
            self._counts[place] += 1
            self._n_counted += 1
        return p_value

    def state(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Return what `restore` needs: arrays by name, and JSON values."""
        arrays = {"scores": self._scores[: self._n_kept], "ties": self._ties[: self._n_kept], "counts": self._counts}
        return arrays, {"capacity": self.capacity, "random": self._random.bit_generator.state}

    @classmethod
    def restore(cls, arrays: dict[str, NDArray[Any]], values: dict[str, Any]) -> OnlineRanks:
        """Return the ranks as they were at `state`, bit for bit.

        Raises:
            ValueError: Arrays that no `state` could have returned.
        """
        scores, ties, counts = arrays["scores"], arrays["ties"], arrays["counts"]
        capacity = int(values["capacity"])
        if scores.shape != ties.shape or counts.shape != (capacity + 1,) or not len(scores) <= capacity <= 2**24:
            raise ValueError("the ranks do not fit together")
        if not np.isfinite(scores).all() or (np.diff(scores) < 0).any() or (counts < 0).any():
            raise ValueError("the ranked scores are not in order")
        ranks = cls(capacity=capacity)
        ranks._allocate(scores.astype(np.float64), ties.astype(np.float64), counts.astype(np.int64))
        ranks._random.bit_generator.state = values["random"]
        return ranks


# What the p-values of a shifted stream may look like. Powers k p^(k - 1): everything has moved a little or a lot (with
# the mirror image for streams that look too typical, such as a camera that froze). Steps: a share of the items lies in
# the smallest p-values and the rest is as before.
POWERS = (0.2, 0.4, 0.7)
MIRRORED = (0.3, 0.6)
STEPS = tuple((share, width) for share in (0.03, 0.15) for width in (0.0005, 0.003, 0.02))


class Evidence:
    r"""How strongly a stream of p-values speaks against being uniform, safe to look at after every item.

    A gambler starts with 1 and bets on each p-value before seeing it. If the p-values are independent and uniform no
    bet is favourable, and by Ville's inequality the capital *ever* reaches :math:`1 / \alpha` with probability at most
    :math:`\alpha`, over all time. The capital is spread over the betting densities :math:`f_k` above and over the time
    s at which the stream may turn:

    .. math::
        M_t = T(t) + \frac{1}{K} \sum_k \sum_{s \le t} w_s \prod_{i=s}^{t} f_k(p_i), \qquad
        T(t) = \frac{1}{1 + \ln(1 + t)}, \quad w_s = T(s - 1) - T(s)

    so a long quiet time costs little: about :math:`\ln(t \ln^2 t)` of the logarithm, whenever the turn comes.
    """

    def __init__(self) -> None:
        self.n = 0
        self._log_bets = np.full(len(POWERS) + len(MIRRORED) + len(STEPS), -math.inf)
        self.log_peak = 0.0

    @property
    def log_value(self) -> float:
        """Natural logarithm of the capital."""
        return float(self._log_values(self._log_bets[None], np.array([self.n]))[0])

    def update(self, p_values: Sequence[float] | Floats) -> Floats:
        """Take the next p-values in and return the logarithm of the capital after each, shape (N,)."""
        gains = log_densities(np.asarray(p_values, np.float64))
        times = self.n + np.arange(len(gains) + 1)
        reserve = 1 / (1 + np.log1p(times))
        log_weights = np.log(reserve[:-1] - reserve[1:])
        bets = np.empty_like(gains)
        for row, (log_weight, gain) in enumerate(zip(log_weights, gains, strict=True)):
            self._log_bets = np.logaddexp(self._log_bets, log_weight) + gain
            bets[row] = self._log_bets
        self.n += len(gains)
        log_values = self._log_values(bets, times[1:])
        self.log_peak = max([self.log_peak, *log_values.tolist()])
        return log_values

    @staticmethod
    def _log_values(log_bets: Floats, times: NDArray[np.int64]) -> Floats:
        log_reserve = -np.log1p(np.log1p(times))
        bets: Floats = np.logaddexp.reduce(log_bets, axis=1) - math.log(log_bets.shape[1])
        values: Floats = np.logaddexp(log_reserve, bets)
        return values

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, as JSON values."""
        return {"n": self.n, "log_peak": self.log_peak, "log_bets": self._log_bets.tolist() if self.n else None}

    @classmethod
    def restore(cls, values: dict[str, Any]) -> Evidence:
        """Return the evidence as it was at `state`, bit for bit."""
        evidence = cls()
        evidence.n, evidence.log_peak = int(values["n"]), float(values["log_peak"])
        if values["log_bets"] is not None:
            bets = np.array(values["log_bets"], np.float64)
            if bets.shape != evidence._log_bets.shape or not np.isfinite(bets).all():
                raise ValueError("the evidence is not that of this version")
            evidence._log_bets = bets
        return evidence


_POWERS = np.array(POWERS)
_MIRRORED = np.array(MIRRORED)
_SHARES, _WIDTHS = (np.array(column) for column in zip(*STEPS, strict=True))
_SMALLEST = 1e-12  # a p-value of 0 cannot come, but a rounded one must not bet infinity


def log_densities(p_values: Floats) -> Floats:
    """Return the logarithm of each of K betting densities at p-values (N,), shape (N, K).

    Every density integrates to 1 over (0, 1).

    Example:
        >>> np.exp(log_densities(np.array([0.5]))).round(2)[0, :3]
        array([0.35, 0.61, 0.86])
    """
    p = p_values[:, None]
    log_p, log_q = np.log(np.maximum(p, _SMALLEST)), np.log(np.maximum(1 - p, _SMALLEST))
    return np.concatenate(
        [
            np.log(_POWERS) + (_POWERS - 1) * log_p,
            np.log(_MIRRORED) + (_MIRRORED - 1) * log_q,
            np.log(1 - _SHARES + np.where(p <= _WIDTHS, _SHARES / _WIDTHS, 0.0)),
        ],
        axis=1,
    )
