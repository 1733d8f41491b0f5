"""The sequential tests that a `Monitor` runs on scores: items against two references, thinned items, and repeats.

For each, the evidence ever reaches 1 / rate with a probability of at most the rate, on a stream whose items
are exchangeable with the reference scores. For the thinned tests, this holds if items at a distance are exchangeable.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.monitor.checked import MOST, join_ranks, split_ranks, whole
from neuralmean.stats.betting import WEIGHTS, log_bin_probabilities, log_densities
from neuralmean.stats.correlation import LEVELS
from neuralmean.stats.sequential import Evidence, FixedBins, OnlineRanks

Floats = NDArray[np.float64]

BOTH_WEIGHTS: Floats = np.concatenate([0.6 * WEIGHTS, 0.4 * WEIGHTS])  # growing reference, fixed reference
BOUND = 0.9  # share of the capital on a repeat of the last input
N_REPEATS = 10  # consecutive repeats: a client that retries after an error is not a frozen camera
_SAME = 1e-4  # of the deviation of scores, or the length of a vector; the same input gives different last digits in another batch


class ItemTests:
    """Tests of single scores: of all items, and of one in 4, 16, ... for correlated streams.

    Args:
        reference: The scores that the stream is compared with, (n,).
        seed: Seed of the random order of equal scores.
    """

    def __init__(self, reference: Floats, seed: int) -> None:
        self.ranks = OnlineRanks(reference, seed=seed)
        start = self.ranks.ordered()
        self._bins = [FixedBins(*start) for _ in LEVELS]
        self._log_expected = log_bin_probabilities(self._bins[0].p_edges)  # (B, K)
        self.evidence = [Evidence(BOTH_WEIGHTS), *(Evidence(WEIGHTS) for _ in LEVELS[1:])]

    def update(self, scores: Floats) -> tuple[list[Floats], Floats]:
        """Add the next scores, (N,).

        Returns:
            For each level the logarithms of the evidence after each of its items, and for each item, (N, 3), the values that
            `gains` uses: its p-value among all earlier ones, its bin, and the logarithm of the bin's probability.
        """
        n_before = self.n
        p_values, ties = self.ranks.rank(scores)
        bins, log_null = self._bins[0].add(scores, ties)
        notes = np.stack([p_values, bins, log_null], axis=1)
        found = [self.evidence[0].update(self.gains(notes))]
        for level, own, evidence in zip(LEVELS[1:], self._bins[1:], self.evidence[1:], strict=True):
            rows = slice(-n_before % level, None, level)
            if rows.start >= len(scores):
                found.append(np.empty(0))
                continue
            bins, log_null = own.add(scores[rows], ties[rows])
            found.append(evidence.update(self._log_expected[bins] - log_null[:, None]))
        return found, notes

    def gains(self, notes: Floats) -> Floats:
        """Return the gain of each bet on all items, (N, 2K)."""
        bins = notes[:, 1].astype(np.int64)
        return np.concatenate([log_densities(notes[:, 0]), self._log_expected[bins] - notes[:, 2:]], axis=1)

    @property
    def n(self) -> int:
        """Number of tested items."""
        return self.evidence[0].n

    @property
    def n_bins(self) -> int:
        """Number of bins."""
        return len(self._log_expected)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state for `restore`: tensors by name, and JSON values."""
        tensors, values = split_ranks(self.ranks)
        tensors["bins"] = torch.from_numpy(np.stack([bins.counts for bins in self._bins]))
        return tensors, {"ranks": values, "evidence": [one.state() for one in self.evidence]}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from a `state`, bit for bit, given the same reference and seed.

        Raises:
            ValueError: Values that no `state` could have returned.
        """
        counts = tensors["bins"].numpy()
        if counts.shape != (len(LEVELS), len(self._bins[0].counts)) or (counts < 0).any() or (counts >= MOST).any():
            raise ValueError("the bins are not those of the reference")
        self.ranks = join_ranks(tensors, values["ranks"], self.ranks)
        for bins, row in zip(self._bins, counts, strict=True):
            bins.counts = row.astype(np.int64)
        shares = [BOTH_WEIGHTS, *(WEIGHTS for _ in LEVELS[1:])]
        self.evidence = [Evidence.restore(one, own) for one, own in zip(values["evidence"], shares, strict=True)]


class RepeatTest:
    r"""Tests whether inputs repeat, as from a frozen camera.

    Of :math:`N` earlier scores let :math:`c` be equal to the last one up to rounding, itself included. If all are
    exchangeable, the next one is with probability at most :math:`c / N`: a bet on it pays :math:`N / c`. If vectors are known
    they must be equal as well, which only makes repeats rarer.

    Args:
        reference: The scores that the stream is compared with, (n,).
        width: Number of columns of a vector.
    """

    def __init__(self, reference: Floats, width: int) -> None:
        self._width = width
        self.tolerance = _SAME * float(reference.std()) if len(reference) else 0.0
        self.evidence = Evidence(np.ones(1))
        self.n_repeats = 0  # consecutive repeats so far
        self.last_score = math.nan
        self.last_vector: Tensor | None = None

    def update(self, scores: Floats, vectors: Tensor | None, ranks: OnlineRanks) -> tuple[Floats, NDArray[np.int64]]:
        """Add the next items.

        Args:
            scores: Their scores, which `ranks` already holds.
            vectors: Their vectors, (N, D), or None.
            ranks: All scores so far.

        Returns:
            The logarithm of the evidence after each of them, (N,), or minus infinity where too few repeat, and how many times in
            a row the input had been repeated by then, (N,).
        """
        counts = np.zeros(len(scores), np.int64)
        if not len(scores):
            return np.empty(0), counts
        before = np.concatenate([[self.last_score], scores[:-1]])
        same = np.abs(scores - before) <= self.tolerance
        if vectors is not None:
            first = vectors[:1] if self.last_vector is None else self.last_vector[None]
            earlier = torch.cat([first.to(vectors), vectors[:-1]])
            same &= ((vectors - earlier).norm(dim=1) <= _SAME * earlier.norm(dim=1)).cpu().numpy()
            self.last_vector = vectors[-1].detach().cpu().clone()
        gains = np.full(len(scores), math.log(1 - BOUND))
        for row in np.flatnonzero(same).tolist():
            odds = len(ranks) / max(1, ranks.count_near(float(before[row]), self.tolerance))
            gains[row] = math.log(1 - BOUND + BOUND * odds)
        self.last_score = float(scores[-1])
        log_values = self.evidence.update(gains[:, None])
        for row, repeated in enumerate(same):
            self.n_repeats = self.n_repeats + 1 if repeated else 0
            counts[row] = self.n_repeats
        log_values[counts < N_REPEATS] = -math.inf
        return log_values, counts

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state for `restore`: tensors by name, and JSON values."""
        last = None if math.isnan(self.last_score) else self.last_score
        tensors = {} if self.last_vector is None else {"last_vector": self.last_vector.float()}
        return tensors, {"evidence": self.evidence.state(), "n_repeats": self.n_repeats, "last_score": last}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from a `state`, bit for bit, given the same reference.

        Raises:
            ValueError: Values that no `state` could have returned.
        """
        self.evidence = Evidence.restore(values["evidence"], np.ones(1))
        self.n_repeats = whole(values["n_repeats"], "number of repeats")
        self.last_score = math.nan if values["last_score"] is None else float(values["last_score"])
        vector = tensors.get("last_vector")
        if vector is not None and (vector.shape != (self._width,) or not bool(torch.isfinite(vector).all())):
            raise ValueError("the last vector is not that of this detector")
        self.last_vector = vector
