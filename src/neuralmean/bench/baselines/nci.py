"""Neural-collapse-inspired detection (Liu & Qin, CVPR 2025, Eq. 7)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from neuralmean.bench.baselines.adapter import TUNED_ON, detector_class
from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.heads import read_head
from neuralmean.bench.baselines.perturbation import hold_out
from neuralmean.errors import NotFittedError
from neuralmean.stats.metrics import evaluate

ALPHAS = (0.0, 0.0001, 0.001, 0.01, 0.1)
USUAL = 0.0001  # from the authors' configuration in OpenOOD


class Nci(Method):
    r"""Scores an image by how well its centred feature aligns with the weights of its class, and by the feature's norm.

    .. math::
        s(x) = -\frac{w_{\hat k} \cdot (h(x) - \mu)}{\lVert h(x) - \mu \rVert_2} - \alpha \lVert h(x) \rVert_1

    The authors choose :math:`\alpha` by validation. So does this if the protocol provides OOD images, by AUROC on at
    most 1,000 images of each kind; otherwise it is 0.0001.
    """

    name = "nci"
    title = "NCI"
    paper = "Liu & Qin, Detecting Out-of-Distribution through the Lens of Neural Collapse, CVPR 2025"
    reads = frozenset({"feature"})
    uses_outliers = True
    most_outliers = TUNED_ON

    def __init__(self) -> None:
        self.alpha = USUAL
        self._detector: Any = None

    def fit(self, context: Context) -> None:
        """Compute the mean of the inliers' features and choose the weight of the norm."""
        head, inliers = read_head(context.trained).as_module(), context.inliers.feature.clone()
        made = {alpha: detector_class("NCI")(None, head, alpha=alpha).fit_features(inliers) for alpha in ALPHAS}
        self.alpha = USUAL
        if context.outliers is not None:
            views = (context.inliers, context.outliers)
            parts = [hold_out(len(view), seed=context.seed, most=TUNED_ON, share=1.0).validation for view in views]
            near, far = (view.take(rows).feature.clone() for view, rows in zip(views, parts, strict=True))

            def quality(alpha: float) -> float:
                score = made[alpha].predict_features
                return evaluate(score(near).numpy(), score(far).numpy()).auroc

            self.alpha = max(ALPHAS, key=quality)
        self._detector = made[self.alpha]

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._detector is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        scores: Tensor = self._detector.predict_features(examples.feature.clone())
        return scores
