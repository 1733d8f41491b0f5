"""P-values of regions of an image: of boxes, and of the surroundings of every cell of a layer.

Statistics of boxes by size are learnt from in-distribution images. The p-values come from boxes of held-out images, one
per image and range of sizes, with which a box of a fresh image is exchangeable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch
from torch import Tensor

from neuralmean.data.batch import Batch, count_rows, to_batch, to_batches
from neuralmean.data.progress import track
from neuralmean.data.table import Table
from neuralmean.detector.decision import Decision
from neuralmean.detector.region_boxes import (
    BoxSource,
    Given,
    boxes_to_calibrate,
    boxes_to_learn,
    grid_of,
    read_boxes,
    region_layers,
)
from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.layers import unwrap
from neuralmean.scorers.regions import RegionRows, RegionScorer
from neuralmean.stats.calibration import Calibration, check_enough
from neuralmean.stats.size_trend import size_edges

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector

Boxes: TypeAlias = "Tensor | Sequence[Tensor] | Callable[[Any], Sequence[Tensor]]"

MOST_BOXES = 8192  # boxes to learn from
_MOST_PER_IMAGE = 8
_CELLS = 8  # minimum rows and columns of a layer chosen for a map
_MAP_BYTES = 256 * 1024**2  # memory for the means of the cells of a map


@dataclass(frozen=True, eq=False)
class Regions:
    """What was learnt about regions.

    Attributes:
        scorer: Scores the channel means inside a box.
        calibration: Scores of boxes of held-out images, grouped by range of sizes.
    """

    scorer: RegionScorer
    calibration: Calibration

    def decide(self, rows: RegionRows) -> Decision:
        """Return the decision on each box."""
        return Decision(self.scorer.score(rows), self.calibration, None, tuple(size_labels(self.scorer, rows)))


def size_labels(scorer: RegionScorer, rows: RegionRows) -> list[str]:
    """Return a label for the range of sizes of each box."""
    edges = scorer.edges_.tolist()
    names = [f"{low:.3g} to {high:.3g} px" for low, high in itertools.pairwise(edges)]
    return [names[index] for index in scorer.ranges(rows.side).tolist()]


@dataclass(frozen=True, eq=False)
class RegionDecisions(Sequence[Decision]):
    """Decisions on boxes in N images: a sequence with the `Decision` on the boxes of each image.

    Attributes:
        output: The model's own output, from the same pass.
        boxes: The given boxes of each image, (M_i, 4).
        decision: One decision on all boxes, in the order of the images.
        stacked: Whether the boxes were given as one tensor (N, M, 4).
    """

    output: Any
    boxes: list[Tensor]
    decision: Decision
    stacked: bool

    @property
    def p_value(self) -> Any:
        """Share of in-distribution boxes of the same size that look at least as unusual: (N, M), or a list of (M_i,)."""
        return self._split(self.decision.p_value)

    @property
    def score(self) -> Any:
        """Score of each box, (N, M) or a list of (M_i,); higher = more OOD."""
        return self._split(self.decision.score)

    @property
    def is_ood(self) -> Any:
        """Which boxes are flagged, (N, M) or a list of (M_i,)."""
        return self._split(self.decision.is_ood)

    def _split(self, values: Tensor) -> Tensor | list[Tensor]:
        if self.stacked:
            return values.reshape(len(self.boxes), -1)
        return list(torch.split(values, [len(own) for own in self.boxes]))

    def __len__(self) -> int:
        return len(self.boxes)

    @overload
    def __getitem__(self, index: int) -> Decision: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Decision]: ...
    def __getitem__(self, index: int | slice) -> Decision | Sequence[Decision]:
        """Return the decision on the boxes of an image."""
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = sum(len(own) for own in self.boxes[:index])
        return self.decision.take(slice(start, start + len(self.boxes[index])))

    def __repr__(self) -> str:
        flagged = int(self.decision.is_ood.sum())
        return f"RegionDecisions({len(self)} images, {flagged} of {len(self.decision)} boxes OOD)"


def learn_regions(
    detector: Detector, id_data: Any, held_out: Any, rate: float, *, boxes: Callable[[Any], Any] | None, batch_size: int
) -> Regions:
    """Learn from regions of in-distribution images; see `Detector.fit_regions`."""
    generator = torch.Generator().manual_seed(0)
    scorer = _learn_scorer(detector, id_data, boxes, generator, batch_size)
    source = boxes_to_calibrate(boxes, scorer.edges_, scorer.ranges, generator)
    scores, labels = list[Tensor](), list[str]()
    batches = to_batches(held_out, name="held_out", batch_size=batch_size)
    for batch in track(batches, description="Calibrating regions", unit="batches"):
        rows = _read(detector, batch, source)
        scores.append(scorer.score(rows))
        labels.extend(size_labels(scorer, rows))
    check_enough(len(labels), rate, kind="held-out boxes as")
    return Regions(scorer, Calibration.of(torch.cat(scores), rate, groups=labels))


def _learn_scorer(
    detector: Detector, id_data: Any, boxes: Any, generator: torch.Generator, batch_size: int
) -> RegionScorer:
    count = count_rows(id_data)
    every = math.ceil(count / MOST_BOXES) if count else 1
    per_image = max(1, min(_MOST_PER_IMAGE, MOST_BOXES // count)) if count else 2
    source = boxes_to_learn(boxes, per_image, generator)
    means, sides = Table(math.ceil(count / batch_size) if count else None), list[Tensor]()
    batches = _thin(to_batches(id_data, name="id_data", batch_size=batch_size), every)
    for batch in track(batches, description="Learning regions", unit="batches"):
        rows = _read(detector, batch, source)
        if len(rows):
            means.add(rows.means)
            sides.append(rows.side)
        if sum(map(len, sides)) >= MOST_BOXES and not count:
            break
    if not sides:
        raise InputError("Expected boxes in `id_data` to learn regions from, but there are none.")
    side = torch.cat(sides)
    return RegionScorer().fit(RegionRows(means.rows, side), size_edges(side.min().item(), side.max().item()))


def score_regions(detector: Detector, x: Any, boxes: Boxes) -> RegionDecisions:
    """Return the decision on each box in each input of `x`; see `Detector.score_regions`."""
    regions = learnt_regions(detector)
    detector.check_weights()
    output, found, rows = read_boxes(detector._observer.recorder, unwrap(detector.model), to_batch(x), Given(boxes))
    return RegionDecisions(output, found, regions.decide(rows), isinstance(boxes, Tensor))


def region_map(detector: Detector, x: Any, *, layer: str | None, window: float | None) -> Tensor:
    """Return the p-value of the surroundings of each cell of a layer; see `Detector.region_map`."""
    edges, batch = learnt_regions(detector).scorer.edges_, to_batch(x)
    if batch.images is not None or batch.first.dim() != 4:
        raise InputError(
            "Expected images of one size, (N, C, H, W), for a map. Map images of other sizes one at a time."
        )
    height, width = batch.first.shape[2:]
    rows, columns = _cells(detector, batch.take(slice(0, 1)), layer)
    side = window if window is not None else max(edges[0].item(), 2 * math.sqrt(height * width / (rows * columns)))
    grid = _windows((rows, columns), (height, width), side)
    at_once = max(1, _MAP_BYTES // (4 * len(grid) * sum(own.channels for own in region_layers(detector.watched))))
    maps = []
    for start in range(0, len(batch), at_once):
        part = batch.take(slice(start, start + at_once))
        found = score_regions(detector, part, grid.expand(len(part), -1, -1))
        maps.append(found.decision.p_value.reshape(len(part), rows, columns))
    return torch.cat(maps)


def learnt_regions(detector: Detector) -> Regions:
    """Return what was learnt about regions, or raise."""
    if detector.learnt.regions is None:
        raise NotFittedError(
            "The detector has not learnt regions yet. Fit it with `regions=True`, or call `fit_regions` with in-distribution "
            "images."
        )
    return detector.learnt.regions


def _read(detector: Detector, batch: Batch, source: BoxSource) -> RegionRows:
    return read_boxes(detector._observer.recorder, unwrap(detector.model), batch, source)[2]


def _thin(batches: Iterator[Batch], every: int) -> Iterator[Batch]:
    """Keep every n-th row."""
    start = 0
    for batch in batches:
        rows = torch.arange(start, len(batch), every)
        start = (start - len(batch)) % every
        if len(rows):
            yield batch if len(rows) == len(batch) else batch.take(rows)


def _cells(detector: Detector, batch: Batch, layer: str | None) -> tuple[int, int]:
    """Return rows and columns of a layer; None takes the deepest layer with enough cells."""
    canvas = batch.first.shape[2], batch.first.shape[3]
    found: dict[str, tuple[int, int]] = {}

    def keep(index: int, activation: Tensor) -> Tensor:
        own = detector.watched[index]
        grid = grid_of(activation, own, canvas)
        if grid is not None:
            found.setdefault(own.name, grid[1])
        return torch.empty(0)

    with torch.no_grad():
        detector._observer.recorder.keep_activations(batch, keep)
    if layer is not None and layer not in found:
        shown = ", ".join(map(repr, list(found)[:5])) or "none"
        raise InputError(f"Expected `layer` to be a watched layer with positions, such as {shown}, but got {layer!r}.")
    if not found:
        raise InputError(
            "Expected watched layers with positions, but there are none. Watch convolutions or batch norms."
        )
    fine = [name for name, cells in found.items() if min(cells) >= _CELLS]
    return found[layer or (fine[-1] if fine else max(found, key=lambda name: math.prod(found[name])))]


def _windows(cells: tuple[int, int], size: tuple[int, int], side: float) -> Tensor:
    """Return a square around each cell, (cells, 4); squares at the edge are shifted inwards."""
    if not side > 0:
        raise InputError(f"Expected `window` to be a number of pixels above 0, but got {side!r}.")
    ends = torch.tensor([size[1], size[0]], dtype=torch.float64)
    y, x = ((torch.arange(n, dtype=torch.float64) + 0.5) * (length / n) for n, length in zip(cells, size, strict=True))
    middle = torch.stack([x.repeat(len(y)), y.repeat_interleave(len(x))], dim=1)
    half = (torch.full((2,), side, dtype=torch.float64) / 2).minimum(ends / 2)
    middle = middle.maximum(half).minimum(ends - half)
    return torch.cat([middle - half, middle + half], dim=1)
