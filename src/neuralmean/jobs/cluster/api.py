"""`reference`, `fit`, `score` and `stream` over many workers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from neuralmean.data.images import Unreadable
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.detector.saving import from_artefact
from neuralmean.errors import InputError
from neuralmean.files.artefact import Artefact
from neuralmean.files.journal import Entry, Journal
from neuralmean.jobs.cluster.chunks import CHUNK_SIZE, Chunk
from neuralmean.jobs.cluster.engine import Cluster
from neuralmean.jobs.cluster.jobs import ChunkScores, ScoreJob
from neuralmean.jobs.cluster.reading import BATCH_SIZE
from neuralmean.jobs.cluster.work import Work, add_up, run_job, tell
from neuralmean.jobs.rows import FinishedPart, ScoreRow, format_of, write_rows
from neuralmean.models.layers import select_layers
from neuralmean.models.spec import resolve
from neuralmean.recording.reference import Reference

KEPT_NOTES = 1000

Model = str | nn.Module | Callable[[], nn.Module]


@dataclass
class ScoreRun:
    """The result of a scoring run.

    Attributes:
        n_images: Images in the output.
        n_ood: Flagged images.
        n_unreadable: Inputs that could not be read.
        n_resumed: Inputs that an earlier run had finished.
        unreadable: The first 1,000 inputs that could not be read, with the reason.
    """

    n_images: int = 0
    n_ood: int = 0
    n_unreadable: int = 0
    n_resumed: int = 0
    unreadable: list[Unreadable] = field(default_factory=list)

    def count(self, entries: Iterable[Entry]) -> Iterator[ScoreRow]:
        """Count finished chunks and pass their rows on."""
        for entry in entries:
            rows, unreadable = FinishedPart.from_json(entry.content)
            self.n_images += len(rows)
            self.n_ood += sum(row.is_ood for row in rows)
            self.n_unreadable += len(unreadable)
            self.unreadable.extend(unreadable[: KEPT_NOTES - len(self.unreadable)])
            yield from rows


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
    """Compute the reference of all images in `sources`, as `Reference.from_data` does, over many workers.

    Workers send back the moments of their chunks, which are added in the order of the chunks, so the result does not
    depend on the number of workers or their timing. Memory does not grow with the data.

    Args:
        model: A spec (`"timm:resnet50"`), a model, or a function that makes one.
        layers: Dotted names or globs; None chooses as `Detector` does.
        sources: As for `Chunks`: folders, files, globs, `.npz`, `.parquet`, `.tar`, or a `ray.data.Dataset`.
        preprocessing: What to do to the images; None takes that of the spec.
        address: An existing Ray cluster; None works on this machine.
        workers: Number of workers; None fills the cluster, 0 works in this process without Ray.
        threads: Threads and CPUs of each worker.
        gpus: GPUs of each worker, also less than 1.
        batch_size: Images per forward pass.
        chunk_size: Images per chunk.
        column: The column of images in parquet files and datasets; None looks for one.
        on_unreadable: Called with each input that cannot be read.
    """
    work = Work(Cluster(address, workers, threads, gpus), batch_size, chunk_size, column)
    network, how = resolve_model(model, preprocessing)
    chosen, chunks = select_layers(network, layers), work.chunks(sources)
    with work.engine(network, chunks) as engine:
        total = add_up(engine, chosen, work.reading(how), chunks, on_unreadable)
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
    format: str | None = None,  # noqa: A002 - the usual name
    on_unreadable: Callable[[Unreadable], None] | None = None,
) -> ScoreRun:
    """Score every image in `sources` into one file, each exactly once, in order; higher = more OOD.

    Finished chunks are recorded next to the output, in `OUT.partial`. A run that was interrupted, or whose driver was killed,
    resumes from there when it is called again with the same detector, settings and sources; chunks whose inputs have
    changed run again. The output is written at the end, whole or not at all. An input that cannot be read has no
    row; it is counted and listed in the result. The other arguments are those of `reference`.

    Args:
        artefact: A saved detector.
        sources: What to score.
        out: File to write: `.jsonl`, `.csv`, `.parquet` or, as a table, `.txt`; rows have path, score, p_value, is_ood, kind.
        model: The model; None takes the spec in the saved file.
        preprocessing: What to do to the images; None takes that of the saved file.
        address: An existing Ray cluster; None works on this machine.
        workers: Number of workers; None fills the cluster, 0 works in this process without Ray.
        threads: Threads and CPUs of each worker.
        gpus: GPUs of each worker.
        batch_size: Images per forward pass.
        chunk_size: Images per chunk.
        column: The column of images in parquet files and datasets.
        resume: Whether to resume an earlier run.
        format: `"json"` (one line per image), `"csv"`, `"parquet"` or `"table"`; None uses the ending of `out`.
        on_unreadable: Called with each input that cannot be read, except those of an earlier run.
    """
    target = Path(out)
    kind = format_of(target, format)
    work = Work(Cluster(address, workers, threads, gpus), batch_size, chunk_size, column)
    saved, network, how = _open(artefact, model, preprocessing)
    chunks = work.chunks(sources)
    run = _digest([saved.header["digest"], how.to_json(), batch_size, chunk_size, threads, gpus > 0])
    job = ScoreJob(saved, str(artefact), work.reading(how))
    outcome = ScoreRun()
    with closing(Journal(target, run, resume=resume)) as journal, work.engine(network, chunks) as engine:
        todo = _unfinished(journal, iter(chunks), outcome)
        for chunk, result in run_job(engine, job, chunks, "Scoring", todo=todo):
            journal.add(chunk.key, FinishedPart(list(result.rows()), list(result.unreadable)).to_json())
            tell(on_unreadable, result.unreadable)
        write_rows(target, kind, outcome.count(journal.entries()))
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
    on_unreadable: Callable[[Unreadable], None] | None = None,
) -> Iterator[ChunkScores]:
    """Yield the scores of `sources` chunk by chunk, in order, without a file; the arguments are those of `score`."""
    work = Work(Cluster(address, workers, threads, gpus), batch_size, chunk_size, column)
    saved, network, how = _open(artefact, model, preprocessing)
    chunks = work.chunks(sources)
    job = ScoreJob(saved, str(artefact), work.reading(how))
    with work.engine(network, chunks) as engine:
        for _, result in run_job(engine, job, chunks, "Scoring"):
            tell(on_unreadable, result.unreadable)
            yield result


def resolve_model(model: Model, preprocessing: Preprocessing | None) -> tuple[nn.Module, Preprocessing]:
    """Return the model and its preprocessing, from a spec, a model or a function that makes one."""
    if isinstance(model, str):
        resolved = resolve(model)
        network, preprocessing = resolved.model, preprocessing or resolved.preprocessing
    else:
        network = model if isinstance(model, nn.Module) else model()
    if not isinstance(network, nn.Module):
        raise InputError(f"Expected `model` to give a torch.nn.Module, but got {type(network).__name__}.")
    if preprocessing is None:
        raise InputError("Expected the preprocessing of the model's images, but it is unknown. Pass `preprocessing`.")
    return network, preprocessing


def _unfinished(journal: Journal, chunks: Iterator[Chunk], outcome: ScoreRun) -> Iterator[Chunk]:
    """Yield the chunks that are not in the journal, after dropping entries that no longer match."""
    pending, end = None, None
    for entry in journal.entries():
        pending = next(chunks, None)
        if pending is None or pending.key != entry.key:
            break
        outcome.n_resumed += len(pending)
        pending, end = None, entry.end
    journal.cut(journal.start if end is None else end)
    if pending is not None:
        yield pending
    yield from chunks


def _open(
    artefact: str | Path, model: Model | None, preprocessing: Preprocessing | None
) -> tuple[Artefact, nn.Module, Preprocessing]:
    """Return the content of a saved file, its model and its preprocessing, checked against each other."""
    saved = Artefact.read(artefact)
    network, how = _from_header(saved, model, preprocessing)
    from_artefact(Detector, saved, network, str(artefact))  # so that a mismatch is an error now rather than in a worker
    return saved, network, how


def _from_header(saved: Artefact, model: Model | None, how: Preprocessing | None) -> tuple[nn.Module, Preprocessing]:
    """Return model and preprocessing, from the arguments, or else from the saved file."""
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
