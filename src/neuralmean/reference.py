"""What the training data looks like to the model: mean and standard deviation of every channel.

Free from batch-norm buffers, or from one pass over data that needs memory for the channels only.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuralmean.data import count_batches, to_batches
from neuralmean.errors import InputError, NeuralMeanWarning
from neuralmean.layers import Layer, has_running_mean, select_layers, unwrap
from neuralmean.moments import Moments
from neuralmean.progress import track
from neuralmean.recorder import Recorder, Recording


@dataclass(frozen=True, eq=False)
class Reference:
    r"""Training mean and standard deviation of each watched channel.

    The mean is :math:`\mu[f_c^l(D_{tr})]` and the variance :math:`\sigma^2[f_c^l(D_{tr})]` of the paper (Eq. 4 and the
    appendix on NVD), over all examples and all positions, as batch norm keeps them. References made from data know
    their moments and add up: `reference_a + reference_b` is the reference of both data sets together, exactly.

    Attributes:
        layers: The layers, in the order of the columns.
        mean: Shape (D,), float64.
        std: Shape (D,), float64, of all activations of the channel; None if variances were not recorded.
        moments: Moments of the examples' channel means, where made from data.
        within: Mean over the examples of the variance inside each, shape (D,), where made from data.
    """

    layers: tuple[Layer, ...]
    mean: Tensor
    std: Tensor | None
    moments: Moments | None = None
    within: Tensor | None = None

    @property
    def source(self) -> Literal["batchnorm", "data"]:
        """Where the reference comes from."""
        return "batchnorm" if self.moments is None else "data"

    @property
    def count(self) -> int | None:
        """How many examples it was made from; None for batch-norm buffers."""
        return None if self.moments is None else self.moments.count

    @classmethod
    def from_batchnorm(cls, model: nn.Module, layers: str | Sequence[str] | None = None) -> Reference:
        """Read the running means and variances of batch-norm layers: no data needed (the paper's Eq. 7).

        Args:
            model: The trained model.
            layers: Dotted names or globs of batch norms with running statistics; None takes what `Detector` would.
        """
        core, chosen = unwrap(model), select_layers(model, layers)
        modules: list[Any] = [core.get_submodule(layer.name) for layer in chosen]
        for layer, module in zip(chosen, modules, strict=True):
            if not has_running_mean(module):
                raise InputError(
                    f"Expected batch norms with running statistics, but {layer.name!r} ({layer.kind}) has none. "
                    "Use `Reference.from_data`."
                )
        mean = torch.cat([module.running_mean.detach().cpu().double() for module in modules])
        variance = torch.cat([module.running_var.detach().cpu().double() for module in modules])
        if not mean.any() and (variance == 1).all():
            warnings.warn(
                "The batch-norm running means are all 0, as in a model that was never trained: load the trained weights, "
                "or pass `Reference.from_data`.",
                NeuralMeanWarning,
                stacklevel=2,
            )
        return cls(chosen, mean, variance.sqrt())

    @classmethod
    def from_data(
        cls,
        model: nn.Module,
        layers: str | Sequence[str] | None,
        data: Any,
        *,
        batch_size: int = 64,
    ) -> Reference:
        """Run the model once over `data` (the paper's Eq. 4); memory does not grow with the data.

        Args:
            model: The trained model.
            layers: Dotted names or globs; None chooses as `Detector` does.
            data: Training data: a tensor, an array, a DataLoader, a Dataset or an iterable of batches.
            batch_size: Rows per batch where `data` comes in one piece.
        """
        recorder = Recorder(model, select_layers(model, layers), variance=True)
        total = cls.of_nothing(recorder.layers)
        batches = to_batches(data, batch_size=batch_size)
        with torch.no_grad():
            steps = count_batches(data, batch_size=batch_size)
            for batch in track(batches, description="Reference", total=steps, unit="batches"):
                total = total + cls.of_recording(recorder.layers, recorder(batch, name="data"))
        return total

    @classmethod
    def of_nothing(cls, layers: Sequence[Layer]) -> Reference:
        """Return the reference of no example at all: the neutral element of `+`."""
        width = sum(layer.channels for layer in layers)
        zeros = torch.zeros(width, dtype=torch.float64)
        return cls(tuple(layers), zeros, None, Moments.empty(width), zeros)

    @classmethod
    def of_recording(cls, layers: Sequence[Layer], recording: Recording) -> Reference:
        """Return the reference of the examples of one forward pass."""
        variances = join_layers(recording.variances, layers) if recording.variances else None
        return cls.of_statistics(layers, join_layers(recording.means, layers), variances)

    @classmethod
    def of_statistics(cls, layers: Sequence[Layer], means: Tensor, variances: Tensor | None) -> Reference:
        """Return the reference of examples whose channel means and variances, each (N, D), are at hand."""
        moments = Moments.of(means)
        return cls._of(layers, moments, None if variances is None else Moments.of(variances).mean)

    @classmethod
    def _of(cls, layers: Sequence[Layer], moments: Moments, within: Tensor | None) -> Reference:
        std = None if within is None else (moments.variance + within).sqrt()
        return cls(tuple(layers), moments.mean, std, moments, within)

    def __add__(self, other: Reference) -> Reference:
        if not isinstance(other, Reference):
            return NotImplemented
        if self.layers != other.layers:
            raise InputError("Expected references of the same layers. Make both with the same model and `layers`.")
        if self.moments is None or other.moments is None:
            raise InputError(
                "Expected references made from data, but batch-norm buffers do not say how many examples they hold. "
                "Make both with `Reference.from_data`."
            )
        moments = self.moments + other.moments
        if moments.count == 0:
            return self
        within = None
        if self.within is not None and other.within is not None:
            within = self.within + (other.within - self.within) * (other.moments.count / moments.count)
        return Reference._of(self.layers, moments, within)


def join_layers(statistics: dict[str, Tensor], layers: Sequence[Layer]) -> Tensor:
    """Concatenate per-layer statistics to (N, D) in the order of `layers`."""
    return torch.cat([statistics[layer.name] for layer in layers], dim=1).cpu()
