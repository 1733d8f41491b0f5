"""1D: classes as one-dimensional subspaces of the feature space (Zaeemzadeh et al., CVPR 2021)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuralmean.bench.baselines.base import Context
from neuralmean.bench.baselines.finetune import NewHead
from neuralmean.bench.baselines.perturbation import batches_of, hold_out

MOST = 2000  # images from which the subspaces are estimated


class SubspaceHead(nn.Module):
    r"""Returns the logits :math:`|\cos(w_k, z)|` in training mode and the feature :math:`z` in evaluation mode.

    The class directions are orthonormal and fixed, as in the paper: the orthonormal directions closest to those of
        `head` (its polar factor), so that fine-tuning starts from the trained head.
    """

    weight: Tensor

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        u, _, v = torch.linalg.svd(head.weight.detach().double(), full_matrices=False)
        self.register_buffer("weight", F.normalize((u @ v).to(head.weight.dtype), dim=1))

    def forward(self, feature: Tensor) -> Tensor:
        """Map features (N, F) to (N, K) in training mode; return them unchanged in evaluation mode."""
        return F.linear(F.normalize(feature, dim=1), self.weight).abs() if self.training else feature


class OneDimensional(NewHead):
    r"""Scores an image by the angle between its feature and the closest class's first singular vector.

    .. math::
        L = -\log \frac{e^{|\cos\theta_y|}}{\sum_k e^{|\cos\theta_k|}}, \quad
        s(x) = \min_k \arccos \frac{|z^\top v_1^{(k)}|}{\|z\|}

    The paper trains from scratch and averages the angle over Monte Carlo samples of the weights; here a copy is
    fine-tuned, with a single sample.
    """

    name = "1d"
    title = "1D"
    paper = "Zaeemzadeh et al., Out-of-Distribution Detection Using Union of 1-Dimensional Subspaces, CVPR 2021"

    def __init__(self) -> None:
        super().__init__()
        self.most_inliers = max(MOST, self.budget.images)  # the images it is trained on are among them
        self._axes = torch.zeros(0)

    def new_head(self, old: nn.Linear) -> nn.Module:
        """Make the new layer from the old one."""
        return SubspaceHead(old)

    def fit(self, context: Context) -> None:
        """Train the copy, then estimate the subspace of each class."""
        super().fit(context)
        rows = hold_out(len(context.inliers), seed=context.seed, share=1.0, most=MOST).validation
        with torch.no_grad():
            batches = batches_of(context.trained, context.inliers, rows)
            features = torch.cat([self.network(batch) for batch in batches])
        self._axes = class_axes(features, context.inliers.labels[torch.from_numpy(rows)])

    def score_outputs(self, outputs: Tensor) -> Tensor:
        """Score features (N, F); higher = more OOD."""
        return angles(outputs, self._axes)


def class_axes(features: Tensor, labels: Tensor) -> Tensor:
    """First right singular vector of the features (N, F) of each class that occurs, shape (K, F), in float64."""
    labels = labels.to(features.device)
    parts = [features[labels == label].double() for label in torch.unique(labels)]
    return torch.stack([torch.linalg.svd(part, full_matrices=False)[2][0] for part in parts])


def angles(features: Tensor, axes: Tensor) -> Tensor:
    """Angle between features (N, F) and the closest of the axes (K, F), shape (N,), in radians."""
    cosines = (F.normalize(features.double(), dim=1) @ axes.T).abs().amax(dim=1)
    return torch.arccos(cosines.clamp(max=1.0))
