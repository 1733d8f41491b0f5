"""`reference`, `fit`, `score` and `stream`: what the library does in one process, over many workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from neuralmean.artefact import Artefact
from neuralmean.detector import Detector
from neuralmean.distributed.chunks import CHUNK_SIZE, Chunk, Chunks
from neuralmean.distributed.engine import Cluster, Engine
from neuralmean.distributed.jobs import ChunkScores, Job, ReferenceJob, ScoreJob
from neuralmean.distributed.journal import Journal
from neuralmean.distributed.output import check_format, write_scores
from neuralmean.distributed.reading import Reading
from neuralmean.errors import InputError
from neuralmean.images import Unreadable
from neuralmean.layers import select_layers
from neuralmean.modelspec import resolve
from neuralmean.preprocessing import Preprocessing
from neuralmean.progress import track
from neuralmean.reference import Reference
from neuralmean.saving import from_artefact

KEPT_NOTES = 1000
BATCH_SIZE = 64

Model = str | nn.Module | Callable[[], nn.Module]


@dataclass
class ScoreRun:
    """What became of a scoring run.

    Attributes:
        n_images: Images in the output.
        n_ood: Those of them that were flagged.
        n_unreadable: Inputs that gave no image.
        n_resumed: Inputs that an earlier run had finished.
        unreadable: The first 1,000 inputs that gave no image, with the reason.
    """

    n_images: int = 0
    n_ood: int = 0
    n_unreadable: int = 0
    n_resumed: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)

    def count(self, scores: ChunkScores) -> ChunkScores:
        """Add a chunk to the counts and return it."""
        self.n_images += len(scores.names)
        self.n_ood += sum(scores.is_ood)
        self.n_unreadable += len(scores.unreadable)
        self.unreadable.extend(scores.unreadable[: KEPT_NOTES - len(self.unreadable)])
        return scores


def reference(
    model: Model,
    layers: str | Sequence[str] | None,
    sources: Any,
    *,
    preprocessing: Preprocessing | None = None,
    address: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: float = 0.0,
    batch_size: int = BATCH_SIZE,
    chunk_size: int = CHUNK_SIZE,
    column: str | None = None,
    on_unreadable: Callable[[Unreadable], None] | None = None,
) -> Reference:
    """Make the reference of all images in `sources`: what `Reference.from_data` does, over many workers.

    Workers send back the moments of their chunks, which are added up in the order of the chunks, so the result does not
    depend on how many workers there are or which is first. Memory does not grow with the data.

    Args:
        model: A spec (`"timm:resnet50"`), a model, or a function that makes one.
        layers: Dotted names or globs; None chooses as `Detector` does.
        sources: What `Chunks` takes: folders, files, globs, `.npz`, `.parquet`, `.tar`, or a `ray.data.Dataset`.
        preprocessing: What to do to the images; None takes what the spec says.
        address: An existing Ray cluster; None works on this machine.
        workers: How many; None fills the cluster, 0 works in this process without Ray.
        threads: Threads and CPUs of each worker.
        gpus: GPUs of each worker, also less than 1.
        batch_size: Images per forward pass.
        chunk_size: Images that are handed out together.
        column: The column of images in parquet files and datasets; None looks for one.
        on_unreadable: Called with each input that gives no image.
    """
    network, how = resolve_model(model, preprocessing)
    chosen = select_layers(network, layers)
    chunks = Chunks(sources, size=chunk_size, column=column)
    total = Reference.of_nothing(chosen)
    with make_engine(network, Cluster(address, workers, threads, gpus), [chunks]) as engine:
        job = ReferenceJob(chosen, Reading(how, batch_size))
        for _, result in results_of(engine, job, chunks, description="Reference"):
            total = total + result.reference
            for note in result.unreadable:
                if on_unreadable is not None:
                    on_unreadable(note)
    if not total.count:
        raise InputError("Expected `sources` to hold at least one image that can be read, but there is none.")
    return total


def score(
    artefact: str | Path,
    sources: Any,
    *,
    out: str | Path,
    model: Model | None = None,
    preprocessing: Preprocessing | None = None,
    address: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: float = 0.0,
    batch_size: int = BATCH_SIZE,
    chunk_size: int = CHUNK_SIZE,
    column: str | None = None,
    resume: bool = True,
) -> ScoreRun:
    """Score every image in `sources` into one file, each exactly once, in order; higher = more OOD.

    Finished chunks are noted beside the output, in `OUT.partial`. A run that was interrupted, or whose driver was killed,
    goes on from there when it is called again with the same detector, settings and sources; chunks whose inputs have
    changed are done again. The output appears when all is done, whole or not at all. An input that cannot be read has no
    row; it is counted and listed in what is returned. The other arguments are those of `reference`.

    Args:
        artefact: A saved detector.
        sources: What to score.
        out: Where to: `.jsonl`, `.csv` or `.parquet`; rows have path, score, p_value, is_ood.
        model: The model; None takes the spec in the saved file.
        preprocessing: What to do to the images; None takes what the saved file says.
        address: An existing Ray cluster; None works on this machine.
        workers: How many; None fills the cluster, 0 works in this process without Ray.
        threads: Threads and CPUs of each worker.
        gpus: GPUs of each worker.
        batch_size: Images per forward pass.
        chunk_size: Images that are handed out together.
        column: The column of images in parquet files and datasets.
        resume: Whether to go on from an earlier run.
    """
    target = Path(out)
    check_format(target)
    saved = Artefact.read(artefact)
    network, how = _from_header(saved, model, preprocessing)
    from_artefact(Detector, saved, network, str(artefact))  # whatever does not fit shows now and not in a worker
    chunks = Chunks(sources, size=chunk_size, column=column)
    cluster = Cluster(address, workers, threads, gpus)
    run_key = _digest([saved.header["digest"], how.to_json(), batch_size, chunk_size, threads, gpus > 0])
    journal = Journal(target.with_name(target.name + ".partial"), run_key, resume=resume)
    outcome = ScoreRun()
    with closing(journal), make_engine(network, cluster, [chunks]) as engine:
        job = ScoreJob(saved, str(artefact), Reading(how, batch_size))
        for chunk, result in results_of(engine, job, chunks, description="Scoring", journal=journal):
            journal.add(chunk, result)
        outcome.n_resumed = journal.n_resumed
        write_scores(target, map(outcome.count, journal.read()))
        journal.remove()
    return outcome


def stream(
    artefact: str | Path,
    sources: Any,
    *,
    model: Model | None = None,
    preprocessing: Preprocessing | None = None,
    address: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: float = 0.0,
    batch_size: int = BATCH_SIZE,
    chunk_size: int = CHUNK_SIZE,
    column: str | None = None,
) -> Iterator[ChunkScores]:
    """Yield the scores of `sources` chunk by chunk, in order, without a file; the arguments are those of `score`."""
    saved = Artefact.read(artefact)
    network, how = _from_header(saved, model, preprocessing)
    from_artefact(Detector, saved, network, str(artefact))
    chunks = Chunks(sources, size=chunk_size, column=column)
    with make_engine(network, Cluster(address, workers, threads, gpus), [chunks]) as engine:
        job = ScoreJob(saved, str(artefact), Reading(how, batch_size))
        for _, result in results_of(engine, job, chunks, description="Scoring"):
            yield result


def resolve_model(model: Model, preprocessing: Preprocessing | None) -> tuple[nn.Module, Preprocessing]:
    """Return the model and what its images need, from a spec, a model or a function that makes one."""
    if isinstance(model, str):
        resolved = resolve(model)
        network, preprocessing = resolved.model, preprocessing or resolved.preprocessing
    else:
        network = model if isinstance(model, nn.Module) else model()
    if not isinstance(network, nn.Module):
        raise InputError(f"Expected `model` to give a torch.nn.Module, but got {type(network).__name__}.")
    if preprocessing is None:
        raise InputError("Expected to know what the model's images need, but nobody says. Pass `preprocessing`.")
    return network, preprocessing


def make_engine(network: nn.Module, cluster: Cluster, sets: Sequence[Chunks]) -> Engine:
    """Return an engine that leaves Ray a CPU to read datasets with, where there are any."""
    return Engine(network, cluster, spare_cpus=1 if any(chunks.is_dataset for chunks in sets) else 0)


def results_of(
    engine: Engine, job: Job, chunks: Chunks, *, description: str, journal: Journal | None = None
) -> Iterator[tuple[Chunk, Any]]:
    """Yield every chunk that is not in the journal with its result, in order, with progress."""
    todo = iter(chunks) if journal is None else journal.unfinished(iter(chunks))
    total = None if chunks.is_dataset else chunks.count()
    return track(engine.run(job, todo), description=description, total=total, size=lambda pair: len(pair[0]))


def _from_header(saved: Artefact, model: Model | None, how: Preprocessing | None) -> tuple[nn.Module, Preprocessing]:
    """Return model and preprocessing, from the arguments or else from what the saved file says about itself."""
    info = saved.header.get("info")
    info = info if isinstance(info, dict) else {}
    if how is None and info.get("preprocessing") is not None:
        how = Preprocessing.from_json(info["preprocessing"])
    if model is not None:
        return resolve_model(model, how)
    spec, weights = info.get("model"), info.get("weights")
    if not isinstance(spec, str):
        raise InputError("Expected the saved file to name its model, but it does not. Pass `model`.")
    resolved = resolve(spec, weights=weights if isinstance(weights, str) else None, trusted=False)
    return resolve_model(resolved.model, how or resolved.preprocessing)


def _digest(values: Any) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()
