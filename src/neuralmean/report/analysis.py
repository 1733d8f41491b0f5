"""The numbers for the plots: histograms, metrics with intervals, layers, batches. Nothing is drawn here."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from neuralmean.detector.detector import Detector
from neuralmean.recording.observer import ChannelStats
from neuralmean.report.gather import Scores, SetResult
from neuralmean.stats import metrics
from neuralmean.stats.metrics import Interval, Metrics, RocCurve

BATCH_SIZES = (1, 2, 4, 8, 16, 32)
BATCHES = 200
BINS = 56
ROC_POINTS = 240
_MANY = 50_000  # images from which the bootstrap draws fewer resamples


@dataclass(frozen=True, eq=False)
class Comparison:
    """How well one OOD set is separated from the ID set.

    Attributes:
        name: The OOD set.
        figures: AUROC and so on, in percent.
        intervals: 95 % bootstrap interval of each figure, by its name.
        roc: The curve, thinned.
        by_batch: AUROC in percent and its interval for each batch size for which there are enough images.
        by_depth: AUROC in percent of the contributions of the first 1, 2, ... layers, shape (L,); None
            if the scorer has no contributions.
    """

    name: str
    figures: Metrics
    intervals: dict[str, Interval]
    roc: RocCurve
    by_batch: dict[int, tuple[float, Interval]]
    by_depth: NDArray[np.float64] | None


@dataclass(frozen=True, eq=False)
class Histogram:
    """Shares of the images of several sets in the same bins; values outside are in the first and the last bin.

    Attributes:
        edges: Edges of the bins, shape (B + 1,); a bin holds scores above its lower and up to its upper edge.
        shares: Share of each set's images in each bin, 0 to 1, each of shape (B,).
        below: Share of each set that lies below the first edge.
        above: Share of each set that lies above the last edge.
    """

    edges: Scores
    shares: list[Scores]
    below: list[float]
    above: list[float]


def compare(detector: Detector, inside: SetResult, outside: SetResult) -> Comparison:
    """Compute everything that the report shows of one OOD set."""
    n = len(inside) + len(outside)
    figures = metrics.evaluate(inside.scores, outside.scores)
    intervals = metrics.bootstrap(inside.scores, outside.scores, resamples=300 if n <= _MANY else 100)
    return Comparison(
        name=outside.name,
        figures=figures,
        intervals=intervals,
        roc=metrics.roc_curve(inside.scores, outside.scores, max_points=ROC_POINTS),
        by_batch={1: (figures.auroc, intervals["auroc"]), **_by_batch(detector, inside.sample, outside.sample)},
        by_depth=auroc_by_depth(inside.sample_parts, outside.sample_parts, len(detector.layers)),
    )


def histogram(sets: list[Scores], threshold: float) -> Histogram:
    """Bin the scores of several sets, with the threshold on an edge: a bar is flagged as a whole or not at all.

    The first set is ID. The bins cover nearly all scores, but never so much that ID shrinks to a few of them.
    """
    low = min(float(np.quantile(scores, 0.002)) for scores in sets)
    high = max(float(np.quantile(scores, 0.99)) for scores in sets)
    middle = float(np.median(sets[0]))
    # Quantiles, not the standard deviation: one ID image with an absurd score would flatten all bars.
    near, far = np.quantile(sets[0], [0.05, 0.95])
    reach = max(abs(threshold - middle), float(far - near) / 3.29, 1e-9 * max(1.0, abs(threshold)))
    low, high = (
        max(min(low, threshold - reach), middle - 6 * reach),
        min(max(high, threshold + reach), middle + 12 * reach),
    )
    width = (high - low) / BINS
    before, after = math.ceil((threshold - low) / width), math.ceil((high - threshold) / width)
    edges: Scores = threshold + width * np.arange(-before, after + 1, dtype=np.float64)
    edges[before] = threshold
    shares, below, above = [], [], []
    for scores in sets:
        place = np.searchsorted(edges, scores, side="left")  # bin i is (edge i - 1, edge i]
        below.append(float((place == 0).mean()))
        above.append(float((place == len(edges)).mean()))
        counts = np.bincount(place.clip(1, len(edges) - 1) - 1, minlength=len(edges) - 1)
        shares.append(counts / len(scores))
    return Histogram(edges, shares, below, above)


def wilson(share: float, n: int) -> Interval:
    r"""95 % interval of a share of `n` images, in percent (Wilson's score interval).

    .. math::
        \frac{p + z^2 / 2n \pm z \sqrt{p (1 - p) / n + z^2 / 4 n^2}}{1 + z^2 / n}

    Example:
        >>> interval = wilson(0.5, 100)
        >>> round(interval.low, 2), round(interval.high, 2)
        (40.38, 59.62)
    """
    z = 1.959964
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Interval(100 * max(0.0, middle - half), 100 * min(1.0, middle + half))


def auroc_by_depth(inside: Tensor | None, outside: Tensor | None, n_layers: int) -> NDArray[np.float64] | None:
    """AUROC in percent of the summed contributions of the first 1, 2, ... layers, without refitting, shape (L,).

    Args:
        inside: Contributions of ID images, shape (N, P) with the layers first.
        outside: Contributions of OOD images, shape (M, P).
        n_layers: How many of the columns are layers.
    """
    if inside is None or outside is None:
        return None
    sums = [parts[:, :n_layers].double().cumsum(dim=1).numpy() for parts in (inside, outside)]
    return np.array([auroc(sums[0][:, k], sums[1][:, k]) for k in range(n_layers)])


def auroc(inside: Scores, outside: Scores) -> float:
    """Chance in percent that an OOD score is above an ID score, ties counting half."""
    values = np.sort(inside)
    below, upto = np.searchsorted(values, outside, side="left"), np.searchsorted(values, outside, side="right")
    return float(50.0 * (below + upto).mean() / len(inside))


def excess_by_part(inside: SetResult, outside: SetResult) -> Scores | None:
    """Mean contribution of each layer and term to the OOD scores, less that to the ID scores, shape (P,)."""
    if inside.parts is None or outside.parts is None:
        return None
    return (outside.parts.mean - inside.parts.mean).double().numpy()


def weight_by_layer(detector: Detector) -> Scores | None:
    """Mean magnitude of a logistic scorer's weights in each layer, shape (L,): the paper's layer importance.

    (Dong et al., CVPR 2022, figure on layer importance, top.) None for scorers of other kinds.
    """
    weight = getattr(detector.scorer, "weight_", None)
    if getattr(detector.scorer, "name", None) != "logistic" or not isinstance(weight, Tensor):
        return None
    column = detector.column_layers
    total = torch.zeros(len(detector.layers), dtype=torch.float64).index_add_(0, column, weight.abs().double())
    return (total / torch.bincount(column, minlength=len(total))).numpy()


def batch_scores(detector: Detector, rows: ChannelStats, *, size: int, batches: int = BATCHES, seed: int = 0) -> Scores:
    """Score random batches as `Detector.score_batch` does, from recorded rows; higher = more OOD.

    No image is in two batches if there are enough.

    Args:
        detector: The detector.
        rows: Rows of at least `size` images.
        size: Images in a batch.
        batches: How many batches.
        seed: Seed of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    whole = len(rows) // size
    orders = [torch.randperm(len(rows), generator=generator)[: whole * size] for _ in range(-(-batches // whole))]
    chosen = torch.cat(orders)[: batches * size].reshape(batches, size)
    return np.array([detector.score_pooled(rows[one]) for one in chosen])


def _by_batch(detector: Detector, inside: ChannelStats, outside: ChannelStats) -> dict[int, tuple[float, Interval]]:
    found = {}
    with torch.no_grad():
        for size in BATCH_SIZES[1:]:
            if 2 * size > min(len(inside), len(outside)):
                break
            scores = [batch_scores(detector, rows, size=size) for rows in (inside, outside)]
            interval = metrics.bootstrap(scores[0], scores[1], resamples=200)["auroc"]
            found[size] = metrics.evaluate(scores[0], scores[1]).auroc, interval
    return found
