r"""How well scores separate in-distribution from out-of-distribution data: AUROC, AUPR, TNR95, FPR95, detection accuracy.

For all `id_scores` and `ood_scores`, HIGHER = MORE OOD; every figure is in percent. The positive class is
in-distribution, as in the paper and in the ODIN and Mahalanobis papers before it: the true-positive rate is the share
of ID kept, the true-negative rate the share of OOD rejected. Numpy only; no model, no plot.

All figures are computed from the counts of both kinds at each distinct score, from the least to the most
unusual. Tied scores therefore never depend on the order of the inputs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from neuralmean.errors import InputError

__all__ = ["Interval", "Metrics", "RocCurve", "bootstrap", "evaluate", "roc_curve"]

_KEEP_PERCENT = 95

Counts = NDArray[np.int64]
Scores = NDArray[np.float64]


@dataclass(frozen=True)
class Metrics:
    """Metrics of one pair of sets, in percent; ID is the positive class.

    Attributes:
        auroc: Chance that an OOD example scores above an ID example, ties counting half. 50 is guessing.
        aupr_id: Average precision with ID as the positive class.
        aupr_ood: Average precision with OOD as the positive class.
        tnr95: Share of OOD rejected when at least 95 % of ID is kept. Higher is better.
        fpr95: Share of OOD accepted at that threshold, 100 - `tnr95`. Lower is better.
        accuracy: Detection accuracy with equal priors, the best over all thresholds of (TPR + TNR) / 2.
        n_id: Number of ID scores.
        n_ood: Number of OOD scores.
    """

    auroc: float
    aupr_id: float
    aupr_ood: float
    tnr95: float
    fpr95: float
    accuracy: float
    n_id: int
    n_ood: int

    def to_dict(self) -> dict[str, float]:
        """Return every figure and count by name."""
        return asdict(self)


@dataclass(frozen=True)
class Interval:
    """A confidence interval in percent."""

    low: float
    high: float


@dataclass(frozen=True)
class RocCurve:
    """Points of the ROC curve with ID as the positive class, from (0, 0) to (1, 1).

    `id_kept[i]` and `ood_kept[i]` are the shares (0 to 1) of ID and OOD whose score is at most `thresholds[i]`.
    """

    ood_kept: Scores  # (P,) false-positive rate
    id_kept: Scores  # (P,) true-positive rate
    thresholds: Scores  # (P,) the first is -inf: nothing is kept


def evaluate(id_scores: ArrayLike, ood_scores: ArrayLike) -> Metrics:
    r"""Compute every figure for one pair of sets.

    With a threshold :math:`t`, an example is kept as ID when its score is at most :math:`t`:

    .. math::
        \mathrm{TPR}(t) = P_{id}(s \le t), \quad \mathrm{TNR}(t) = P_{ood}(s > t)

    TNR95 is :math:`\mathrm{TNR}(t)` at the smallest :math:`t` with :math:`\mathrm{TPR}(t) \ge 0.95`. Detection accuracy
    is :math:`\max_t \tfrac12 (\mathrm{TPR}(t) + \mathrm{TNR}(t))`, that is :math:`1 - \min_t` of the detection error of
    ODIN (Liang et al. 2018) and of Lee et al. 2018 with equal priors, whatever the sizes of the two sets. AUPR is the
    average precision :math:`\sum_k (R_k - R_{k-1}) P_k`, without interpolation between the points.

    Args:
        id_scores: Scores of in-distribution examples, shape (N,); higher = more OOD.
        ood_scores: Scores of out-of-distribution examples, shape (M,).

    Example:
        >>> evaluate([0.1, 0.2, 0.3, 0.6], [0.5, 0.7, 0.8, 0.9]).auroc
        93.75
    """
    inliers, outliers = _check(id_scores, "id_scores"), _check(ood_scores, "ood_scores")
    _, id_counts, ood_counts = _count(inliers, outliers)
    figures = _areas_and_rates(id_counts, ood_counts) | _precisions(id_counts, ood_counts)
    return Metrics(**figures, n_id=len(inliers), n_ood=len(outliers))


def bootstrap(
    id_scores: ArrayLike,
    ood_scores: ArrayLike,
    *,
    resamples: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    aupr: bool = True,
) -> dict[str, Interval]:
    """Compute the percentile bootstrap confidence interval of every figure of `evaluate`, by name.

    ID and OOD are resampled separately, at their sizes. The scores are sorted once, so that a resample is only a new
    set of counts.

    Args:
        id_scores: Scores of in-distribution examples, shape (N,); higher = more OOD.
        ood_scores: Scores of out-of-distribution examples, shape (M,).
        resamples: Number of resamples.
        confidence: Share of the resamples inside the interval.
        seed: The same seed gives the same intervals.
        aupr: Whether to compute the two areas under precision-recall curves, which take half of the time.
    """
    if resamples < 1:
        raise InputError(f"Expected `resamples` to be at least 1, but got {resamples!r}.")
    if not 0.0 < confidence < 1.0:
        raise InputError(f"Expected `confidence` to be a float in the (0, 1) range, but got {confidence!r}.")
    values, id_counts, ood_counts = _count(_check(id_scores, "id_scores"), _check(ood_scores, "ood_scores"))
    generator = np.random.default_rng(seed)
    id_where, ood_where = (np.repeat(np.arange(len(values)), counts) for counts in (id_counts, ood_counts))
    drawn = []
    for _ in range(resamples):
        counts = [_resample(where, len(values), generator) for where in (id_where, ood_where)]
        drawn.append(_areas_and_rates(*counts) | (_precisions(*counts) if aupr else {}))
    outside = (1.0 - confidence) / 2.0
    intervals = {}
    for name in drawn[0]:
        low, high = np.quantile([one[name] for one in drawn], [outside, 1.0 - outside])
        intervals[name] = Interval(float(low), float(high))
    return intervals


def roc_curve(id_scores: ArrayLike, ood_scores: ArrayLike, *, max_points: int | None = None) -> RocCurve:
    """Compute the ROC curve, with one point per distinct score.

    Args:
        id_scores: Scores of in-distribution examples, shape (N,); higher = more OOD.
        ood_scores: Scores of out-of-distribution examples, shape (M,).
        max_points: Keep at most this many points, including both ends, for a plot; None keeps all.
    """
    if max_points is not None and max_points < 2:
        raise InputError(f"Expected `max_points` to be None or at least 2, but got {max_points!r}.")
    inliers, outliers = _check(id_scores, "id_scores"), _check(ood_scores, "ood_scores")
    values, id_counts, ood_counts = _count(inliers, outliers)
    thresholds = np.concatenate([[-np.inf], values])
    id_kept = np.concatenate([[0], np.cumsum(id_counts)]) / len(inliers)
    ood_kept = np.concatenate([[0], np.cumsum(ood_counts)]) / len(outliers)
    if max_points is not None and len(thresholds) > max_points:
        # Evenly along the curve's length rather than the scores, so that a steep start keeps its points.
        along = id_kept + ood_kept
        places = np.searchsorted(along, np.linspace(0.0, along[-1], max_points), side="left").clip(max=len(along) - 1)
        keep = np.unique(np.concatenate([[0], places[1:-1], [len(along) - 1]]))
        thresholds, id_kept, ood_kept = thresholds[keep], id_kept[keep], ood_kept[keep]
    return RocCurve(ood_kept, id_kept, thresholds)


def _count(inliers: Scores, outliers: Scores) -> tuple[Scores, Counts, Counts]:
    """Distinct scores in rising order, and the number of each kind at each."""
    values, where = np.unique(np.concatenate([inliers, outliers]), return_inverse=True)
    id_counts = np.bincount(where[: len(inliers)], minlength=len(values))
    ood_counts = np.bincount(where[len(inliers) :], minlength=len(values))
    return values, id_counts, ood_counts


def _resample(where: NDArray[np.int64], n_values: int, generator: np.random.Generator) -> Counts:
    return np.bincount(where[generator.integers(len(where), size=len(where))], minlength=n_values)


def _areas_and_rates(id_counts: Counts, ood_counts: Counts) -> dict[str, float]:
    """AUROC, TNR95, FPR95 and accuracy from the counts at each distinct score in rising order.

    Integers until the last division, so ties and equal rates are exact.
    """
    id_below, ood_below = np.cumsum(id_counts), np.cumsum(ood_counts)
    n_id, n_ood = int(id_below[-1]), int(ood_below[-1])
    # Twice the number of (ID, OOD) pairs in the right order, ties once.
    pairs = int(np.dot(ood_counts, 2 * id_below - id_counts))
    kept = -(-_KEEP_PERCENT * n_id // 100)  # the smallest number of ID that is 95 %
    tnr95 = 100.0 * (n_ood - int(ood_below[np.searchsorted(id_below, kept)])) / n_ood
    # A threshold below every score keeps nothing: (0 + 1) / 2.
    gap = max(0, int(np.max(id_below * n_ood - ood_below * n_id)))
    return {
        "auroc": 100.0 * pairs / (2 * n_id * n_ood),
        "tnr95": tnr95,
        "fpr95": 100.0 - tnr95,
        "accuracy": 50.0 * (1.0 + gap / (n_id * n_ood)),
    }


def _precisions(id_counts: Counts, ood_counts: Counts) -> dict[str, float]:
    """AUPR of both classes: ID from the least unusual score up, OOD from the most unusual score down."""
    id_below, ood_below = np.cumsum(id_counts), np.cumsum(ood_counts)
    id_above, ood_above = np.cumsum(id_counts[::-1]), np.cumsum(ood_counts[::-1])
    return {
        "aupr_id": _average_precision(id_counts, id_below, id_below + ood_below),
        "aupr_ood": _average_precision(ood_counts[::-1], ood_above, id_above + ood_above),
    }


def _average_precision(hits: Counts, hits_so_far: Counts, all_so_far: Counts) -> float:
    # A resample can leave the first values empty: 0 / 0 at recall 0, with no weight.
    precision = hits_so_far / np.maximum(all_so_far, 1)
    return float(100.0 * np.dot(hits, precision) / hits_so_far[-1])


def _check(scores: ArrayLike, name: str) -> Scores:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 1 or len(array) == 0:
        raise InputError(f"Expected `{name}` to be a row of at least one score, but got shape {array.shape}.")
    if np.isnan(array).any():
        raise InputError(
            f"Expected `{name}` to hold numbers, but got {int(np.isnan(array).sum())} NaN. Check the model's inputs."
        )
    return array
