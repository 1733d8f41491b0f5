"""Mahalanobis distances at several layers (Lee et al., NeurIPS 2018, Eq. 1 to 3 and Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from neuralmean.bench.baselines.activations import Place, capturing, pooled, stages
from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.gaussians import Gaussians
from neuralmean.bench.baselines.perturbation import VALIDATION, Rows, batches_of, hold_out, quality, signs
from neuralmean.bench.models import TrainedModel
from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.layers import layer_slices

PAPER = "Lee et al., A Simple Unified Framework for Detecting Out-of-Distribution Samples, NeurIPS 2018"
STEPS = (0.0, 0.0005, 0.0014, 0.005)  # in images scaled to [0, 1]; four of the authors' seven values


class Mahalanobis(Method):
    r"""Scores an image by a logistic regression on its distances at the stem and at the end of every stage.

    .. math::
        M_l(x) = \max_c -(f_l(x) - \hat\mu_{l,c})^\top \hat\Sigma_l^{-1} (f_l(x) - \hat\mu_{l,c}), \quad
        \hat x_l = x + \epsilon \, \mathrm{sign}(\nabla_x M_l(x)), \quad s(x) = -\sum_l \alpha_l M_l(\hat x_l)

    :math:`f_l` is the mean over positions. The Gaussians are fitted on in-distribution images, step and weights on at
    most 100 others of each kind: the weights on one half, the step by TNR at 95 % TPR on the other half, then the
    weights again on both. All are drawn from the data of the protocol, so the classifier was trained on the ID images;
    the authors' code takes 1,000 of each kind from the test sets. A different draw of the 100 can change an AUROC by
    several points, which bootstrap intervals do not show. The layers are nearly the authors': see `stages`.
    """

    name = "mahalanobis"
    title = "Mahalanobis"
    paper = PAPER
    reads = frozenset({"images", "labels"})
    uses_outliers = True
    most_outliers = VALIDATION
    uses_gradients = True
    heavy = True

    def __init__(self) -> None:
        self.step = 0.0
        self._trained: TrainedModel | None = None
        self._places: list[Place] = []
        self._gaussians: list[Gaussians] = []
        self._weights = torch.zeros(0)
        self._offset = 0.0

    def fit(self, context: Context) -> None:
        """Fit the Gaussians, then tune step and weights on the validation part."""
        trained = self._trained = context.trained
        inliers, outliers = context.inliers, context.outliers
        if outliers is None:
            raise InputError(f"Expected OOD images to tune {self.name!r} on, but got none. Use 'mahalanobis-id'.")
        parts = hold_out(len(inliers), seed=context.seed, share=0.2)
        self._places = stages(trained.model, next(batches_of(trained, inliers, parts.rest[:1])))
        with torch.no_grad(), capturing(trained.model, self._places, stop=True) as run:
            rows = [
                [pooled(activation).cpu() for activation in run(batch)]
                for batch in batches_of(trained, inliers, parts.rest)
            ]
        labels = inliers.labels[torch.from_numpy(parts.rest)]
        self._gaussians = [Gaussians.of(torch.cat(features), labels) for features in zip(*rows, strict=True)]
        chosen = (parts.validation, hold_out(len(outliers), seed=context.seed, share=1.0).validation)
        grids = [
            self._distances(batches_of(trained, view, part), STEPS)
            for view, part in zip((inliers, outliers), chosen, strict=True)
        ]
        self._tune(grids[0], grids[1])

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if self._trained is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        distances = self._distances(examples.batches(), (self.step,))[0]
        return distances @ self._weights + self._offset

    def suits(self, trained: TrainedModel) -> bool:
        """Whether the model has classes."""
        return trained.num_classes > 0

    def _tune(self, inliers: Tensor, outliers: Tensor) -> None:
        """Choose step and weights from the distances for every step, (S, N, L) and (S, M, L)."""
        halves = [slice(None, None, 2), slice(1, None, 2)]
        if min(inliers.shape[1], outliers.shape[1]) < 4:
            halves = [slice(None), slice(None)]  # too few to split
        found = []
        for near, far in zip(inliers, outliers, strict=True):
            weights, _ = logistic(near[halves[0]], far[halves[0]])
            found.append(quality(near[halves[1]] @ weights, far[halves[1]] @ weights))
        best = max(range(len(found)), key=found.__getitem__)
        self.step = STEPS[best]
        self._weights, self._offset = logistic(inliers[best], outliers[best])

    def _distances(self, batches: Iterable[Tensor], steps: tuple[float, ...]) -> Tensor:
        """Distances at each layer after each step, shape (S, N, L)."""
        return torch.cat([self._of_batch(batch, steps) for batch in batches], dim=1).cpu()

    def _of_batch(self, batch: Tensor, steps: tuple[float, ...]) -> Tensor:
        if self._trained is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        model, std = self._trained.model, self._trained.std
        found = torch.zeros(len(steps), len(batch), len(self._places), dtype=torch.float64, device=batch.device)
        with torch.no_grad(), capturing(model, self._places, stop=True) as run:
            plain = [gauss.distances(pooled(one)) for gauss, one in zip(self._gaussians, run(batch), strict=True)]
        for layer, (place, gauss) in enumerate(zip(self._places, self._gaussians, strict=True)):
            found[:, :, layer] = plain[layer]
            if not any(steps):
                continue
            with capturing(model, [place], stop=True) as run:
                direction = signs(batch, lambda images, g=gauss, r=run: g.distances(pooled(r(images)[0])), std)  # type: ignore[misc]
                with torch.no_grad():
                    for number, step in enumerate(steps):
                        if step:
                            found[number, :, layer] = gauss.distances(pooled(run(batch - step * direction)[0]))
        return found


class MahalanobisId(Method):
    r"""The same distances without OOD images: every recorded layer, equal weights, no step.

    .. math::
        s(x) = \frac1L \sum_l \frac{-M_l(x) - m_l}{s_l}

    with mean :math:`m_l` and standard deviation :math:`s_l` of the distances of in-distribution images held out from
    the Gaussians. Not in the paper, which tunes on OOD images; features are the recorded channel means.
    """

    name = "mahalanobis-id"
    title = "Mahalanobis (ID only)"
    paper = PAPER
    reads = frozenset({"means", "labels"})

    def __init__(self) -> None:
        self._gaussians: list[Gaussians] = []
        self._centre = self._scale = torch.zeros(0)

    def fit(self, context: Context) -> None:
        """Fit the Gaussians on four fifths of the images and the scale of the distances on the rest."""
        view = context.inliers
        parts = hold_out(len(view), seed=context.seed, share=0.2, most=len(view))
        rest = parts.rest if len(parts.rest) else parts.validation
        means, labels = view.means, view.labels[torch.from_numpy(rest)]
        columns = [means[torch.from_numpy(rest)][:, part] for part in layer_slices(view.layers).values()]
        self._gaussians = [Gaussians.of(features, labels) for features in columns]
        held = self._distances(view, parts.validation)
        self._centre, self._scale = held.mean(dim=0), held.std(dim=0, correction=0).clamp_min(1e-12)

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if not self._gaussians:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return ((self._distances(examples, None) - self._centre) / self._scale).mean(dim=1)

    def suits(self, trained: TrainedModel) -> bool:
        """Whether the model has classes."""
        return trained.num_classes > 0

    def _distances(self, view: View, rows: Rows | None) -> Tensor:
        """Distances at each layer, shape (N, L)."""
        means = view.means if rows is None else view.means[torch.from_numpy(rows)]
        parts = layer_slices(view.layers).values()
        pairs = zip(self._gaussians, parts, strict=True)
        return torch.stack([gauss.distances(means[:, part]) for gauss, part in pairs], dim=1)


def logistic(inliers: Tensor, outliers: Tensor) -> tuple[Tensor, float]:
    """Weights (L,) and offset of a logistic regression between two sets of distances, (N, L) and (M, L)."""
    from sklearn.linear_model import LogisticRegression

    rows = torch.cat([inliers, outliers])
    centre, scale = rows.mean(dim=0), rows.std(dim=0, correction=0).clamp_min(1e-12)
    target = np.r_[np.zeros(len(inliers)), np.ones(len(outliers))]
    found = LogisticRegression(class_weight="balanced", max_iter=1000).fit(((rows - centre) / scale).numpy(), target)
    weights = torch.from_numpy(found.coef_[0]) / scale
    return weights, float(found.intercept_[0]) - float(weights @ centre)
