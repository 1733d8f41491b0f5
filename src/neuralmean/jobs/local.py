"""Scoring in this process: images in batches, rows out, with notes of what is done.

As batches are cut at the same places, a run that goes on ends like an undisturbed one, bit for bit. Memory does not grow.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from neuralmean.data.images import ImageBatches, Unreadable
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.data.progress import track
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError
from neuralmean.files.artefact import Artefact
from neuralmean.files.journal import Entry, Journal
from neuralmean.jobs.rows import FinishedPart, ScoreRow, write_rows


@dataclass
class Tally:
    """How many images were scored, flagged and not readable, and how many came from an earlier run."""

    scored: int = 0
    flagged: int = 0
    unreadable: int = 0
    skipped: int = 0
    resumed: int = 0

    def count(self, rows: Iterable[ScoreRow]) -> Iterator[ScoreRow]:
        """Pass rows on and count them."""
        for row in rows:
            self.scored += 1
            self.flagged += row.is_ood
            yield row


class CountedBatches(ImageBatches):
    """Image batches that know how many they are, for a progress bar with the time left."""

    def __len__(self) -> int:
        return (self.count() + self.batch_size - 1) // self.batch_size


def score_images(
    detector: Detector,
    preprocessing: Preprocessing,
    paths: Sequence[str],
    *,
    tally: Tally,
    batch_size: int = 64,
    workers: int | None = None,
    on_unreadable: Callable[[Unreadable], None] | None = None,
    skip: Callable[[str], bool] | None = None,
) -> Iterator[list[ScoreRow]]:
    """Yield the rows of the images that `paths` name, a batch at a time, in order."""
    batches = CountedBatches(
        paths, preprocessing, batch_size=batch_size, workers=workers, on_unreadable=on_unreadable, skip=skip
    )
    n_all = batches.count()
    for images, names in track(
        batches, description="Scoring", total=lambda: n_all - batches.n_left_out, size=lambda batch: len(batch.names)
    ):
        decision = detector.predict(images, batch_size=batch_size)
        columns = decision.score.tolist(), decision.p_value.tolist(), decision.is_ood.tolist()
        yield [ScoreRow(*row) for row in zip(names, *columns, strict=True)]
    tally.unreadable, tally.skipped = batches.n_unreadable, batches.n_skipped


class ScoreFile:
    """The output of one scoring run.

    Args:
        out: The file to write in the end.
        kind: One of `FORMATS`.
        artefact: The saved detector: scores of another one are not gone on with.
        settings: What else must be the same for a run to go on.
        resume: Whether to go on from an earlier run.
    """

    def __init__(self, out: Path, kind: str, *, artefact: Artefact, settings: Any, resume: bool) -> None:
        self.out, self.kind, self._resume = out, kind, resume
        key = json.dumps([artefact.header["digest"], settings], sort_keys=True)
        self._run = hashlib.sha256(key.encode()).hexdigest()

    def write(self, batches: Callable[[Callable[[str], bool] | None], Iterable[list[ScoreRow]]], tally: Tally) -> None:
        """Score what is not done yet, note each batch as it comes, then write the output.

        Args:
            batches: Called with a function that says which names to skip; gives the rows of the others.
            tally: Where to count.
        """
        with closing(Journal(self.out, self._run, resume=self._resume, refuse_others=True)) as journal:
            done = _Done(journal, journal.cut())
            for rows in batches(done.skip if done.waiting is not None else None):
                journal.add("batch", FinishedPart(rows, []).to_json())
            if done.waiting is not None:
                raise InputError(
                    f"Expected the inputs of the interrupted run, but {done.waiting!r} is not among them any more. "
                    "Leave out --resume to start again."
                )
            tally.resumed = done.count
            write_rows(self.out, self.kind, tally.count(_finished_rows(journal.entries())))
            journal.remove()


class _Done:
    """Says of each name, in the order of the inputs, whether it is done: done names come in that order too.

    Attributes:
        waiting: The next name that is done and has not been asked for; None when there is none left.
        count: How many names were skipped.
    """

    def __init__(self, journal: Journal, end: int) -> None:
        earlier = takewhile(lambda entry: entry.end <= end, journal.entries())
        self._names = (row.path for row in _finished_rows(earlier))
        self.waiting = next(self._names, None)
        self.count = 0

    def skip(self, name: str) -> bool:
        """Whether `name` is done."""
        if name != self.waiting:
            return False
        self.count += 1
        self.waiting = next(self._names, None)
        return True


def _finished_rows(entries: Iterable[Entry]) -> Iterator[ScoreRow]:
    return (row for entry in entries for row in FinishedPart.from_json(entry.content).rows)
