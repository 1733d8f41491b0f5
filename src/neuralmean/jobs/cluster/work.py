"""Settings of the work in one value: the cluster, the chunks, how images are read; and the steps that all functions share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from neuralmean.data.images import Unreadable
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.data.progress import track
from neuralmean.jobs.cluster.chunks import CHUNK_SIZE, Chunk, Chunks
from neuralmean.jobs.cluster.engine import Cluster, Engine
from neuralmean.jobs.cluster.jobs import Job, ReferenceJob
from neuralmean.jobs.cluster.reading import BATCH_SIZE, Reading
from neuralmean.models.layers import Layer
from neuralmean.recording.reference import Reference


@dataclass(frozen=True)
class Work:
    """Settings that every function of this subpackage takes.

    Attributes:
        cluster: Where it runs.
        batch_size: Images per forward pass.
        chunk_size: Images per chunk.
        column: The column of images in parquet files and datasets; None looks for one.
    """

    cluster: Cluster
    batch_size: int = BATCH_SIZE
    chunk_size: int = CHUNK_SIZE
    column: str | None = None

    def chunks(self, sources: Any, *, sample: int | None = None) -> Chunks:
        """Cut sources into chunks."""
        return Chunks(sources, size=self.chunk_size, column=self.column, sample=sample)

    def reading(self, preprocessing: Preprocessing) -> Reading:
        """Return how images are read."""
        return Reading(preprocessing, self.batch_size)

    def engine(self, network: nn.Module, *sets: Chunks) -> Engine:
        """Return an engine for these sets; one CPU is left for Ray to read datasets, if there are any."""
        return Engine(network, self.cluster, spare_cpus=1 if any(chunks.is_dataset for chunks in sets) else 0)


def run_job(
    engine: Engine, job: Job, chunks: Chunks, description: str, *, todo: Iterator[Chunk] | None = None
) -> Iterator[tuple[Chunk, Any]]:
    """Yield every chunk, or those of `todo`, with its result, in order, with progress."""
    total = None if chunks.is_dataset else chunks.count()
    made = engine.run(job, iter(chunks) if todo is None else todo)
    return track(made, description=description, total=total, size=lambda pair: len(pair[0]))


def add_up(
    engine: Engine,
    layers: tuple[Layer, ...],
    reading: Reading,
    chunks: Chunks,
    on_unreadable: Callable[[Unreadable], None] | None,
) -> Reference:
    """Return the reference of all images: moments of the chunks, added in the order of the chunks."""
    total = Reference.empty(layers)
    for _, result in run_job(engine, ReferenceJob(layers, reading), chunks, "Reference"):
        total = total + result.reference
        tell(on_unreadable, result.unreadable)
    return total


def tell(on_unreadable: Callable[[Unreadable], None] | None, notes: Iterable[Unreadable]) -> None:
    """Report unreadable inputs, if there is a callback."""
    if on_unreadable is not None:
        for note in notes:
            on_unreadable(note)
