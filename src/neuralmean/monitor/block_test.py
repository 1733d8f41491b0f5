"""The test on blocks of a `Monitor`: means of 32 vectors, ranked among the earlier blocks, and the layers that moved."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.monitor.checked import join_ranks, split_ranks, whole
from neuralmean.monitor.layer_shifts import layer_shifts
from neuralmean.monitor.status import LayerShift
from neuralmean.stats.betting import WEIGHTS, log_densities
from neuralmean.stats.held_out_profile import HeldOutProfile
from neuralmean.stats.moments import Moments
from neuralmean.stats.sequential import Evidence, OnlineRanks

Floats = NDArray[np.float64]

BLOCK = 32
_FEWEST = 128  # held-out examples to compare with


class Comparison(NamedTuple):
    """Differences between the latest vectors and their reference; see `MonitorStatus`."""

    discrepancy: float | None
    layers: tuple[LayerShift, ...]
    n_compared: int
    compared_with: str


class BlockTest:
    """Ranks the batch-level discrepancy of each block of 32 vectors among the earlier blocks.

    Args:
        layers: Names of the watched layers.
        columns: The layer of each column, (D,).
        window: Number of latest items that are compared with the reference; also the number of first items to learn from if
            there is no reference.
    """

    def __init__(self, layers: Sequence[str], columns: Tensor, window: int) -> None:
        self._layers, self._columns, self._window = tuple(layers), columns, window
        self._learnt = self._nothing()  # of the first items, if there is no profile
        self.begin(None, 0)

    def begin(self, known: HeldOutProfile | None, seed: int) -> None:
        """Restart the test, given the profile of held-out data, if known, and the seed of ties."""
        self._known = known if known is not None and known.moments.count >= _FEWEST else None
        self._ranks, self.evidence = OnlineRanks(seed=seed), Evidence(WEIGHTS)
        self._blocks: deque[Moments] = deque(maxlen=self._window // BLOCK)
        self._open = self._nothing()
        if self._learnt.count < self._window:
            self.forget()

    def forget(self) -> None:
        """Learn from the next items again, if no held-out data is known."""
        self._learnt = self._nothing()

    def _nothing(self) -> Moments:
        return Moments.empty(len(self._columns))

    def update(self, vectors: Tensor) -> Floats:
        """Add the next vectors and return the logarithm of the evidence after each completed block."""
        row, found = 0, []
        while row < len(vectors):
            part = vectors[row : row + BLOCK - self._open.count]
            row += len(part)
            self._open = self._open + Moments.of(part)
            if self._open.count == BLOCK:
                found += self._close_block()
        return np.array(found)

    def _close_block(self) -> list[float]:
        block, profile = self._open, self._profile()
        self._open = self._nothing()
        self._blocks.append(block)
        if profile is None:
            self._learnt = self._learnt + block
            return []
        score = profile.shifts(block).mean().sqrt().item()
        gains = log_densities(self._ranks.p_values([score]))
        return [float(value) for value in self.evidence.update(gains)]

    def _profile(self) -> HeldOutProfile | None:
        """Return the moments that blocks are compared with; None while they are being learnt."""
        if self._known is not None:
            return self._known
        return self._bare(self._learnt) if self._learnt.count >= self._window else None

    def _bare(self, moments: Moments) -> HeldOutProfile:
        return HeldOutProfile.bare(self._columns, moments, len(self._layers))

    def compare(self, *, drift: bool) -> Comparison:
        """Return how far each layer has moved; without a profile, a layer counts as moved only after an alarm."""
        latest, profile = list(accumulate([self._open, *reversed(self._blocks)])), self._profile()
        window = latest[-1]
        if profile is None:
            name = "the training data"
        elif self._known is not None:
            name = f"the {profile.moments.count:,} held-out examples"
        else:
            name = f"the first {self._window} items"
        discrepancy = window.mean.abs().mean().item() if window.count else None
        if window.count < 2:
            return Comparison(discrepancy, (), 0, name)
        certain = window.count >= BLOCK  # means of fewer are not nearly normal
        if profile is None:
            # The training data's mean, 0 in these vectors. Fresh data always differs slightly from it.
            bare = self._bare(replace(window, mean=torch.zeros_like(window.mean)))
            found = layer_shifts(self._layers, [window], bare, n_reference=None, certain=certain and drift)
        else:
            parts = [part for part in latest if part.count >= BLOCK] or [window]
            n_reference = profile.moments.count
            found = layer_shifts(self._layers, parts, profile, n_reference=n_reference, certain=certain)
        return Comparison(discrepancy, *found, name)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the state for `restore`: tensors by name, and JSON values."""
        tensors, values = split_ranks(self._ranks)
        moments = [*self._blocks, self._open, self._learnt]
        tensors["mean"] = torch.stack([part.mean for part in moments])
        tensors["m2"] = torch.stack([part.m2 for part in moments])
        counts = [part.count for part in moments]
        return tensors, {"ranks": values, "evidence": self.evidence.state(), "counts": counts}

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue from a `state`, bit for bit, after `begin` with the same profile and seed.

        Raises:
            ValueError: Values that no `state` could have returned.
        """
        means, m2s = tensors["mean"], tensors["m2"]
        shape = (len(values["counts"]), len(self._columns))
        if means.shape != shape or m2s.shape != shape or means.dtype != torch.float64 or m2s.dtype != torch.float64:
            raise ValueError("the moments do not fit the detector")
        if not bool(torch.isfinite(means).all() and torch.isfinite(m2s).all() and (m2s >= 0).all()):
            raise ValueError("the moments are not finite")
        *blocks, n_open, n_learnt = (whole(count, "number of items") for count in values["counts"])
        if len(blocks) > self._window // BLOCK or any(count != BLOCK for count in blocks) or n_open >= BLOCK:
            raise ValueError("the blocks do not fit the window")
        if n_learnt > self._window:
            raise ValueError("the learnt items do not fit the window")
        moments = [Moments(*parts) for parts in zip((*blocks, n_open, n_learnt), means, m2s, strict=True)]
        self._learnt, self._open = moments.pop(), moments.pop()
        self._blocks.extend(moments)
        self._ranks = join_ranks(tensors, values["ranks"], self._ranks)
        self.evidence = Evidence.restore(values["evidence"], WEIGHTS)
