"""Scores of many images into one file: exactly once each, whole or not at all, and resumable.

Finished batches are noted beside the output, in `OUT.partial`. A run that was killed goes on after the last of them; as
batches are cut at the same places, the result is that of an undisturbed run, bit for bit. Memory does not grow.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from neuralmean.artefact import Artefact
from neuralmean.detector import Detector
from neuralmean.errors import ArtefactError, InputError, MissingExtraError
from neuralmean.files import write_atomically
from neuralmean.images import ImageBatches, Unreadable
from neuralmean.preprocessing import Preprocessing
from neuralmean.progress import track

FORMATS = ("table", "json", "csv", "parquet")
_FORMAT_OF = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "table"}


class Row(NamedTuple):
    """What is said of one image."""

    path: str
    score: float
    p_value: float
    is_ood: bool


@dataclass
class Tally:
    """How many images were scored, flagged and not readable, and how many came from an earlier run."""

    scored: int = 0
    flagged: int = 0
    unreadable: int = 0
    skipped: int = 0
    resumed: int = 0

    def count(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Pass rows on and count them."""
        for row in rows:
            self.scored += 1
            self.flagged += row.is_ood
            yield row


class CountedBatches(ImageBatches):
    """Image batches that know how many they are, for a progress bar with the time left."""

    def __len__(self) -> int:
        return (self.count() + self._batch_size - 1) // self._batch_size


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
) -> Iterator[list[Row]]:
    """Yield the rows of the images that `paths` name, a batch at a time, in order."""
    batches = CountedBatches(
        paths, preprocessing, batch_size=batch_size, workers=workers, on_unreadable=on_unreadable, skip=skip
    )
    for images, names in track(
        batches, description="Scoring", total=batches.count(), size=lambda batch: len(batch.names)
    ):
        decision = detector.predict(images, batch_size=batch_size)
        columns = decision.score.tolist(), decision.p_value.tolist(), decision.is_ood.tolist()
        yield [Row(*row) for row in zip(names, *columns, strict=True)]
    tally.unreadable, tally.skipped = batches.n_unreadable, batches.n_skipped


def format_of(out: Path | None, asked: str | None) -> str:
    """Return the format to write: what was asked for, else what the file's ending says, else a table."""
    if asked is not None and asked not in FORMATS:
        raise InputError(f"Expected the format to be one of {list(FORMATS)}, but got {asked!r}.")
    chosen = asked or (_FORMAT_OF.get(out.suffix.lower(), "csv") if out else "table")
    if chosen == "parquet":
        if out is None:
            raise InputError("Expected a file to write parquet to. Pass --out FILE.")
        _import_parquet()
    return chosen


