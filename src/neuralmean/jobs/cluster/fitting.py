"""`fit` over many workers: the reference from all the data, the rest from a bounded sample of rows.

A scorer and a threshold need vectors, not only moments. Rows are some thousand numbers each, so at most `max_rows`
of each set, chosen at random, are sent to the driver, and only those images are run.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from neuralmean.data.batch import Batch
from neuralmean.data.images import Unreadable
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.detector.fitting import warn_if_left_out, warn_if_weak
from neuralmean.detector.learnt import FitOptions, FitSetup, learn
from neuralmean.errors import InputError, NeuralMeanWarning
from neuralmean.jobs.cluster.api import Model, resolve_model
from neuralmean.jobs.cluster.chunks import CHUNK_SIZE
from neuralmean.jobs.cluster.engine import Cluster, Engine
from neuralmean.jobs.cluster.jobs import RowsJob
from neuralmean.jobs.cluster.reading import BATCH_SIZE, Batches, Reading
from neuralmean.jobs.cluster.work import Work, add_up, run_job, tell
from neuralmean.models.layers import Layer, has_running_mean, select_layers, unwrap
from neuralmean.recording.observer import ChannelStats, HeadChoice, Observer, PermuteBlocks, RotateSome

MAX_ROWS = 20_000


def fit(
    model: Model,
    id_data: Any,
    ood_data: Any = None,
    *,
    held_out: Any = None,
    layers: str | Sequence[str] | None = None,
    statistic: str = "mean",
    scorer: str | None = None,
    false_alarm_rate: float = 0.05,
    confidence: float | None = None,
    max_rows: int = MAX_ROWS,
    preprocessing: Preprocessing | None = None,
    address: str | None = None,
    workers: int | None = None,
    threads: int = 1,
    gpus: float = 0.0,
    batch_size: int = BATCH_SIZE,
    chunk_size: int = CHUNK_SIZE,
    column: str | None = None,
    on_unreadable: Callable[[Unreadable], None] | None = None,
) -> Detector:
    """Fit a detector as `Detector.fit` does, with images read and run by many workers.

    Without batch-norm buffers the reference comes from all of `id_data`, exactly. Scorer and threshold
    come from at most `max_rows` images of each set, chosen at random (seeded); a warning says so if that leaves some
    out. The driver needs memory for `3 * max_rows * channels` float32 (and as much again for `statistic="both"`).
    Without `held_out` no images are rotated: the threshold comes from a part of `id_data` kept aside.

    Args:
        model: A spec (`"timm:resnet50"`), a model, or a function that makes one.
        id_data: In-distribution images: folders, files, globs, `.npz`, `.parquet`, `.tar`, or a `ray.data.Dataset`.
        ood_data: Out-of-distribution images, in the same forms; without them a scorer that needs some gets crafted ones.
        held_out: In-distribution images that the model was not trained on, for the threshold.
        layers: Dotted names or globs; None chooses.
        statistic: `"mean"`, `"variance"` or `"both"`.
        scorer: Name of a scorer; None chooses the best one for the data.
        false_alarm_rate: Share of in-distribution images that may be flagged.
        confidence: Probability with which the rate holds for these held-out images; None if it should hold on average.
        max_rows: Maximum number of images of each set from which scorer and threshold are learnt.
        preprocessing: What to do to the images; None takes that of the spec.
        address: An existing Ray cluster; None works on this machine.
        workers: Number of workers; None fills the cluster, 0 works in this process without Ray.
        threads: Threads and CPUs of each worker.
        gpus: GPUs of each worker.
        batch_size: Images per forward pass.
        chunk_size: Images per chunk.
        column: The column of images in parquet files and datasets.
        on_unreadable: Called with each input that cannot be read.
    """
    work = Work(Cluster(address, workers, threads, gpus), batch_size, chunk_size, column)
    network, how = resolve_model(model, preprocessing)
    chosen, reading = select_layers(network, layers), work.reading(how)
    sets = [None if sources is None else _Images(work, sources, max_rows) for sources in (id_data, ood_data, held_out)]
    with work.engine(network, *(images.chunks for images in sets if images is not None)) as engine:
        office = _Office(network, engine, reading, _Once(on_unreadable))
        everything = None if _has_buffers(network, chosen) else work.chunks(id_data)
        given = None if everything is None else add_up(engine, chosen, reading, everything, office.on_unreadable)
        names = [layer.name for layer in chosen]
        detector = Detector(network, layers=names, statistic=statistic, scorer=scorer, reference=given)
        setup = _RemoteSetup(**vars(detector.setup), office=office)
        options = FitOptions(false_alarm_rate, early_exit=False, batch_size=batch_size, confidence=confidence)
        learnt, _ = learn(setup, sets[0], sets[1], sets[2], options)
    detector.adopt(learnt)
    warn_if_weak(learnt.source or "held_out", learnt.calibration)
    warn_if_left_out(learnt.scorer)
    return detector


class _Images:
    """A set of images for `Detector.fit`: it has a length, and the observer can read it."""

    batch_size = 1  # so that the detector, which counts batches, counts images

    def __init__(self, work: Work, sources: Any, max_rows: int) -> None:
        self.chunks = work.chunks(sources, sample=max_rows)
        self.total = work.chunks(sources).count
        self.max_rows = max_rows

    def __len__(self) -> int:
        return self.chunks.count()


class _Once:
    """Reports each unreadable input once, although images may be read twice."""

    def __init__(self, tell: Callable[[Unreadable], None] | None) -> None:
        self._tell, self._told = tell, set[str]()

    def __call__(self, note: Unreadable) -> None:
        if self._tell is not None and note.path not in self._told:
            self._told.add(note.path)
            self._tell(note)


@dataclass(frozen=True)
class _Office:
    """The driver of a fit: the model, the engine, how images are read, and who is told of unreadable ones."""

    model: nn.Module
    engine: Engine
    reading: Reading
    on_unreadable: _Once


class _RemoteObserver(Observer):
    """An observer whose statistics are computed by workers."""

    def __init__(self, office: _Office, layers: tuple[Layer, ...], *, variance: bool, head: HeadChoice) -> None:
        super().__init__(office.model, layers, variance=variance, head=head)
        self._office, self._variance = office, variance

    def observe_each(
        self, data: _Images, *, name: str, batch_size: int, augment: PermuteBlocks | RotateSome | None = None
    ) -> Iterator[tuple[ChannelStats, ChannelStats | None]]:
        """Yield the rows of each chunk of (a sample of) the images, and of the same images crafted; none are rotated."""
        total = data.total()
        if total > data.max_rows:
            warnings.warn(
                f"`{name}` has {total:,} images; scorer and threshold come from {data.max_rows:,} of them, chosen at random. "
                "Raise `max_rows` to use more, if memory allows.",
                NeuralMeanWarning,
                stacklevel=6,
            )
        self._find_head(data, name)
        crafted = isinstance(augment, PermuteBlocks)
        job = RowsJob(self.layers, self._office.reading, variance=self._variance, head=self.head, crafted=crafted)
        empty = True
        for _, result in run_job(self._office.engine, job, data.chunks, f"Reading {name}"):
            tell(self._office.on_unreadable, result.unreadable)
            if result.rows is not None:
                empty = False
                yield result.rows, result.crafted
        if empty:
            raise InputError(f"Expected `{name}` to hold at least one image that can be read, but there is none.")

    def count(self, data: _Images, batch_size: int) -> None:
        """Return None: the number of chunks of a sample is unknown until it is read."""

    def _find_head(self, data: _Images, name: str) -> None:
        """Find the layer that gives the logits, in this process, with the first readable images."""
        for chunk in data.chunks if self._head_is_open else ():
            for _, images in Batches(chunk.piece, self._office.reading):
                with torch.no_grad():
                    self.observe(Batch((images,)), name=name)
                return


@dataclass(frozen=True, eq=False)
class _RemoteSetup(FitSetup):
    """The setup of a detector that is fitted by workers."""

    office: _Office

    def observer(self, head: HeadChoice) -> Observer:
        """Return an observer that runs the model in the workers."""
        return _RemoteObserver(self.office, self.layers, variance=self.statistic != "mean", head=head)


def _has_buffers(model: nn.Module, layers: tuple[Layer, ...]) -> bool:
    core = unwrap(model)
    return all(has_running_mean(core.get_submodule(layer.name)) for layer in layers)
