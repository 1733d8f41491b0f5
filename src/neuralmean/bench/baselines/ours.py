"""The library's scorers as methods: Ours-Avg, Ours-LR and Ours-MLP of the paper, and those beyond it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from neuralmean.bench.baselines.base import Context, Method, Read, View
from neuralmean.bench.models import TrainedModel
from neuralmean.errors import NotFittedError
from neuralmean.models.layers import average_tokens, has_running_mean, select_layers
from neuralmean.recording.reference import Reference
from neuralmean.scorers import SCORERS, Observation, Scorer, make_scorer
from neuralmean.scorers.base import JSON
from neuralmean.scorers.contract import fit_scorer, needs_of, score_rows
from neuralmean.stats.discrepancy import Statistic, discrepancy, scale_of
from neuralmean.stats.moments import Moments

PAPER = "Dong et al., Neural Mean Discrepancy for Efficient Out-of-Distribution Detection, CVPR 2022"
_TITLES = {
    "average": ("ours-avg", "Ours-Avg"),
    "logistic": ("ours-lr", "Ours-LR"),
    "mlp": ("ours-mlp", "Ours-MLP"),
    "typicality": ("typicality", "Typicality"),
    "guided": ("guided", "Guided"),
}


class NeuralMean(Method):
    """A scorer of the library on the discrepancy vector of one statistic.

    The reference is the batch-norm buffers if every watched layer has them (the paper's Eq. 7), otherwise the mean over
    the in-distribution images of the fit (Eq. 4). With buffers and a scorer that learns nothing, no image is used.

    Args:
        scorer: Name of a scorer, or a class of yours with `fit` and `score`, as for `Detector(scorer=...)`.
        statistic: `"mean"` (NMD), `"variance"` (NVD) or `"both"`, standardised and concatenated.
    """

    paper = PAPER

    def __init__(self, scorer: str | type[Scorer], *, statistic: Statistic = "mean") -> None:
        self._kind = scorer
        self._scorer = self._new(None)
        self._statistic = statistic
        if isinstance(scorer, str):
            name, title = _TITLES.get(scorer, (f"ours-{scorer}", f"Ours ({scorer})"))
        else:
            name, title = f"{scorer.__module__}:{scorer.__qualname__}", scorer.__name__
            self.defined_by = scorer
        self.name, self.title = name, title
        if statistic != "mean":
            suffix = {"variance": "nvd", "both": "nmd+nvd"}[statistic]
            self.name, self.title = f"{name}-{suffix}", f"{title} ({suffix.upper()})"
        needs = needs_of(self._scorer)
        reads: set[Read] = {"means"}
        reads |= {"variances"} if statistic != "mean" else set()
        reads |= {"logits"} if "logits" in needs else set()
        reads |= {"feature"} if "feature" in needs else set()
        self.reads = frozenset(reads)
        self.uses_outliers = bool(getattr(self._scorer, "uses_outliers", False))
        self._learns = statistic == "both" or bool(getattr(self._scorer, "learnt", True))
        self._reference: Reference | None = None
        self._scale: Moments | None = None

    @property
    def scorer(self) -> Scorer:
        """The scorer inside."""
        return self._scorer

    def fit(self, context: Context) -> None:
        """Fit the scorer on the vectors of the images."""
        self._reference = self._make_reference(context)
        self._scale = None
        if not self.learns_from_inliers(context.trained):
            return
        if self._statistic == "both":
            self._scale = Moments.of(self._raw(context.inliers))
        outliers = None if context.outliers is None else self._observe(context.outliers)
        known = getattr(self._scorer, "options", ())
        given: dict[str, JSON] = {"seed": context.seed, "tokens": average_tokens(context.inliers.layers)}
        self._scorer = self._new({name: value for name, value in given.items() if name in known})
        fit_scorer(self._scorer, self._observe(context.inliers), outliers)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        return score_rows(self._scorer, self._observe(examples))

    def learns_from_inliers(self, trained: TrainedModel) -> bool:
        """Whether `fit` uses in-distribution images, to learn or because there are no buffers."""
        return self._learns or _names_with_buffers(trained.model) is None

    def _new(self, options: Mapping[str, JSON] | None) -> Scorer:
        return make_scorer(self._kind, options) if isinstance(self._kind, str) else self._kind(**(options or {}))

    def _make_reference(self, context: Context) -> Reference:
        view, names = context.inliers, _names_with_buffers(context.model)
        if names is not None:
            return Reference.from_batchnorm(context.model, names)
        return Reference.of_statistics(view.layers, view.means, self._variances(view))

    def _variances(self, view: View) -> Tensor | None:
        return view.variances if "variances" in self.reads else None

    def _raw(self, view: View) -> Tensor:
        if self._reference is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return discrepancy(view.means, self._variances(view), self._reference, self._statistic)

    def _observe(self, view: View) -> Observation:
        vector = self._raw(view)
        if self._scale is not None:
            vector = ((vector - self._scale.mean) / scale_of(self._scale)).to(vector.dtype)
        output = view.logits if "logits" in self.reads else None
        feature = view.feature if "feature" in self.reads else None
        return Observation(vector, output, feature)


def _names_with_buffers(model: nn.Module) -> list[str] | None:
    """Names of the watched layers, or None if one of them has no running mean."""
    names = [layer.name for layer in select_layers(model)]
    return names if all(has_running_mean(model.get_submodule(name)) for name in names) else None


def scorers_known() -> list[str]:
    """Scorers of the library that the benchmark covers, in the order of the paper."""
    return [name for name in _TITLES if name in SCORERS]