class ScoreFile:
    """The output of one scoring run, with its notes of what is done.

    Args:
        out: The file to write in the end.
        kind: One of `FORMATS`.
        artefact: The saved detector: scores of another one are not gone on with.
        settings: What else must be the same for a run to go on.
        resume: Whether to go on from an earlier run.
    """

    def __init__(self, out: Path, kind: str, *, artefact: Artefact, settings: Any, resume: bool) -> None:
        self.out, self.kind = out, kind
        self.partial = out.with_name(out.name + ".partial")
        key = json.dumps([artefact.header["digest"], settings], sort_keys=True)
        self._key = hashlib.sha256(key.encode()).hexdigest()
        self._good = self._finished_bytes() if resume else 0
        if resume and self.partial.exists() and not self._good:
            raise InputError(
                f"Expected {str(self.partial)!r} to be of the same detector and settings, but it is not. "
                "Leave out --resume to start again."
            )

    def write(self, batches: Callable[[Callable[[str], bool] | None], Iterable[list[Row]]], tally: Tally) -> None:
        """Score what is not done yet, note each batch as it comes, then write the output.

        Args:
            batches: Called with a function that says which names to skip; gives the rows of the others.
            tally: Where to count.
        """
        try:
            with self.partial.open("r+b" if self._good else "wb") as notes:
                if self._good:
                    notes.truncate(self._good)
                    notes.seek(self._good)
                else:
                    _note(notes, {"key": self._key})
                for rows in batches(self._skipper(tally) if self._good else None):
                    _note(notes, rows)
        except OSError as error:
            raise ArtefactError(
                f"Expected to note results in {str(self.partial)!r}, but {error.strerror or error}."
            ) from None
        write_rows(self.out, self.kind, tally.count(self._rows()))
        self.partial.unlink(missing_ok=True)

    def _finished_bytes(self) -> int:
        """Return up to where the notes of an earlier run are whole; 0 if there are none, or they are another run's."""
        good = 0
        try:
            with self.partial.open("rb") as notes:
                for index, line in enumerate(notes):
                    if not line.endswith(b"\n"):
                        break
                    if index == 0 and json.loads(line).get("key") != self._key:
                        return 0
                    good += len(line)
        except (OSError, ValueError, AttributeError):
            return 0
        return good

    def _rows(self) -> Iterator[Row]:
        with self.partial.open("rb") as notes:
            next(notes)
            for line in notes:
                yield from (Row(*row) for row in json.loads(line))

    def _skipper(self, tally: Tally) -> Callable[[str], bool]:
        """Say of each name, in the order of the inputs, whether it is done: done names come in that order too."""
        done = (row.path for row in self._rows())
        waiting = next(done, None)

        def skip(name: str) -> bool:
            nonlocal waiting
            if name != waiting:
                return False
            tally.resumed += 1
            waiting = next(done, None)
            return True

        return skip


def write_rows(out: Path, kind: str, rows: Iterable[Row]) -> None:
    """Write rows to a file, whole or not at all."""
    if kind == "parquet":
        _write_parquet(out, rows)
        return
    with write_atomically(out, "w") as file:
        file.writelines(f"{line}\n" for line in format_rows(kind, rows))


def format_rows(kind: str, rows: Iterable[Row], *, header: bool = True) -> Iterator[str]:
    """Yield the lines of a table, of JSON or of CSV."""
    if kind == "json":
        yield from (json.dumps(row._asdict()) for row in rows)
    elif kind == "csv":
        if header:
            yield ",".join(Row._fields)
        yield from (_csv_line(row) for row in rows)
    else:
        if header:
            yield f"{'verdict':<8}{'p-value':>9}{'score':>12}  path"
        for row in rows:
            yield f"{'OOD' if row.is_ood else 'ok':<8}{row.p_value:>9.4f}{row.score:>12.4f}  {row.path}"


def _csv_line(row: Row) -> str:
    class Line:
        text = ""

        def write(self, text: str) -> None:
            self.text = text

    line = Line()
    csv.writer(line, lineterminator="").writerow(
        [row.path, repr(row.score), repr(row.p_value), str(row.is_ood).lower()]
    )
    return line.text


def _write_parquet(out: Path, rows: Iterable[Row]) -> None:
    pyarrow, parquet = _import_parquet()
    kinds = (pyarrow.string(), pyarrow.float64(), pyarrow.float64(), pyarrow.bool_())
    schema = pyarrow.schema(list(zip(Row._fields, kinds, strict=True)))
    with write_atomically(out) as file, parquet.ParquetWriter(file, schema) as writer:
        waiting: list[Row] = []
        for row in rows:
            waiting.append(row)
            if len(waiting) == 10_000:
                writer.write_table(pyarrow.table(list(zip(*waiting, strict=True)), schema=schema))
                waiting = []
        if waiting:
            writer.write_table(pyarrow.table(list(map(list, zip(*waiting, strict=True))), schema=schema))


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("Parquet needs pyarrow. Install it with `pip install neuralmean[report]`.") from None
    return pyarrow, parquet


def _note(notes: IO[bytes], value: Any) -> None:
    """Append one line and make sure that it is on the disk."""
    notes.write(json.dumps(value).encode() + b"\n")
    notes.flush()
    os.fsync(notes.fileno())
