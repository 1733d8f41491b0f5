"""Ours-LR in every variant that the paper's text allows, for the experiment `readings`."""

from __future__ import annotations

from typing import Literal, cast

import torch
from torch import Tensor, nn

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.baselines.ours import PAPER
from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.layers import has_running_mean, select_layers
from neuralmean.recording.reference import Reference

Place = Literal["before", "after"]
Values = Literal["signed", "absolute"]


class Reading(Method):
    """A logistic regression on NMD, read before or after the norm, standardised or not, signed or absolute.

    A channel's mean after the norm is an affine function of the mean before it, so one recorded pass serves both.

    Args:
        place: Where the channel means are taken, relative to the batch norm.
        standardised: Whether each channel is scaled to unit deviation over the ID images.
        values: Whether the sign of the discrepancy is kept.
    """

    paper = PAPER
    reads = frozenset({"means"})
    uses_outliers = True

    def __init__(self, place: Place, standardised: bool, values: Values) -> None:
        self.place, self.standardised, self.values = place, standardised, values
        self.name = f"ours-lr-{place}-{'standardised' if standardised else 'raw'}-{values}"
        self.title = f"Ours-LR, {place} the norm, {'standardised' if standardised else 'raw'}, {values}"
        self._reference = self._factor = torch.zeros(0)
        self._centre = self._scale = self._weight = torch.zeros(0)

    def fit(self, context: Context) -> None:
        """Fit the regression on ID and OOD images."""
        from sklearn.linear_model import LogisticRegression

        if context.outliers is None:
            raise InputError(f"Expected OOD images to fit {self.name!r} on, but got none.")
        names = [layer.name for layer in select_layers(context.model)]
        self._reference = Reference.from_batchnorm(context.model, names).mean.double()
        self._factor = _norm_factor(context.model, names) if self.place == "after" else torch.ones(())
        inside, outside = (self._vectors(view.means) for view in (context.inliers, context.outliers))
        self._centre, self._scale = torch.zeros(()), torch.ones(())
        if self.standardised:
            self._centre, self._scale = inside.mean(dim=0), inside.std(dim=0).clamp_min(1e-12)
        rows = (torch.cat([inside, outside]) - self._centre) / self._scale
        target = torch.cat([torch.zeros(len(inside)), torch.ones(len(outside))])
        found = LogisticRegression(max_iter=300).fit(rows.numpy(), target.numpy())
        self._weight = torch.from_numpy(found.coef_[0]) / self._scale

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        if not len(self._weight.shape) or not len(self._weight):
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return (self._vectors(examples.means) - self._centre) @ self._weight

    def _vectors(self, means: Tensor) -> Tensor:
        vectors = (means.double() - self._reference) * self._factor
        return vectors.abs() if self.values == "absolute" else vectors


def _norm_factor(model: nn.Module, names: list[str]) -> Tensor:
    """Return the factor by which batch norm scales the deviation of each watched channel from its running mean, (D,)."""
    factors = []
    for name in names:
        norm = model.get_submodule(name)
        if not has_running_mean(norm):
            raise InputError(f"Expected batch norms with running statistics, but {name!r} has none.")
        batch_norm = cast(nn.BatchNorm2d, norm)
        deviation = (cast(Tensor, batch_norm.running_var).double() + batch_norm.eps).sqrt()
        weight = 1.0 if batch_norm.weight is None else batch_norm.weight.detach().double()
        factors.append(weight / deviation)
    return torch.cat(factors)
