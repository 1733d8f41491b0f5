"""Runs the pieces of a run of experiments, one after the other or in parallel.

A piece is a case of an experiment, or one method of it. Pieces share only files, with locks: features, scores and
results. Pieces that measure time run last, alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

from neuralmean.bench import baselines
from neuralmean.bench.experiments.base import Case, Experiment
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench
from neuralmean.bench.results import Results
from neuralmean.errors import InputError
from neuralmean.models import allocator as memory

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Piece:
    """A unit of work: a case of an experiment with some or all of its methods."""

    experiment: Experiment
    case: Case
    methods: tuple[str, ...] | None = None

    def __str__(self) -> str:
        some = "" if self.methods is None else f", {', '.join(self.methods)}"
        return f"{self.experiment.name}: {self.case}{some}"


@dataclass(frozen=True)
class Settings:
    """The settings of a run, from which every process creates its own workbench."""

    data: Path
    weights: Path
    out: Path
    cache: Path
    limit: int | None = None
    seed: int = 0
    methods: tuple[str, ...] | None = None
    models: tuple[str, ...] = ()
    sets: tuple[tuple[str, Path], ...] = ()
    id_set: str | None = None
    again: bool = False

    def inputs(self) -> Inputs:
        """Return the chosen sets and models."""
        return Inputs(self.data, self.weights, chosen=self.models, sets=dict(self.sets), id_set=self.id_set)

    def workbench(self, inputs: Inputs) -> Workbench:
        """Return a workbench that writes to the results file."""
        return Workbench(
            inputs, Results(self.out), self.cache, limit=self.limit, seed=self.seed, methods=self.methods,
            again=self.again,
        )  # fmt: skip


def run_in_turn(pieces: Sequence[Piece], settings: Settings, inputs: Inputs, announce: Announce) -> None:
    """Run the pieces one after the other in this process."""
    for number, piece in enumerate(pieces, start=1):
        announce(f"{piece} ({number} of {len(pieces)})")
        _run(piece, settings, inputs)


def run_at_once(pieces: Sequence[Piece], settings: Settings, inputs: Inputs, announce: Announce, jobs: int) -> None:
    """Run the pieces in `jobs` processes, then, in this one, the pieces that must run alone."""
    quiet = [piece for piece in pieces if piece.experiment.alone]
    shared = [part for piece in pieces if not piece.experiment.alone for part in _by_method(piece, settings)]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # Spawned, as torch's threads do not survive a fork.
    with ProcessPoolExecutor(jobs, get_context("spawn"), initializer=_begin, initargs=(settings, threads)) as pool:
        waiting = {pool.submit(_work, piece): piece for piece in shared}
        try:
            for number, done in enumerate(as_completed(waiting), start=1):
                done.result()
                announce(f"{waiting[done]} ({number} of {len(shared)} done)")
        except BrokenProcessPool as error:
            raise InputError(
                "Expected every process of the run to finish, but the system ended one, perhaps for lack of memory. Run the "
                "same command again: it resumes where this one stopped; fewer `jobs` need less memory."
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    run_in_turn(quiet, settings, inputs, announce)


def _by_method(piece: Piece, settings: Settings) -> Iterator[Piece]:
    if not piece.experiment.by_method:
        yield piece
        return
    wanted = None if settings.methods is None else list(settings.methods)
    for method in baselines.resolve(wanted, piece.experiment.methods):
        yield replace(piece, methods=(method,))


def _run(piece: Piece, settings: Settings, inputs: Inputs) -> None:
    chosen = settings if piece.methods is None else replace(settings, methods=piece.methods)
    piece.experiment.run(chosen.workbench(inputs), piece.case)


_here: tuple[Settings, Inputs] | None = None  # of a worker process: sets and models are read once


def _begin(settings: Settings, threads: int) -> None:
    global _here
    memory.keep_freed()
    torch.set_num_threads(threads)
    _here = settings, settings.inputs()


def _work(piece: Piece) -> None:
    if _here is None:
        raise RuntimeError("a worker must be initialised first")
    _run(piece, *_here)
