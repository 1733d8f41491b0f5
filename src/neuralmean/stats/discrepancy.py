"""The discrepancy vectors of the paper: pure functions of channel statistics and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from neuralmean.errors import InputError, NotFittedError
from neuralmean.models.layers import Layer, column_names
from neuralmean.stats.moments import Moments

Statistic = Literal["mean", "variance", "both"]


class TrainingStatistics(Protocol):
    """Channel statistics of the training data."""

    @property
    def mean(self) -> Tensor:
        """Mean of each channel, shape (D,), float64."""

    @property
    def mean_single(self) -> Tensor:
        """The same in single precision."""

    @property
    def std(self) -> Tensor | None:
        """Standard deviation of each channel, shape (D,), float64; None if it is not known."""


def neural_mean_discrepancy(channel_means: Tensor, reference_mean: Tensor) -> Tensor:
    r"""Distance of each example's channel means from those of the training data.

    .. math::
        \mathrm{NMD}_c^l(x) = \mu[f_c^l(x)] - \mu[f_c^l(D_{tr})]

    (Dong et al., CVPR 2022, Eq. 5, for one example, or for a batch pooled by `pool_batch`.)

    Args:
        channel_means: Shape (N, D).
        reference_mean: Shape (D,).

    Returns:
        Signed discrepancies, shape (N, D), in the precision of `channel_means`.

    Example:
        >>> neural_mean_discrepancy(torch.tensor([[1.0, 5.0]]), torch.tensor([1.0, 2.0]))
        tensor([[0., 3.]])
    """
    return channel_means - reference_mean.to(channel_means.dtype)


def neural_variance_discrepancy(channel_variances: Tensor, reference_std: Tensor) -> Tensor:
    r"""Distance of each example's channel standard deviations from those of the training data.

    .. math::
        \mathrm{NVD}_c^l(x) = \sqrt{\sigma^2[f_c^l(x)]} - \sqrt{\sigma^2[f_c^l(D_{tr})]}

    (Dong et al., CVPR 2022, appendix on neural variance discrepancy.)

    Args:
        channel_variances: Shape (N, D).
        reference_std: Shape (D,).

    Example:
        >>> neural_variance_discrepancy(torch.tensor([[4.0]]), torch.tensor([1.5]))
        tensor([[0.5000]])
    """
    return channel_variances.sqrt() - reference_std.to(channel_variances.dtype)


def discrepancy(means: Tensor, variances: Tensor | None, reference: TrainingStatistics, statistic: Statistic) -> Tensor:
    """Return the (N, D) vectors of `statistic`; for `"both"` NMD and NVD concatenated, (N, 2 D)."""
    parts = []
    if statistic in ("mean", "both"):
        known = reference.mean_single if means.dtype is torch.float32 else reference.mean
        parts.append(neural_mean_discrepancy(means, known))
    if statistic in ("variance", "both"):
        if variances is None or reference.std is None:
            raise InputError(
                f"Expected a reference with standard deviations for `statistic={statistic!r}`, but it has none. "
                "Make it with `Reference.from_batchnorm` or `Reference.from_data`."
            )
        parts.append(neural_variance_discrepancy(variances, reference.std))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True, eq=False)
class Vectors:
    """Computes discrepancy vectors from channel statistics.

    Attributes:
        statistic: The statistic.
        reference: Channel statistics of the training data; None if unknown.
        scale: Moments of the vectors, by which those of `"both"` are standardised; None before `fit`.
    """

    statistic: Statistic
    reference: TrainingStatistics | None
    scale: Moments | None = None

    def __call__(self, means: Tensor, variances: Tensor | None) -> Tensor:
        """Return the vector of each input, shape (N, D), given its channel means and variances, (N, D) each."""
        if self.reference is None:
            raise NotFittedError(
                "The detector has no reference yet, as the model has no batch-norm buffers. Call `fit` first."
            )
        vector = discrepancy(means, variances, self.reference, self.statistic)
        if self.statistic != "both":
            return vector
        if self.scale is None:
            raise NotFittedError("`statistic='both'` is standardised on in-distribution data. Call `fit` first.")
        return ((vector - self.scale.mean) / scale_of(self.scale)).to(vector.dtype)


def scale_of(moments: Moments) -> Tensor:
    """Return the divisors that standardise columns with these moments, (D,).

    These are the deviations, with a lower bound so that a dead channel, which hardly varies, does not outweigh the others.
    """
    std = moments.std
    return std.clamp_min(1e-3 * std.mean()).clamp_min(1e-12)


def pool_batch(means: Tensor, variances: Tensor | None) -> tuple[Tensor, Tensor | None]:
    r"""Channel mean and variance of a batch taken as a whole: the paper's Eq. 3 for :math:`|I| > 1`.

    The mean over all examples and positions is the mean of the examples' means; the variance over all of them is the
    mean of the examples' variances plus the variance of their means.

    Returns:
        Means and variances of shape (1, D).
    """
    pooled = means.mean(dim=0, keepdim=True)
    if variances is None:
        return pooled, None
    return pooled, variances.mean(dim=0, keepdim=True) + means.var(dim=0, correction=0, keepdim=True)


def vector_names(layers: Sequence[Layer], statistic: Statistic) -> list[str]:
    """Name the columns of the vector: `"bn1[3]"` for NMD, `"bn1[3].std"` for NVD."""
    names = column_names(layers)
    deviations = [f"{name}.std" for name in names]
    return {"mean": names, "variance": deviations, "both": names + deviations}[statistic]


def vector_layers(layers: Sequence[Layer], statistic: Statistic) -> Tensor:
    """Return the index of the layer that each column of the vector belongs to, shape (D,) or (2 D,)."""
    index = torch.repeat_interleave(torch.arange(len(layers)), torch.tensor([layer.channels for layer in layers]))
    return torch.cat([index, index]) if statistic == "both" else index


def sum_by_layer(by_channel: Tensor, column_layers: Tensor, n_layers: int) -> Tensor:
    """Sum the columns of each layer, (N, D) to (N, L); `vector_layers` gives the layer of each column."""
    result = torch.zeros(len(by_channel), n_layers, dtype=by_channel.dtype)
    return result.index_add_(1, column_layers, by_channel)


def check_statistic(statistic: str) -> Statistic:
    """Return `statistic`, or raise unless it is one of the three."""
    if statistic not in get_args(Statistic):
        raise InputError(f"Expected `statistic` to be 'mean', 'variance' or 'both', but got {statistic!r}.")
    return statistic  # type: ignore[return-value]
