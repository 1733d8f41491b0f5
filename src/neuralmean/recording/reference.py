"""The reference: mean and standard deviation of every channel over the training data.

It is read from batch-norm buffers, or computed in one pass over data with memory for the channels only.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from neuralmean.data.batch import count_batches, to_batches
from neuralmean.data.progress import track
from neuralmean.errors import InputError, NeuralMeanWarning
from neuralmean.models.layers import Layer, has_running_mean, select_layers, unwrap
from neuralmean.recording import Recorder
from neuralmean.recording.result import Recording
from neuralmean.stats.moments import Moments


@dataclass(frozen=True, eq=False)
class Reference:
    r"""Training mean and standard deviation of each watched channel.

    The mean is :math:`\mu[f_c^l(D_{tr})]` and the variance :math:`\sigma^2[f_c^l(D_{tr})]` of the paper (Eq. 4 and the
    appendix on NVD), over all examples and all positions, as batch norm keeps them. References computed from data store
    their moments and can be added: `reference_a + reference_b` is exactly the reference of both data sets together.

    Attributes:
        layers: The layers, in the order of the columns.
        mean: Shape (D,), float64.
        std: Shape (D,), float64, of all activations of the channel; None if variances were not recorded.
        moments: Moments of the examples' channel means, if made from data.
        within: Mean over the examples of the variance inside each, shape (D,), if made from data.
    """

    layers: tuple[Layer, ...]
    mean: Tensor
    std: Tensor | None
    moments: Moments | None = None
    within: Tensor | None = None

    @cached_property
    def mean_single(self) -> Tensor:
        """The mean in single precision, as most activations are."""
        return self.mean.float()

    @property
    def source(self) -> Literal["batchnorm", "data"]:
        """Where the reference comes from."""
        return "batchnorm" if self.moments is None else "data"

    @property
    def count(self) -> int | None:
        """Number of examples it was made from; None for batch-norm buffers."""
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
        all_ranks: bool = True,
    ) -> Reference:
        """Run the model once over `data` (the paper's Eq. 4); memory does not grow with the data.

        Inside a `torch.distributed` job each rank passes its own part of the data, possibly empty, and every rank gets the
        reference of all parts together, bit for bit the same. All ranks must call this, as with any collective; a
        rank that fails makes the others fail too rather than wait.

        Args:
            model: The trained model.
            layers: Dotted names or globs; None chooses as `Detector` does.
            data: Training data: a tensor, an array, a DataLoader, a Dataset or an iterable of batches.
            batch_size: Rows per batch if the data is one tensor, array, frame or dataset.
            all_ranks: Whether to combine the data of all ranks; False uses this rank's data only.
        """
        recorder = Recorder(model, select_layers(model, layers), variance=True)
        if not (all_ranks and _in_distributed_job()):
            return cls._pass(recorder, data, batch_size)
        try:
            own, failure = cls._pass(recorder, data, batch_size, may_be_empty=True), None
        except Exception as error:  # noqa: BLE001 - reported to the other ranks, then raised
            own, failure = cls.empty(recorder.layers), error
        return _add_ranks(own, failure)

    @classmethod
    def _pass(cls, recorder: Recorder, data: Any, batch_size: int, *, may_be_empty: bool = False) -> Reference:
        total = cls.empty(recorder.layers)
        steps = count_batches(data, batch_size=batch_size)
        if may_be_empty:
            data, steps = (_look_ahead(data, batch_size), None) if steps is None else (data, steps)
            if steps == 0 or data is None:
                return total
        with torch.no_grad():
            batches = to_batches(data, batch_size=batch_size)
            for batch in track(batches, description="Reference", total=steps, unit="batches"):
                total = total + cls.of_recording(recorder.layers, recorder(batch, name="data"))
        return total

    @classmethod
    def empty(cls, layers: Sequence[Layer]) -> Reference:
        """Return the reference of no examples: the neutral element of `+`."""
        width = sum(layer.channels for layer in layers)
        zeros = torch.zeros(width, dtype=torch.float64)
        return cls(tuple(layers), zeros, None, Moments.empty(width), zeros)

    @classmethod
    def of_recording(cls, layers: Sequence[Layer], recording: Recording) -> Reference:
        """Return the reference of the examples of one forward pass."""
        variances = None if recording.variance is None else recording.variance.cpu()
        return cls.of_statistics(layers, recording.mean.cpu(), variances)

    @classmethod
    def of_statistics(cls, layers: Sequence[Layer], means: Tensor, variances: Tensor | None) -> Reference:
        """Return the reference of examples, given their channel means and variances, each (N, D)."""
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


def _look_ahead(data: Any, batch_size: int) -> Any:
    """Return data of unknown length unchanged, or None if it is empty."""
    if isinstance(data, Dataset):
        data = DataLoader(data, batch_size=batch_size)
    if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
        return data
    batches = iter(data)
    first = next(batches, None)
    return None if first is None else chain([first], batches)


def _in_distributed_job() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _add_ranks(own: Reference, failure: Exception | None) -> Reference:
    """Return the sum of the references of all ranks, added in the order of the ranks so that all get the same bits."""
    moments = Moments.empty(0) if own.moments is None else own.moments
    within = torch.zeros_like(moments.mean) if own.within is None else own.within
    # Exchange widths and failures first, as exchanging vectors of different lengths would hang.
    heads = _gather(torch.tensor([failure is not None, len(moments.mean), moments.count], dtype=torch.float64))
    if failure is not None:
        raise failure
    broken = [rank for rank, head in enumerate(heads) if head[0]]
    if broken:
        raise InputError(f"Expected every rank to make its reference, but rank(s) {broken} failed. See their errors.")
    if any(head[1] != len(moments.mean) for head in heads):
        widths = [int(head[1]) for head in heads]
        raise InputError(f"Expected the same layers on every rank, but they have {widths} channels.")
    counts = [int(head[2]) for head in heads]
    if not sum(counts):
        raise InputError("Expected `data` to hold at least one example on some rank, but it is empty on all of them.")
    total = Reference.empty(own.layers)
    for count, (mean, m2, mean_within) in zip(
        counts, _gather(torch.stack([moments.mean, moments.m2, within])), strict=True
    ):
        if count:
            total = total + Reference._of(own.layers, Moments(count, mean, m2), mean_within)
    return total


def _gather(values: Tensor) -> list[Tensor]:
    """Return the `values` of every rank, in order, on the CPU."""
    distributed = torch.distributed
    device = torch.device("cuda", torch.cuda.current_device()) if distributed.get_backend() == "nccl" else "cpu"
    parts = [torch.empty_like(values, device=device) for _ in range(distributed.get_world_size())]
    distributed.all_gather(parts, values.to(device).contiguous())
    return [part.cpu() for part in parts]
