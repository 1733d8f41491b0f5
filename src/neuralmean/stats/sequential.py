"""The mathematics of a sequential test on a stream: exact online ranks, and evidence that may be checked at any time.

`OnlineRanks` turns scores into p-values that are independent and uniform as long as the stream is exchangeable with the
scores it starts from. `FixedBins` counts scores in fixed bins between the first scores. `Evidence` bets on both:
see `betting`. Independent of models, windows and files.
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
    r"""P-values of each item of a stream against all earlier ones, exact at any sample size, in bounded memory.

    The usual conformal p-value compares every item with the same n held-out scores. Those p-values are uniform one by
    one but not independent: a held-out set that happens to score low makes all of them small, and any test over a long
    stream ends in a false alarm. Here an item is ranked among the held-out scores *and* the stream so far, with ties
    broken at random (Vovk, Gammerman and Shafer, "Algorithmic Learning in a Random World", Prop. 2.4):

    .. math::
        p_t = \frac{\#\{i < t : s_i > s_t\} + U_t (1 + \#\{i < t : s_i = s_t\})}{t}

    where t counts the held-out scores too. If all scores are exchangeable, the :math:`p_t` are independent and uniform.

    Memory is bounded: the first `capacity` scores are kept and divide the line into intervals. Of later scores
    only the interval is kept. Given the intervals so far, the next score falls into interval j with probability
    :math:`(1 + c_j) / t` whatever its distribution (a Pólya urn), so an item that shares an interval with others counts
    as tied with them, and the p-values stay independent and uniform.

    Args:
        scores: Held-out scores to start from, in any order; may be empty.
        capacity: Number of scores that are kept exactly.
        seed: Seed of the random ties and of U.

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
        """Rank the next scores of the stream one after the other and remember them: small means larger than most."""
        return self.rank(scores)[0]

    def rank(self, scores: Sequence[float] | Floats) -> tuple[Floats, Floats]:
        """Return p-values as `p_values` does, and the random numbers that order equal scores, each of shape (N,)."""
        values = np.asarray(scores, np.float64)
        draws = self._random.random((len(values), 2))
        found = [self._next(score, *pair) for score, pair in zip(values.tolist(), draws.tolist(), strict=True)]
        return np.array(found), draws[:, 0]

    def ordered(self) -> tuple[Floats, Floats]:
        """Return the kept scores in order, and the random numbers that order equal ones."""
        return self._scores[: self._n_kept].copy(), self._ties[: self._n_kept].copy()

    def count_near(self, score: float, tolerance: float) -> int:
        """Return how many of the scores so far lie within `tolerance` of a score; more, if they are not all kept."""
        kept = self._scores[: self._n_kept]
        low, high = (
            int(kept.searchsorted(score - tolerance, "left")),
            int(kept.searchsorted(score + tolerance, "right")),
        )
        return high - low + (int(self._counts[low : high + 1].sum()) if self._n_counted else 0)

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
        """Return the state for `restore`: arrays by name, and JSON values."""
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


class FixedBins:
    r"""Counts of a stream in bins between the scores it starts from: a reference that a change cannot contaminate.

    A bin that holds :math:`m_b` of the n + 1 intervals between the first n scores and :math:`c_b` of the t scores since then
    holds the next one with probability :math:`(m_b + c_b) / (n + 1 + t)`, if all are exchangeable (a Pólya urn). What is
    expected after a change is set by the first n scores alone. With a growing reference, in contrast, each strange score makes
    the next one look less strange.

    Args:
        scores: The n first scores, in order.
        ties: Numbers that order equal scores, (n,).
    """

    def __init__(self, scores: Floats, ties: Floats) -> None:
        places = _bin_places(len(scores))
        self._edges, self._ties = scores[places], ties[places]
        self.counts = np.zeros(len(places) + 1, np.int64)
        self._masses = np.diff(places + 1, prepend=0, append=len(scores) + 1)
        # The upper and the lower end of each bin as a p-value; the lowest scores, in bin 0, have the largest.
        self.p_edges: Floats = 1 - np.concatenate([[0.0], np.cumsum(self._masses) / (len(scores) + 1)])

    def add(self, scores: Floats, ties: Floats) -> tuple[NDArray[np.int64], Floats]:
        """Count the next scores and return their bins and the logarithms of the bins' probabilities, each of shape (N,)."""
        low, high = self._edges.searchsorted(scores, "left"), self._edges.searchsorted(scores, "right")
        bins = np.array(
            [a + int(self._ties[a:b].searchsorted(tie)) for a, b, tie in zip(low, high, ties, strict=True)], np.int64
        )
        total, log_null = int(self._masses.sum() + self.counts.sum()), np.empty(len(bins))
        for row, place in enumerate(bins):
            log_null[row] = math.log((self._masses[place] + self.counts[place]) / (total + row))
            self.counts[place] += 1
        return bins, log_null


def _bin_places(count: int) -> NDArray[np.int64]:
    """Return at which of `count` ordered scores bins end: narrow ones for high scores, and some narrow ones for low."""
    from_top = np.unique(np.rint(np.geomspace(1, count, 3 * count.bit_length())).astype(np.int64))
    from_bottom = np.unique(np.rint(np.geomspace(max(1, count // 50), count, 8)).astype(np.int64)) - 1
    places: NDArray[np.int64] = np.unique(np.concatenate([count - from_top, from_bottom]))
    return places


class Evidence:
    r"""Evidence against "nothing has changed", valid at every item however often it is read.

    A gambler starts with 1 and bets on each item before seeing it. While nothing has changed no bet is favourable, and by
    Ville's inequality the capital *ever* reaches :math:`1 / \alpha` with probability at most :math:`\alpha`, over all time. The
    capital is spread over K bets with shares :math:`v_k` and over the time s at which the stream may change:

    .. math::
        M_t = T(t) + \sum_k v_k \sum_{s \le t} w_s \prod_{i=s}^{t} f_k(i), \qquad w_s = T(s - 1) - T(s)

    with the reserve :math:`T(t) = 0.3\,(1 + \ln(1 + t))^{-1/2} + 0.7\,(1 + t / 300)^{-0.3}`. Waiting costs little:
    :math:`-\ln w_s` is 2.7, 7.4, 9.9, 14.7 and 17.7 after 1, 100, 2,000, :math:`10^5` and :math:`10^6` items.
    Averages of such processes are such processes, so bets against a growing and against a fixed reference share one capital.

    Args:
        shares: The shares :math:`v_k`, positive numbers that sum to 1, (K,).
    """

    def __init__(self, shares: Floats) -> None:
        self.n = 0
        self._log_shares = np.log(shares)
        self._log_bets = np.full(len(shares), -math.inf)
        self.log_peak = 0.0

    @property
    def log_value(self) -> float:
        """Natural logarithm of the capital."""
        return float(self._log_values(self._log_bets[None], _reserve(np.array([self.n])))[0])

    def update(self, log_gains: Floats) -> Floats:
        """Return the logarithm of the capital after each of the next items, (N,), given the gain of each bet, (N, K)."""
        times = self.n + np.arange(len(log_gains) + 1)
        reserve = _reserve(times)
        log_weights = np.log(reserve[:-1] - reserve[1:])
        bets = np.empty_like(log_gains)
        for row, (log_weight, gain) in enumerate(zip(log_weights, log_gains, strict=True)):
            self._log_bets = np.logaddexp(self._log_bets, log_weight) + gain
            bets[row] = self._log_bets
        self.n += len(log_gains)
        log_values = self._log_values(bets, reserve[1:])
        self.log_peak = max([self.log_peak, *log_values.tolist()])
        return log_values

    def _log_values(self, log_bets: Floats, reserve: Floats) -> Floats:
        bets: Floats = np.logaddexp.reduce(log_bets + self._log_shares, axis=1)
        values: Floats = np.logaddexp(np.log(reserve), bets)
        return values

    def state(self) -> dict[str, Any]:
        """Return the state for `restore`, as JSON values."""
        return {"n": self.n, "log_peak": self.log_peak, "log_bets": self._log_bets.tolist() if self.n else None}

    @classmethod
    def restore(cls, values: dict[str, Any], shares: Floats) -> Evidence:
        """Return the evidence as it was at `state`, bit for bit.

        Raises:
            ValueError: Values that no `state` could have returned.
        """
        evidence = cls(shares)
        evidence.n, evidence.log_peak = int(values["n"]), float(values["log_peak"])
        if not 0 <= evidence.n < 2**53 or not math.isfinite(evidence.log_peak):
            raise ValueError("the evidence is out of range")
        if values["log_bets"] is not None:
            bets = np.array(values["log_bets"], np.float64)
            if bets.shape != evidence._log_bets.shape or not np.isfinite(bets).all():
                raise ValueError("the evidence is not that of this version")
            evidence._log_bets = bets
        return evidence


def _reserve(times: NDArray[np.int64]) -> Floats:
    """Return the share of the capital that is not yet bet after so many items; it falls from 1 to 0."""
    reserve: Floats = 0.3 * (1 + np.log1p(times)) ** -0.5 + 0.7 * (1 + times / 300) ** -0.3
    return reserve
