r"""Early exit: detectors on the first layers, and one threshold for all of them together.

Each exit has its own scorer on the columns of the first layers. The cascade's score is that of the full scorer, on a
scale where in-distribution data ends at 0. If an exit's score exceeds what in-distribution data hardly ever reaches,
the excess is added to an offset above all ordinary scores, and the larger of the two scores counts.

.. math::
    S(x) = \max\Big( \frac{s(x) - q}{r},\ \max_{k:\, s_k(x) > q_k} b + \frac{s_k(x) - q_k}{r_k} \Big)

The threshold is the conformal one of :math:`S`, so the false-alarm rate holds for the whole cascade at once. The
maximum can only grow, so once an exit's term is above the threshold, the decision is certain. A forward pass stops when
the terms are above an even higher bar, given by `BAR_RATE`, so that stopped inputs also rank above nearly all
in-distribution ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from neuralmean.data.table import Blocks, parts_of
from neuralmean.errors import InputError
from neuralmean.models.layers import Layer
from neuralmean.scorers import Observation, Scorer, VectorScorer, make_scorer
from neuralmean.scorers.base import JSON
from neuralmean.scorers.contract import fit_scorer
from neuralmean.stats.calibration import Calibration, examples_needed
from neuralmean.stats.discrepancy import scale_of
from neuralmean.stats.moments import Moments

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector

NAME = "cascade"
SHARES = (1 / 8, 1 / 4, 1 / 2, 3 / 4)  # positions of the exits, as shares of the layers
FULL_RATE = 0.05  # share of in-distribution rows above the zero of the full scorer's term
EXIT_RATE = 0.00125  # share of in-distribution rows for which an exit's term counts
BAR_RATE = 0.005  # share of in-distribution rows that score above the bar at which a pass is stopped


class SpreadScorer(VectorScorer):
    r"""Scores an input by its mean deviation in units of the in-distribution deviation; learns from ID rows alone.

    .. math::
        s(x) = \frac{1}{D} \sum_c |x_c - m_c| / \sigma_c
    """

    name = "spread"
    learnt = ("mean_", "std_")

    mean_: Tensor
    std_: Tensor

    def fit(self, inliers: Tensor, outliers: Tensor | None = None) -> Self:
        """Learn the mean and deviation of each column."""
        moments = Moments.of_blocks(Blocks(inliers), inliers.shape[1])
        self.mean_, self.std_ = moments.mean.float(), scale_of(moments).float()
        return self

    def score(self, vectors: Tensor) -> Tensor:
        """Score each row of (N, D), shape (N,); higher = more OOD."""
        return ((vectors - self.mean_) / self.std_).abs().mean(dim=1)


class CascadeScorer(VectorScorer):
    """A full scorer and scorers of the first layers, combined by the largest excess; see the module's docstring.

    Args:
        scorer: Name of the full scorer.
        scorer_options: Its options.
        exit_scorer: Name of the exits' scorers: `"spread"`, or `"logistic"` if `fit` was given OOD rows.
        depths: Number of first layers that each exit reads, increasing.
        widths: Number of columns of those layers.
    """

    name = NAME
    options = ("scorer", "scorer_options", "exit_scorer", "depths", "widths")
    learnt = ("zero_", "unit_", "lift_")

    zero_: Tensor  # (exits + 1,), the full scorer's last
    unit_: Tensor  # (exits + 1,)
    lift_: Tensor  # (), the offset of an exit's excess

    def __init__(
        self,
        *,
        scorer: str = "average",
        scorer_options: Mapping[str, JSON] | None = None,
        exit_scorer: str = "spread",
        depths: Sequence[int] = (),
        widths: Sequence[int] = (),
    ) -> None:
        self.scorer, self.scorer_options, self.exit_scorer = scorer, dict(scorer_options or {}), exit_scorer
        self.depths, self.widths = _growing(depths, "depths"), _growing(widths, "widths")
        if len(self.depths) != len(self.widths):
            raise InputError(f"Expected as many `widths` as `depths`, but got {len(widths)} and {len(depths)}.")
        self.full: Scorer = make_scorer(scorer, self.scorer_options)
        self._take_over(self.full)
        self.exits = [_make_exit(exit_scorer) for _ in widths]

    @classmethod
    def around(cls, scorer: Scorer, layers: Sequence[Layer], *, repeated: Iterable[int] = ()) -> CascadeScorer:
        """Return a cascade whose last stage is `scorer`.

        Args:
            scorer: The full scorer, fitted or not.
            layers: The watched layers.
            repeated: Indices of layers that run more than once in a pass; there is no exit after the first of them.
        """
        scorer = full_of(scorer)
        end = min(repeated, default=len(layers))
        depths = sorted({depth for share in SHARES if 0 < (depth := round(share * len(layers))) <= end})
        depths = [depth for depth in depths if depth < len(layers)]
        if not depths:
            raise InputError(
                f"Expected a model with at least 2 watched layers for an early exit, each run once, but got {len(layers)}. "
                "Leave `early_exit` out."
            )
        made = cls(
            scorer=scorer.name if isinstance(scorer, VectorScorer) else "average",
            scorer_options=scorer.get_options() if isinstance(scorer, VectorScorer) else {},
            depths=depths,
            widths=widths_of(layers, depths),
        )
        made.full = scorer
        made._take_over(scorer)
        return made

    def _take_over(self, scorer: Scorer) -> None:
        self.needs = frozenset(getattr(scorer, "needs", ()))  # type: ignore[misc]
        self.uses_outliers = bool(getattr(scorer, "uses_outliers", False))  # type: ignore[misc]
        if hasattr(scorer, "score_batch"):
            self.score_batch = scorer.score_batch

    def fit(self, inliers: Any, outliers: Any = None) -> Self:
        """Fit the full scorer and the exits, and learn the scale of each on in-distribution data."""
        fit_scorer(self.full, _observed(inliers), None if outliers is None else _observed(outliers))
        rows, strange = _vector(inliers), None if outliers is None else _vector(outliers)
        self.exit_scorer = SpreadScorer.name if strange is None else "logistic"
        self.exits = [_make_exit(self.exit_scorer) for _ in self.widths]
        for scorer, width in zip(self.exits, self.widths, strict=True):
            scorer.fit(rows[:, :width], None if strange is None else strange[:, :width])
        blocks = (inliers[part] for part in parts_of(*rows.shape))
        stages = [torch.stack([*self._exit_scores(_vector(block)), self.full.score(block)]) for block in blocks]
        scores = torch.cat(stages, dim=1).detach().double()
        rates = [EXIT_RATE] * len(self.exits) + [FULL_RATE]
        ends = torch.stack([row.quantile(1 - rate) for row, rate in zip(scores, rates, strict=True)])
        units = (ends - scores.median(dim=1).values).clamp_min(1e-12)
        self.zero_, self.unit_ = ends.float(), units.float()
        self.forget_derived()
        self.lift_ = ((scores[-1].quantile(1 - BAR_RATE) - ends[-1]) / units[-1]).float()
        return self

    def score(self, vectors: Any) -> Tensor:
        """Score each row, shape (N,); higher = more OOD."""
        self.check_fitted()
        result = self._full_term(vectors)
        for index, scores in enumerate(self._exit_scores(_vector(vectors))):
            result = self._raise(result, index, scores - self.zero_[index])
        return result

    def score_after(self, so_far: Tensor | None, vectors: Any) -> Tensor:
        """Score each row, given the value of `after_exit` at the last exit."""
        full = self._full_term(vectors)
        return full if so_far is None else torch.maximum(full, so_far)

    def after_exit(self, so_far: Tensor | None, index: int, vectors: Tensor) -> Tensor | None:
        """Return the largest term up to exit `index`, (N,), -inf for a row without one; None as long as no row has one.

        Args:
            so_far: The value at the previous exit.
            index: Index of the exit.
            vectors: The first columns of the vector, (N, D').
        """
        scores = self.exits[index].score(vectors)
        # True of nearly every in-distribution input.
        if not len(scores) or scores.max().item() <= self._ends[index]:
            return so_far
        excess = scores - self.zero_[index]
        return self._raise(excess.new_full(excess.shape, -torch.inf) if so_far is None else so_far, index, excess)

    @cached_property
    def _ends(self) -> list[float]:
        return self.zero_.tolist()

    def _full_term(self, vectors: Any) -> Tensor:
        return (self.full.score(vectors) - self.zero_[-1]) / self.unit_[-1]

    def _exit_scores(self, vectors: Tensor) -> list[Tensor]:
        pairs = zip(self.exits, self.widths, strict=True)
        return [scorer.score(vectors[:, :width]) for scorer, width in pairs]

    def _raise(self, so_far: Tensor, index: int, excess: Tensor) -> Tensor:
        term = self.lift_ + excess / self.unit_[index]
        return torch.where(excess > 0, torch.maximum(so_far, term), so_far)

    def state(self) -> dict[str, Tensor]:
        """Return the learnt tensors by name, prefixed with the stage."""
        if not isinstance(self.full, VectorScorer):
            raise InputError(
                f"Expected a scorer that comes with neuralmean to save, but got {type(self.full).__name__}."
            )
        state = super().state()
        for prefix, scorer in (("full", self.full), *((f"exit{i}", exit_) for i, exit_ in enumerate(self.exits))):
            state |= {f"{prefix}.{name}": tensor for name, tensor in scorer.state().items()}
        return state

    def load_state(self, state: Mapping[str, Tensor]) -> Self:
        """Load what another cascade of the same kind has learnt."""
        super().load_state(state)
        if not isinstance(self.full, VectorScorer) or self.zero_.shape != (len(self.exits) + 1,):
            raise InputError(
                f"Expected the state of a cascade with {len(self.exits)} exits. Make it with the same options."
            )
        for prefix, scorer in (("full", self.full), *((f"exit{i}", exit_) for i, exit_ in enumerate(self.exits))):
            start = f"{prefix}."
            scorer.load_state({name[len(start) :]: value for name, value in state.items() if name.startswith(start)})
        return self


class ExitRun:
    """Follows one forward pass, decides when every row is certainly OOD, and scores the rows; the recorder's `Exits`.

    Args:
        cascade: The fitted cascade.
        reference_mean: Training mean of every channel, (D,), in single precision.
        bar: The score above which a pass is stopped.
    """

    def __init__(self, cascade: CascadeScorer, reference_mean: Tensor, bar: float) -> None:
        self._cascade, self._reference_mean, self._bar = cascade, reference_mean, bar
        self.scores: Tensor | None = None  # (N,) the largest term of the exits so far
        self.stopped = False
        self.needs = cascade.needs
        self._asked = 0  # exits

    @property
    def depths(self) -> Sequence[int]:
        """Number of first layers that each exit reads."""
        return self._cascade.depths

    def should_stop(self, index: int, means: Tensor) -> bool:
        """Return whether every row is above the bar, whatever the later layers give."""
        vectors = means.cpu() - self._reference_mean[: means.shape[1]]
        self.scores, self._asked = self._cascade.after_exit(self.scores, index, vectors), index + 1
        self.stopped = self.scores is not None and self.scores.min().item() > self._bar
        return self.stopped

    def score(self, vectors: Any) -> Tensor:
        """Score each row of the pass, shape (N,): equal to `CascadeScorer.score`, without evaluating the exits again."""
        if self._asked < len(self.depths):  # a compiled model has no exits
            return self._cascade.score(vectors)
        return self._cascade.score_after(self.scores, vectors)


def start_exit_run(detector: Detector) -> ExitRun | None:
    """Return a new run for a detector that was fitted with `early_exit`."""
    scorer = detector.scorer
    if not isinstance(scorer, CascadeScorer) or detector.reference is None or detector.calibration is None:
        return None
    return ExitRun(scorer, detector.reference.mean_single, bar_of(detector.calibration))


def bar_of(calibration: Calibration) -> float:
    """Return the score at which a pass is stopped: never below the threshold, and at most the largest held-out score."""
    rate = min(BAR_RATE, calibration.level)
    if len(calibration.scores) < examples_needed(rate):
        return calibration.scores[-1].item()
    return Calibration(calibration.scores, rate).threshold


def make(name: str, options: Mapping[str, JSON]) -> VectorScorer:
    """Return a new scorer by the name in a saved file, which may be a cascade."""
    return CascadeScorer(**dict(options)) if name == NAME else make_scorer(name, options)  # type: ignore[arg-type]


def full_of(scorer: Scorer) -> Scorer:
    """Return the full scorer of a cascade, or any other scorer unchanged."""
    return scorer.full if isinstance(scorer, CascadeScorer) else scorer


def widths_of(layers: Sequence[Layer], depths: Sequence[int]) -> list[int]:
    """Return the number of columns of the first layers, for each number of layers."""
    columns = list(accumulate(layer.channels for layer in layers))
    return [columns[depth - 1] for depth in depths]


def check_statistic(statistic: str) -> None:
    """Raise unless an early exit is possible with `statistic`."""
    if statistic != "mean":
        raise InputError(
            f"Expected `statistic='mean'` for an early exit, but got {statistic!r}. Leave `early_exit` out."
        )


def _growing(values: Sequence[int], name: str) -> list[int]:
    """Return the numbers, or raise unless they are few, integers and increasing, as they may come from a file."""
    found = list(values)[: len(SHARES) + 1]
    are_whole = all(type(value) is int for value in found)
    if len(values) > len(SHARES) or not are_whole or any(b <= a for a, b in pairwise((0, *found))):
        raise InputError(f"Expected `{name}` to be at most {len(SHARES)} increasing integers, but got {found}.")
    return found


def _vector(rows: Any) -> Tensor:
    vector: Tensor = rows.vector if isinstance(rows, Observation) else rows
    return vector


def _observed(rows: Any) -> Observation:
    return rows if isinstance(rows, Observation) else Observation(rows)


def _make_exit(name: str) -> VectorScorer:
    return SpreadScorer() if name == SpreadScorer.name else make_scorer(name)
