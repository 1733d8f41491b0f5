"""Scoring in this process: batches of images in, rows out, with a journal of finished batches.

Batches are always cut at the same places, so a resumed run gives bit for bit the result of an uninterrupted one, in
constant memory.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from neuralmean.data.images import ImageBatches, Unreadable
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.data.progress import track
from neuralmean.data.texts import TextBatches, Tokenize
from neuralmean.detector.decision import Decision
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError
from neuralmean.files.artefact import Artefact
from neuralmean.files.journal import Entry, Journal
from neuralmean.jobs.rows import FinishedPart, ScoreRow, write_rows
from neuralmean.stats.calibration import Calibration
from neuralmean.stats.false_flags import most_false_flags


@dataclass
class Tally:
    """Numbers of scored, flagged and unreadable images, and of those from an earlier run."""

    scored: int = 0
    flagged: int = 0
    unreadable: int = 0
    skipped: int = 0
    resumed: int = 0
    p_values: Counter[float] = field(default_factory=Counter)  # of n held-out scores at most n + 1 different ones

    def count(self, rows: Iterable[ScoreRow]) -> Iterator[ScoreRow]:
        """Pass rows on and count them."""
        for row in rows:
            self.scored += 1
            self.flagged += row.is_ood
            self.p_values[row.p_value] += 1
            yield row


def select_rows(rows: Callable[[], Iterable[ScoreRow]], fdr: float | None) -> Iterator[ScoreRow]:
    """Yield rows with `is_ood` set so that on average at most a share `fdr` of the flagged is in-distribution.

    Args:
        rows: Called twice, for the same rows.
        fdr: The share; None yields the rows unchanged.
    """
    if fdr is None:
        yield from rows()
        return
    counts = Counter(row.p_value for row in rows())
    p_values = np.array(sorted(counts))
    ranks = np.cumsum([counts[p_value] for p_value in p_values])
    chosen = np.flatnonzero(p_values * ranks[-1] <= fdr * ranks) if len(ranks) else np.empty(0, np.int64)
    level = p_values[chosen[-1]] if len(chosen) else -1.0
    for row in rows():
        yield row._replace(is_ood=bool(row.p_value <= level))


def describe_flags(tally: Tally, calibration: Calibration, *, confidence: float = 0.95) -> str | None:
    """Return a sentence with the maximum number of false flags; None if that is unknown or nothing is flagged.

    The bound holds for any choice of the smallest p-values, also one made after looking.
    """
    if not tally.flagged or not tally.p_values or calibration.group_of is not None:
        return None
    p_values = np.sort(np.repeat(list(tally.p_values), list(tally.p_values.values())))
    most = most_false_flags(p_values, len(calibration.scores), p_values[tally.flagged - 1], confidence)
    if most >= tally.flagged:
        return f"too few to exclude that all {tally.flagged} flags are false"
    return f"at most {most} of these {tally.flagged} flags are false, {100 * confidence:g} % sure"


class CountedBatches(ImageBatches):
    """Image batches with a length, for a progress bar with the time left."""

    def __len__(self) -> int:
        return (self.count() + self.batch_size - 1) // self.batch_size


class LabelledBatches(CountedBatches):
    """Image batches that record the group of each image: `labels`, in order, of the latest pass.

    Args:
        label: Gives the group of an image by its name.
        arguments: As for `CountedBatches`.
    """

    def __init__(self, label: Callable[[str], str], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._label = label
        self.labels: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        self.labels.clear()
        for batch in super().__iter__():
            self.labels.extend(map(self._label, batch.names))
            yield batch


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
    label: Callable[[str], str] | None = None,
) -> Iterator[list[ScoreRow]]:
    """Yield the rows of the images that `paths` name, a batch at a time, in order; `label` gives the group of each."""
    batches = CountedBatches(
        paths, preprocessing, batch_size=batch_size, workers=workers, on_unreadable=on_unreadable, skip=skip
    )
    n_all = batches.count()
    for images, names in track(
        batches, description="Scoring", total=lambda: n_all - batches.n_left_out, size=lambda batch: len(batch.names)
    ):
        groups = None if label is None else list(map(label, names))
        decision = detector.predict(images, groups=groups, batch_size=batch_size)
        yield _rows(names, decision)
    tally.unreadable, tally.skipped = batches.n_unreadable, batches.n_skipped


def score_texts(
    detector: Detector,
    tokenize: Tokenize,
    paths: Sequence[str],
    *,
    tally: Tally,
    batch_size: int = 64,
    on_unreadable: Callable[[str, str], None] | None = None,
    skip: Callable[[str], bool] | None = None,
) -> Iterator[list[ScoreRow]]:
    """Yield the rows of the texts in files, a batch at a time, in order."""
    batches = TextBatches(paths, tokenize, batch_size=batch_size, on_unreadable=on_unreadable, skip=skip)
    for inputs, names in track(
        batches, description="Scoring", total=batches.count, size=lambda batch: len(batch.names)
    ):
        yield _rows(names, detector.predict(inputs, batch_size=batch_size))
    tally.unreadable = batches.n_unreadable


def _rows(names: Sequence[str], decision: Decision) -> list[ScoreRow]:
    columns = decision.score.tolist(), decision.p_value.tolist(), decision.is_ood.tolist(), decision.kind
    return [ScoreRow(*row) for row in zip(names, *columns, strict=True)]


class ScoreFile:
    """The output of one scoring run.

    Args:
        out: The file to write at the end.
        kind: One of `FORMATS`.
        artefact: The saved detector; scores of another one are not continued.
        settings: Other settings that must be the same for a run to resume.
        resume: Whether to resume an earlier run.
    """

    def __init__(self, out: Path, kind: str, *, artefact: Artefact, settings: Any, resume: bool) -> None:
        self.out, self.kind, self._resume = out, kind, resume
        key = json.dumps([artefact.header["digest"], settings], sort_keys=True)
        self._run = hashlib.sha256(key.encode()).hexdigest()

    def write(
        self,
        batches: Callable[[Callable[[str], bool] | None], Iterable[list[ScoreRow]]],
        tally: Tally,
        fdr: float | None = None,
    ) -> None:
        """Score the remaining images, record each batch, then write the output.

        Args:
            batches: Called with a function that decides which names to skip; yields the rows of the others.
            tally: Counts the images.
            fdr: See `select_rows`.
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
            chosen = select_rows(lambda: _finished_rows(journal.entries()), fdr)
            write_rows(self.out, self.kind, tally.count(chosen))
            journal.remove()


class _Done:
    """Decides for each name, in the order of the inputs, whether it is done; done names have the same order.

    Attributes:
        waiting: The next done name; None if there is none left.
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
