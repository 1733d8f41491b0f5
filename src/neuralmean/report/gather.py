"""One pass over a set: the score of every image, and bounded samples of everything else.

Memory stays bounded whatever the size of a set: a score and a p-value per image, the moments of the contributions, a
random sample of rows for the plots that need vectors, and the images for the gallery.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.data.progress import track
from neuralmean.detector.decision import Decision
from neuralmean.detector.detector import Detector
from neuralmean.detector.observed import Observed
from neuralmean.errors import InputError
from neuralmean.recording.observer import ChannelStats
from neuralmean.report.sources import count_images, named_batches
from neuralmean.stats.false_flags import most_false_flags
from neuralmean.stats.moments import Moments

GALLERY = 8  # images at each end
SAMPLE_ROWS = 3200  # 100 batches of 32
SAMPLE_BYTES = 64 * 2**20
_CONFIDENCE = 0.95  # of the bound on false flags

Scores = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pictured:
    """An image for the gallery."""

    row: int
    name: str | None
    score: float
    p_value: float
    kind: str
    image: Tensor | None  # (C, H, W) as the model saw it
    parts: Tensor | None  # (P,) contributions, as `SetResult.parts`


@dataclass(frozen=True, eq=False)
class SetResult:
    """The result of one pass over a set.

    Attributes:
        name: Name of the set.
        scores: Score of each image, shape (N,); higher = more OOD.
        flagged: Share of flagged images, 0 to 1.
        n_flagged: How many these are.
        most_false: How many of these are in-distribution at the most, 95 % sure; None if rates hold by group.
        parts: Moments of the contributions of each layer and term; None if the scorer has none.
        sample: Rows of up to `SAMPLE_ROWS` random images.
        sample_parts: Contributions of the same images, shape (S, P).
        most: The most unusual images, the most unusual first.
        least: The least unusual images, the least unusual first.
        unreadable: Number of unreadable files.
    """

    name: str
    scores: Scores
    flagged: float
    n_flagged: int
    most_false: int | None
    parts: Moments | None
    part_names: list[str]
    sample: ChannelStats
    sample_parts: Tensor | None
    most: list[Pictured]
    least: list[Pictured]
    unreadable: int

    def __len__(self) -> int:
        return len(self.scores)


def gather(detector: Detector, data: Any, *, name: str, limit: int | None = None, seed: int = 0) -> SetResult:
    """Run the model over a set once.

    Args:
        detector: A calibrated detector.
        data: See `named_batches`.
        name: Name of the set.
        limit: Stop after this many images.
        seed: Seed of the random sample.

    Raises:
        InputError: `data` holds no readable image.
    """
    detector.check_weights()
    calibration = detector.calibrated()
    scores: list[Tensor] = []
    flags: list[Tensor] = []
    moments: Moments | None = None
    part_names: list[str] = []
    sample, ends = _Sample(seed), _Ends()
    batches = named_batches(data, name=name, limit=limit)
    shown = track(
        batches, description=f"Reading {name}", total=count_images(data, limit), size=lambda item: len(item[0])
    )
    with torch.no_grad():
        for batch, names in shown:
            seen = next(detector.observe_each([batch], name=name))
            found = seen.score.cpu()
            parts, part_names = contributions(seen) or (None, [])
            if parts is not None:
                moments = Moments.of(parts) if moments is None else moments + Moments.of(parts)
            if seen.stats is not None:
                sample.add(seen.stats, parts)
            decision = seen.decision if seen.decision is not None else Decision(found, calibration)
            ends.add(found, decision.p_value, decision.kind, names, batch.first, parts)
            scores.append(found.double())
            flags.append(decision.is_ood.cpu())
    if not scores:
        raise InputError(f"Expected at least one image that can be read in {name!r}, but there is none.")
    joined = torch.cat(scores)
    is_ood, most = torch.cat(flags), None
    if calibration.group_of is None:
        p_values = calibration.p_value(joined).numpy()
        most = most_false_flags(p_values, len(calibration.scores), calibration.level, _CONFIDENCE)
    kept, kept_parts = sample.rows()
    return SetResult(
        name=name,
        scores=joined.numpy(),
        flagged=float(is_ood.double().mean()),
        n_flagged=int(is_ood.sum()),
        most_false=most,
        parts=moments,
        part_names=part_names,
        sample=kept,
        sample_parts=kept_parts,
        most=ends.most(),
        least=ends.least(),
        unreadable=int(getattr(data, "n_unreadable", 0)),
    )


def contributions(seen: Observed) -> tuple[Tensor, list[str]] | None:
    """Return the contribution of each layer and then each term, shape (N, L + T), with names; None if unknown."""
    try:
        with torch.enable_grad():  # scorers without `contributions` are explained by their gradient
            explained = seen.explain()
    except InputError:
        return None
    if explained is None:
        return None
    by_layer = explained.by_layer.detach()
    terms = [term.detach().unsqueeze(1).to(by_layer.dtype) for term in explained.terms.values()]
    names = [*explained.layers, *("rest" if term == "constant" else term for term in explained.terms)]
    return torch.cat([by_layer, *terms], dim=1), names


class _Sample:
    """A uniform random sample of rows from a stream of unknown length (reservoir sampling)."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._kept: list[tuple[ChannelStats, Tensor | None]] = []
        self._seen = 0

    def add(self, rows: ChannelStats, parts: Tensor | None) -> None:
        width = sum(
            part.shape[1] for part in (rows.means, rows.variances, rows.logits, rows.feature) if part is not None
        )
        capacity = max(64, min(SAMPLE_ROWS, SAMPLE_BYTES // (4 * width)))
        for row in range(len(rows)):
            place = self._seen if self._seen < capacity else int(self._random.integers(self._seen + 1))
            self._seen += 1
            if place < capacity:
                # A slice alone would keep the memory of its whole batch.
                one = ChannelStats(*(None if p is None else p[row : row + 1].clone() for p in _columns(rows)))  # type: ignore[arg-type]
                item = one, None if parts is None else parts[row : row + 1].clone()
                if place == len(self._kept):
                    self._kept.append(item)
                else:
                    self._kept[place] = item

    def rows(self) -> tuple[ChannelStats, Tensor | None]:
        parts = [part for _, part in self._kept if part is not None]
        return ChannelStats.cat([rows for rows, _ in self._kept]), torch.cat(parts) if parts else None


def _columns(rows: ChannelStats) -> tuple[Tensor | None, ...]:
    return rows.means, rows.variances, rows.logits, rows.feature


class _Ends:
    """The images with the highest and the lowest scores of a stream."""

    def __init__(self) -> None:
        self._high: list[tuple[float, int, Pictured]] = []
        self._low: list[tuple[float, int, Pictured]] = []
        self._seen = 0

    def add(
        self,
        scores: Tensor,
        p_values: Tensor,
        kinds: Sequence[str],
        names: list[str | None],
        images: Tensor,
        parts: Tensor | None,
    ) -> None:
        for row, score in enumerate(scores.tolist()):
            for heap, key in ((self._high, score), (self._low, -score)):
                if len(heap) == GALLERY and key <= heap[0][0]:
                    continue
                picture = Pictured(
                    row=self._seen + row,
                    name=names[row],
                    score=score,
                    p_value=p_values[row].item(),
                    kind=kinds[row],
                    image=images[row].detach().cpu().clone() if images.dim() == 4 else None,
                    parts=None if parts is None else parts[row].clone(),
                )
                # Rows count down to break ties, so that of equal scores the first image stays.
                item = (key, -picture.row, picture)
                if len(heap) < GALLERY:
                    heapq.heappush(heap, item)
                else:
                    heapq.heappushpop(heap, item)
        self._seen += len(scores)

    def most(self) -> list[Pictured]:
        return [picture for *_, picture in sorted(self._high, key=lambda item: item[:2], reverse=True)]

    def least(self) -> list[Pictured]:
        return [picture for *_, picture in sorted(self._low, key=lambda item: item[:2], reverse=True)]
