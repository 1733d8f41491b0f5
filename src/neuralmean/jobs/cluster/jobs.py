"""Jobs on a chunk: score it, compute its moments, or return its statistics. Each worker makes one object, once.

A job runs in the same way in this process and in a worker on another machine; only its result is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from neuralmean.data.augmentation import permute_blocks
from neuralmean.data.batch import Batch
from neuralmean.data.images import Unreadable
from neuralmean.detector.detector import Detector
from neuralmean.detector.saving import from_artefact
from neuralmean.files.artefact import Artefact
from neuralmean.jobs.cluster.chunks import Chunk
from neuralmean.jobs.cluster.reading import Batches, Reading
from neuralmean.jobs.rows import ScoreRow
from neuralmean.models.layers import Layer
from neuralmean.recording import Recorder
from neuralmean.recording.observer import ChannelStats, Observer
from neuralmean.recording.reference import Reference


class Job(Protocol):
    """A job that runs on a chunk."""

    reading: Reading

    def set_up(self, model: nn.Module) -> None:
        """Receive the model; called once, in the worker."""

    def run(self, chunk: Chunk, *, careful: bool = False) -> Any:
        """Run the chunk and return the result that is sent back."""


@dataclass(frozen=True)
class ChunkScores:
    """Scores of a chunk's images, in order, and the unreadable inputs; higher = more OOD."""

    names: list[str] = field(default_factory=list)
    score: list[float] = field(default_factory=list)
    p_value: list[float] = field(default_factory=list)
    is_ood: list[bool] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    unreadable: list[Unreadable] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.names) + len(self.unreadable)

    def rows(self) -> list[ScoreRow]:
        """The same, image by image."""
        return [
            ScoreRow(*row) for row in zip(self.names, self.score, self.p_value, self.is_ood, self.kind, strict=True)
        ]


class ScoreJob:
    """Scores images where they are read: vectors never leave the worker."""

    def __init__(self, artefact: Artefact, path: str, reading: Reading) -> None:
        self.reading = reading
        self._artefact, self._path = artefact, path
        self._detector: Detector | None = None

    def set_up(self, model: nn.Module) -> None:
        """Make the detector for the model."""
        self._detector = from_artefact(Detector, self._artefact, model, self._path)

    def run(self, chunk: Chunk, *, careful: bool = False) -> ChunkScores:
        """Score every image of the chunk; higher = more OOD."""
        result = ChunkScores()
        batches = Batches(chunk.piece, replace(self.reading, careful=careful))
        for names, images in batches:
            with torch.no_grad():
                _, decision = self._detector(images)  # type: ignore[misc]
            result.names.extend(names)
            result.score.extend(decision.score.tolist())
            result.p_value.extend(decision.p_value.tolist())
            result.is_ood.extend(decision.is_ood.tolist())
            result.kind.extend(decision.kind)
        result.unreadable.extend(batches.unreadable)
        return result


@dataclass(frozen=True)
class ChunkReference:
    """The reference of a chunk's images."""

    reference: Reference
    unreadable: list[Unreadable]
    size: int

    def __len__(self) -> int:
        return self.size


class ReferenceJob:
    """Computes the moments of images: some thousand numbers per chunk, whatever its size."""

    def __init__(self, layers: tuple[Layer, ...], reading: Reading) -> None:
        self.reading = reading
        self._layers = layers
        self._recorder: Recorder | None = None

    def set_up(self, model: nn.Module) -> None:
        """Receive the model."""
        self._recorder = Recorder(model, self._layers, variance=True)

    def run(self, chunk: Chunk, *, careful: bool = False) -> ChunkReference:
        """Return the reference of the chunk's images."""
        total = Reference.empty(self._layers)
        batches = Batches(chunk.piece, replace(self.reading, careful=careful))
        for _, images in batches:
            with torch.no_grad():
                recording = self._recorder(Batch((images,)), name="data")  # type: ignore[misc]
            total = total + Reference.of_recording(self._layers, recording)
        return ChunkReference(total, batches.unreadable, len(chunk))


@dataclass(frozen=True)
class ChunkRows:
    """Channel statistics of a chunk's images, and of the same images with their blocks permuted if requested."""

    rows: ChannelStats | None
    crafted: ChannelStats | None
    unreadable: list[Unreadable]
    size: int

    def __len__(self) -> int:
        return self.size


class RowsJob:
    """Returns the statistics themselves, for a fit that needs them; the caller bounds their number."""

    def __init__(
        self, layers: tuple[Layer, ...], reading: Reading, *, variance: bool, head: str | None, crafted: bool
    ) -> None:
        self.reading = reading
        self._layers, self._variance, self._head, self._crafted = layers, variance, head, crafted
        self._observer: Observer | None = None

    def set_up(self, model: nn.Module) -> None:
        """Receive the model."""
        self._observer = Observer(model, self._layers, variance=self._variance, head=self._head)

    def run(self, chunk: Chunk, *, careful: bool = False) -> ChunkRows:
        """Return the rows of the chunk's images; permutations depend on the chunk's number alone."""
        generator = torch.Generator().manual_seed(chunk.number)
        rows: list[ChannelStats] = []
        crafted: list[ChannelStats] = []
        batches = Batches(chunk.piece, replace(self.reading, careful=careful))
        with torch.no_grad():
            for _, images in batches:
                rows.append(self._observe(images))
                if self._crafted:
                    crafted.append(self._observe(permute_blocks(images, generator=generator)))
        return ChunkRows(
            ChannelStats.cat(rows) if rows else None,
            ChannelStats.cat(crafted) if crafted else None,
            batches.unreadable,
            len(chunk),
        )

    def _observe(self, images: torch.Tensor) -> ChannelStats:
        return self._observer.observe(Batch((images,)), name="data")[1]  # type: ignore[union-attr]
