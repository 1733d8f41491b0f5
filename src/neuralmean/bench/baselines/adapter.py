"""Shared code of the methods that wrap a detector of pytorch-ood.

pytorch-ood is optional (extra `bench`) and imported on first use. Its detectors get copies of cached tensors and never
the model, so that they can change neither. Scores keep their sign: higher = more OOD.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.heads import LinearHead, read_head
from neuralmean.bench.baselines.perturbation import hold_out
from neuralmean.errors import MissingExtraError, NotFittedError
from neuralmean.stats.metrics import evaluate

TUNED_ON = 1000  # most images of each kind


def detector_class(name: str) -> Any:
    """Return a class of `pytorch_ood.detector` by its name.

    Raises:
        MissingExtraError: pytorch-ood is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchvision warns about image codecs that are not used here
            detectors = importlib.import_module("pytorch_ood.detector")
    except ImportError:
        raise MissingExtraError(
            "This method needs the 'pytorch-ood' package. Install it with `pip install neuralmean[bench]`."
        ) from None
    return getattr(detectors, name)


class FeatureDetector(Method):
    """Base of methods whose detector takes penultimate features, (N, F). A subclass implements `make`."""

    reads = frozenset({"feature"})

    def __init__(self) -> None:
        self._detector: Any = None

    def make(self, context: Context) -> Any:
        """Return the detector, not yet fitted."""
        raise NotImplementedError

    def fit(self, context: Context) -> None:
        """Fit the detector on the features of the inliers."""
        feature = context.inliers.feature.clone()
        # pytorch-ood marks outliers by negative labels; these detectors use labels for nothing else.
        self._detector = self.make(context).fit_features(feature, torch.zeros(len(feature), dtype=torch.int64))

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        scores: Tensor = self._fitted().predict_features(examples.feature.clone())
        return scores

    def _fitted(self) -> Any:
        if self._detector is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return self._detector


class ShapedFeature(Method):
    """Base of methods that shape the penultimate feature and score the energy of the resulting logits.

    All have one parameter, a share of activations. As their authors do, it is chosen by validation: by AUROC on at most
    1,000 images of each kind, drawn from the data of the protocol; in the zero-shot protocol, outliers are crafted from
    ID images.

    Attributes:
        detector: Name of pytorch-ood's class, which is given each feature as a feature map of one pixel.
        percentiles: The candidate values of the parameter.
        usual: The parameter if there are no outliers to validate with.
        prunes: Whether the parameter is a share of each feature to drop, of which some must remain; otherwise it is a
            percentile of the activations of all inliers.
        percentile: The chosen value.
    """

    detector: str
    percentiles: tuple[float, ...]
    usual: float
    prunes: bool = True
    percentile: float
    reads = frozenset({"feature"})
    uses_outliers = True
    most_inliers: int | None = TUNED_ON
    most_outliers = TUNED_ON
    version = 2

    def __init__(self) -> None:
        self._detector: Any = None

    def fit(self, context: Context) -> None:
        """Read the head and choose the parameter."""
        head, self.percentile = read_head(context.trained), self.usual
        inliers = None if self.prunes else _as_maps(context.inliers.feature)
        if context.outliers is not None:
            views = (context.inliers, context.outliers)
            parts = [hold_out(len(view), seed=context.seed, most=TUNED_ON, share=1.0).validation for view in views]
            inside, outside = (_as_maps(view.take(rows).feature) for view, rows in zip(views, parts, strict=True))

            def quality(percentile: float) -> float:
                score = self._make(head, percentile, inliers).predict_feature_maps
                return evaluate(score(inside).numpy(), score(outside).numpy()).auroc

            self.percentile = max(self.percentiles, key=quality)
        self._detector = self._make(head, self.percentile, inliers)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._detector is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        scores: Tensor = self._detector.predict_feature_maps(_as_maps(examples.feature))
        return scores

    def _make(self, head: LinearHead, percentile: float, inliers: Tensor | None) -> Any:
        """Return the detector with a given parameter; its threshold, if it has one, comes from the inliers."""
        share = at_most(percentile, head.weight.shape[1]) if self.prunes else percentile
        detector = detector_class(self.detector)(None, lambda maps: head(maps.flatten(1)), percentile=share)
        if inliers is not None:
            detector.fit_feature_maps(inliers, torch.zeros(len(inliers), dtype=torch.int64))
        return detector


def at_most(share: float, width: int) -> float:
    """Return the share of activations to drop, limited so that at least one is kept.

    Example:
        >>> at_most(0.95, 64), at_most(0.95, 4)
        (0.95, 0.75)
    """
    return min(share, 1 - 1 / width)


def _as_maps(feature: Tensor) -> Tensor:
    """Return a copy (N, F, 1, 1) in float64, with a tiny activation in all-zero features to avoid dividing by 0."""
    maps = feature.double().clone()
    maps[(maps == 0).all(dim=1)] = 1e-12
    return maps[:, :, None, None]
