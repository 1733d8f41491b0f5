"""The rows that `fit` stores: only scores if nothing is learnt, otherwise each number once.

Digests and the reference are computed during the pass, so that channel means are not needed afterwards and discrepancies
can replace them in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from neuralmean.data.table import Table, parts_of
from neuralmean.models.layers import Layer
from neuralmean.recording.observer import ChannelStats, Observer, PermuteBlocks, RotateSome
from neuralmean.recording.reference import Reference
from neuralmean.scorers import Observation
from neuralmean.stats.discrepancy import Statistic, discrepancy
from neuralmean.stats.held_out_profile import ProfileBuilder
from neuralmean.stats.moments import Moments


class RowStore:
    """The rows of one data set, added batch by batch.

    Args:
        additions: Approximate number of batches, if known.
        statistic: Which statistic is kept.
        score: Returns scores and vectors of a batch; if given, only scores are kept.
        digests: Whether to keep a digest of every row.
        layers: The layers of the reference to compute from the rows; empty if there is one already.
        seen: Also receives the vectors.
    """

    def __init__(
        self,
        additions: int | None,
        *,
        statistic: Statistic,
        score: Callable[[ChannelStats], tuple[Tensor, Tensor]] | None = None,
        digests: bool = False,
        layers: Sequence[Layer] = (),
        seen: ProfileBuilder | None = None,
    ) -> None:
        self.digests: list[bytes] = []
        self.reference = Reference.empty(layers)
        self.seen = seen
        self._additions, self._statistic, self._score, self._wants_digests = additions, statistic, score, digests
        self._count = 0
        self.lengths: list[int] = []  # of inputs that are tokens
        self._scores = Table(additions)  # a list of small tensors would keep the heap from shrinking
        self._tables: dict[str, Table] = {}

    def __len__(self) -> int:
        return self._count

    def add(self, rows: ChannelStats) -> None:
        """Add the rows of a batch."""
        self._count += len(rows)
        if rows.lengths is not None:
            self.lengths.extend(rows.lengths.tolist())
        if self._wants_digests:
            self.digests.extend(map(_digest, rows.means))
        if self.reference.layers:
            self.reference += Reference.of_statistics(self.reference.layers, rows.means, rows.variances)
        if self._score is not None:
            scores, vectors = self._score(rows)
            self._scores.add(scores)
            self._see(vectors)
            return
        wanted = {"mean": (rows.means,), "variance": (rows.variances,), "both": (rows.means, rows.variances)}
        statistics = torch.cat([part for part in wanted[self._statistic] if part is not None], dim=1)
        parts = {"vector": statistics, "logits": rows.logits, "feature": rows.feature}
        for name, part in parts.items():
            if part is not None:
                self._tables.setdefault(name, Table(self._additions)).add(part)

    def _see(self, vectors: Tensor) -> None:
        if self.seen is not None:
            self.seen.add(vectors)

    @property
    def scores(self) -> Tensor:
        """The score of each row, shape (N,); higher = more OOD."""
        return self._scores.rows

    def moments(self, reference: Reference) -> Moments:
        """Return the moments of the discrepancies before standardisation."""
        found = (discrepancy(rows.means, rows.variances, reference, self._statistic) for _, rows in self._blocks())
        return Moments.of_blocks(found, self._tables["vector"].rows.shape[1])

    def _blocks(self) -> Iterator[tuple[Tensor, ChannelStats]]:
        """Yield blocks of the statistics, both as stored and as rows that share the memory."""
        table = self._tables["vector"].rows
        for part in parts_of(*table.shape):
            # With a single statistic the other one is never read.
            means, variances = table[part].chunk(2, dim=1) if self._statistic == "both" else (table[part], table[part])
            yield table[part], ChannelStats(means, variances)

    def into_observation(self, observe: Callable[[ChannelStats], Observation]) -> Observation:
        """Return the vectors that `observe` computes, with logits and feature; they overwrite the statistics."""
        for block, rows in self._blocks():
            block.copy_(observe(rows).vector)
            self._see(block)
        return Observation(**{name: table.rows for name, table in self._tables.items()})


@dataclass(frozen=True)
class FitData:
    """The rows of all data of a fit."""

    inliers: RowStore
    outliers: RowStore | None  # given or crafted
    held_out: RowStore | None
    rotated: RowStore | None
    crafted: bool  # whether the outliers are crafted

    def counts(self) -> dict[str, int]:
        """Return the number of rows of each kind."""
        outliers = len(self.outliers or ())
        return {
            "n_id": len(self.inliers),
            "n_ood": 0 if self.crafted else outliers,
            "n_crafted": outliers if self.crafted else 0,
            "n_held_out": len(self.held_out or ()),
        }

    def into_observations(self, observe: Callable[[ChannelStats], Observation]) -> dict[str, Any]:
        """Return the observation of each set by its name; this consumes the statistics."""
        sets = {"inliers": self.inliers, "outliers": self.outliers, "held_out": self.held_out, "rotated": self.rotated}
        return {name: None if rows is None else rows.into_observation(observe) for name, rows in sets.items()}


def gather(
    observer: Observer,
    id_data: Any,
    ood_data: Any,
    held_out: Any,
    *,
    make: Callable[..., RowStore],
    seen: ProfileBuilder,
    augment: PermuteBlocks | RotateSome | None,
    batch_size: int,
) -> FitData:
    """Run the model over the data of a fit once.

    Args:
        observer: Runs the model.
        id_data: In-distribution data.
        ood_data: Out-of-distribution data, or None.
        held_out: In-distribution data for the threshold, or None.
        make: Creates the store of a set, given its approximate number of batches and a further receiver of its vectors.
        seen: Receives the vectors of `held_out`.
        augment: Makes further images from `id_data`; OOD images only without `ood_data`.
        batch_size: Rows per forward pass if the data is one tensor, array, frame or dataset.
    """

    def run(
        data: Any, name: str, augment: PermuteBlocks | RotateSome | None = None
    ) -> tuple[RowStore, RowStore | None]:
        additions = observer.count(data, batch_size)
        own, more = make(additions, seen=seen if name == "held_out" else None), make(additions)
        for rows, made in observer.observe_each(data, name=name, batch_size=batch_size, augment=augment):
            own.add(rows)
            if made is not None:
                more.add(made)
        return own, more if len(more) else None

    inliers, made = run(id_data, "id_data", augment)
    outliers = None if ood_data is None else run(ood_data, "ood_data")[0]
    held = None if held_out is None else run(held_out, "held_out")[0]
    if isinstance(augment, PermuteBlocks):
        return FitData(inliers, made, held, None, crafted=True)
    return FitData(inliers, outliers, held, made, crafted=False)


def _digest(row: Tensor) -> bytes:
    return hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest()
