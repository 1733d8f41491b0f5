"""Turns data into channel statistics: runs the recorder over batches and keeps what scorers need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from neuralmean.data.augmentation import permute_blocks, rotate
from neuralmean.data.batch import Batch, check_input, count_batches, to_batches
from neuralmean.data.progress import track
from neuralmean.errors import InputError
from neuralmean.models.layers import Layer
from neuralmean.recording import Recorder, find_head
from neuralmean.recording.result import Exits


class _Find(Enum):
    HEAD = "find"


FIND_HEAD = _Find.HEAD  # as `head`: find the head in the first pass
HeadChoice = str | Literal[_Find.HEAD] | None


@dataclass(frozen=True)
class ChannelStats:
    """Channel statistics of N inputs, and the model's logits and feature if a scorer needs them."""

    means: Tensor  # (N, D)
    variances: Tensor | None = None  # (N, D)
    logits: Tensor | None = None  # (N, K)
    feature: Tensor | None = None  # (N, F)
    lengths: Tensor | None = None  # (N,), how many tokens each input has, padding left out

    def __len__(self) -> int:
        return len(self.means)

    def __getitem__(self, rows: Tensor | slice) -> ChannelStats:
        """Return some of the rows."""
        parts = (self.means, self.variances, self.logits, self.feature, self.lengths)
        return ChannelStats(*(None if part is None else part[rows] for part in parts))  # type: ignore[arg-type]

    @classmethod
    def cat(cls, rows: Sequence[ChannelStats]) -> ChannelStats:
        """Stack the rows of several batches, in order."""

        def stack(parts: list[Tensor | None]) -> Tensor | None:
            present = [part for part in parts if part is not None]
            return torch.cat(present) if present else None

        return cls(
            torch.cat([row.means for row in rows]),
            stack([row.variances for row in rows]),
            stack([row.logits for row in rows]),
            stack([row.feature for row in rows]),
            stack([row.lengths for row in rows]),
        )


class PermuteBlocks:
    """Crafts out-of-distribution images from a batch by permuting blocks."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, batch: Batch, name: str) -> Batch:
        """Return the images of `batch` with their blocks permuted."""
        if batch.kwargs or batch.images is not None:
            got = "keyword inputs" if batch.kwargs else "images of different sizes"
            raise InputError(
                f"Expected `{name}` to hold images of one size, to craft OOD examples from, but got {got}. Pass `ood_data`."
            )
        return Batch((permute_blocks(batch.first, generator=self._generator), *batch.args[1:]))


class RotateSome:
    """Makes images that the model has not memorised, by slightly rotating every `every`-th image.

    Attributes:
        origin: Index of the original of each rotated image.
    """

    def __init__(self, every: int) -> None:
        self._every, self._seen, self._generator = every, 0, torch.Generator().manual_seed(0)
        self.origin: list[int] = []

    def __call__(self, batch: Batch, name: str) -> Batch | None:
        """Return some images of `batch`, rotated; None if none is selected, or if the inputs are not images."""
        first, start = self._seen, -self._seen % self._every
        self._seen += len(batch)
        if batch.kwargs or batch.first.dim() != 4 or start >= len(batch):
            return None
        self.origin.extend(range(first + start, first + len(batch), self._every))
        images = rotate(batch.first[start :: self._every], generator=self._generator)
        return Batch((images, *batch.args[1:]))


class Observer:
    """Runs a model over data and returns `ChannelStats`.

    Args:
        model: The model.
        layers: The watched layers.
        variance: Whether to record variances.
        head: Name of the layer that gives the logits; `FIND_HEAD` finds it in the first pass; None if logits and
            feature are not needed.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], *, variance: bool, head: HeadChoice) -> None:
        self.layers = tuple(layers)
        self.recorder = Recorder(model, layers, variance=variance, head=None if head is FIND_HEAD else head)
        self._head_is_open = head is FIND_HEAD

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies and other processes: the recorder looks its modules up again.
        return self._maker(), (self.recorder.model,)

    def on(self, model: nn.Module) -> Observer:
        """Return an observer of the same layers in another copy of the model."""
        return self._maker()(model)

    def _maker(self) -> partial[Observer]:
        head = FIND_HEAD if self._head_is_open else self.recorder.head
        return partial(Observer, layers=self.layers, variance=self.recorder.variance, head=head)

    @property
    def head(self) -> str | None:
        """Name of the layer that gives the logits; None if there is none."""
        return self.recorder.head

    def observe(self, batch: Batch, *, name: str = "x", exits: Exits | None = None) -> tuple[Any, ChannelStats]:
        """Return the model's output for a batch and its channel statistics, after one forward pass.

        If `exits` stopped the pass, the output is None and the statistics are those of the first layers.

        Raises:
            InputError: An input gives NaN or infinite activations.
        """
        if self._head_is_open:
            check_input(batch, name, tokens=self.recorder.takes_tokens)
            self.recorder.head, self._head_is_open = find_head(self.recorder.model, batch, name=name), False
        recording = self.recorder(batch, name=name, exits=exits)
        means = recording.mean.cpu()
        variances = None if recording.variance is None else recording.variance.cpu()
        self._check_finite(means, name)
        logits = None if recording.logits is None else recording.logits.cpu()
        feature = None if recording.feature is None else recording.feature.cpu()
        return recording.output, ChannelStats(
            means, variances, logits, feature, batch.lengths if self.recorder.takes_tokens else None
        )

    def observe_all(self, data: Any, *, name: str, batch_size: int) -> ChannelStats:
        """Return the statistics of all of `data`."""
        return ChannelStats.cat([rows for rows, _ in self.observe_each(data, name=name, batch_size=batch_size)])

    def observe_each(
        self, data: Any, *, name: str, batch_size: int, augment: PermuteBlocks | RotateSome | None = None
    ) -> Iterator[tuple[ChannelStats, ChannelStats | None]]:
        """Yield the statistics of each batch of `data`, and of the images that `augment` makes from it, if any."""
        for batch in self._batches(data, name, batch_size):
            with torch.no_grad():
                made = (
                    None if augment is None else augment(batch, name)
                )  # before the pass: a model may modify its input
                rows = self.observe(batch, name=name)[1]
                more = None if made is None else self.observe(made, name=name)[1]
            yield rows, more

    def count(self, data: Any, batch_size: int) -> int | None:
        """Return how many times `observe_each` will yield, or None if that is unknown."""
        return count_batches(data, batch_size=batch_size)

    def _batches(self, data: Any, name: str, batch_size: int) -> Iterable[Batch]:
        steps = count_batches(data, batch_size=batch_size)
        batches = to_batches(data, name=name, batch_size=batch_size)
        return track(batches, description=f"Reading {name}", total=steps, unit="batches")

    def _check_finite(self, means: Tensor, name: str) -> None:
        if math.isfinite(means.sum().item()):  # one reduction; only an overflowing sum is inspected further
            return
        finite = torch.isfinite(means)
        bad = (~finite).nonzero()
        if not len(bad):
            return
        rows = sorted(set(bad[:, 0].tolist()))
        start, first = 0, ""
        for layer in self.layers:
            if not first and not finite[:, start : start + layer.channels].all():
                first = layer.name
            start += layer.channels
        raise InputError(
            f"Expected finite activations, but {len(rows)} of {len(means)} inputs in `{name}` (rows {rows[:5]}) give NaN or "
            f"Inf, first in layer {first!r}. Check these inputs for NaN or Inf, and their scale."
        )
