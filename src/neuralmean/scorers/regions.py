"""Scores regions of images: how far the channel means inside a box are from those inside boxes of its size.

Not a scorer of whole inputs: it takes the side of each box along with its means. What is usual comes from boxes of
in-distribution images; no OOD data, no classes and no weight to tune.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks
from neuralmean.errors import InputError
from neuralmean.scorers.statistics import Sketch, ledoit_wolf
from neuralmean.stats.size_trend import SizeTrend, range_of

BUCKETS = 1024
LEAST_BOXES = 50
_SEED = 0


@dataclass(frozen=True, eq=False)
class RegionRows:
    """What a pass showed of M boxes."""

    means: Tensor  # (M, D), of each channel inside the box
    side: Tensor  # (M,), of the square with the area of the box, in pixels of the model's input

    def __len__(self) -> int:
        return len(self.side)

    def __getitem__(self, rows: Tensor | slice) -> RegionRows:
        """Return some of the rows."""
        return RegionRows(self.means[rows], self.side[rows])


class RegionScorer:
    r"""Distance of a box from what is usual at its size.

    Channel means inside the box are standardised by the mean and deviation that boxes of this side have, hashed with random
    signs into at most 1,024 columns, and whitened by the Ledoit-Wolf covariance. The length of the result, in units of
    its usual deviation at this side, is the score.
    """

    learnt: ClassVar[tuple[str, ...]] = (
        "edges_", "mean_", "log_variance_", "offset_", "whiten_", "length_mean_", "length_log_variance_",
    )  # fmt: skip

    edges_: Tensor  # (B + 1,), limits of the ranges of sides
    mean_: Tensor  # (B, D)
    log_variance_: Tensor  # (B, D)
    offset_: Tensor  # (P,)
    whiten_: Tensor  # (P, P)
    length_mean_: Tensor  # (B, 1)
    length_log_variance_: Tensor  # (B, 1)

    def fit(self, rows: RegionRows, edges: Tensor) -> Self:
        """Learn from boxes of in-distribution images.

        Args:
            rows: The boxes.
            edges: Limits of the ranges of sides, as `size_edges` returns them.
        """
        if len(rows) < LEAST_BOXES:
            raise InputError(f"Expected at least {LEAST_BOXES} boxes to learn regions from, but got {len(rows)}.")
        self._forget()
        trend = SizeTrend.of(Blocks(rows.means), rows.side, edges)
        self.edges_, self.mean_, self.log_variance_ = edges, trend.mean.float(), trend.log_variance.float()
        sketched = torch.cat([self._sketched(rows[part]) for part in Blocks(rows.means).parts()]).double()
        offset = sketched.mean(dim=0)
        covariance = ledoit_wolf([sketched - offset])
        jitter = 1e-9 * covariance.trace().clamp_min(1e-12) * torch.eye(len(covariance), dtype=torch.float64)
        self.offset_ = offset.float()
        self.whiten_ = torch.linalg.cholesky(torch.linalg.inv(covariance + jitter)).float().contiguous()
        lengths = SizeTrend.of(Blocks(self._length(sketched.float())), rows.side, edges)
        self.length_mean_, self.length_log_variance_ = lengths.mean.float(), lengths.log_variance.float()
        return self

    def score(self, rows: RegionRows) -> Tensor:
        """Score each box, shape (M,); higher = more OOD."""
        parts = Blocks(rows.means).parts()
        lengths = [self._length(self._sketched(rows[part])) for part in parts]
        found = torch.cat(lengths) if lengths else torch.zeros(0, 1)
        trend = SizeTrend(self.edges_, self.length_mean_.double(), self.length_log_variance_.double())
        return trend.standardised(found, rows.side)[:, 0]

    def ranges(self, side: Tensor) -> Tensor:
        """Return the index of the range of sides that each box belongs to, (M,)."""
        return range_of(side, self.edges_)

    def state(self) -> dict[str, Tensor]:
        """Return what was learnt, by name: what a saved file holds."""
        return {name: getattr(self, name) for name in self.learnt}

    def load_state(self, state: dict[str, Tensor], width: int) -> Self:
        """Take over what another one has learnt, of vectors with `width` columns.

        Raises:
            InputError: It does not fit together.
        """
        self._forget()
        ranges, columns = len(state["edges_"]) - 1, min(width, BUCKETS)
        shapes = {
            "edges_": (ranges + 1,), "mean_": (ranges, width), "log_variance_": (ranges, width), "offset_": (columns,),
            "whiten_": (columns, columns), "length_mean_": (ranges, 1), "length_log_variance_": (ranges, 1),
        }  # fmt: skip
        edges = state["edges_"]
        if ranges < 1 or any(state[name].shape != shape for name, shape in shapes.items()):
            raise InputError(f"Expected what was learnt of regions with {width} columns, but got other shapes.")
        if edges.dtype != torch.float64 or bool((edges.diff() <= 0).any()) or bool((edges <= 0).any()):
            raise InputError("Expected limits of sides that grow, but got others.")
        for name in self.learnt:
            setattr(self, name, state[name])
        return self

    def _forget(self) -> None:
        for name in ("_trend", "_sketch"):
            self.__dict__.pop(name, None)

    @cached_property
    def _trend(self) -> SizeTrend:
        return SizeTrend(self.edges_, self.mean_.double(), self.log_variance_.double())

    @cached_property
    def _sketch(self) -> Sketch:
        width = self.mean_.shape[1]
        if width <= BUCKETS:
            return Sketch.of(torch.arange(width), torch.ones(width))
        generator = torch.Generator().manual_seed(_SEED)
        bucket = torch.arange(width)[torch.randperm(width, generator=generator)] % BUCKETS
        return Sketch.of(bucket, torch.randint(0, 2, (width,), generator=generator) * 2.0 - 1.0)

    def _sketched(self, rows: RegionRows) -> Tensor:
        return self._sketch.add_up(self._trend.standardised(rows.means.float(), rows.side))

    def _length(self, sketched: Tensor) -> Tensor:
        """Return the whitened length of each row, (M, 1)."""
        length: Tensor = torch.linalg.vector_norm((sketched - self.offset_) @ self.whiten_, dim=1, keepdim=True)
        return length
