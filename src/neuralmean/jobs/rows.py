"""Rows of results and how they are written: a table, JSON lines, CSV or parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from neuralmean.data.images import Unreadable
from neuralmean.data.progress import printable
from neuralmean.errors import ArtefactError, InputError, MissingExtraError
from neuralmean.files.atomic import write_atomically

FORMATS = ("table", "json", "csv", "parquet")
_BY_ENDING = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "table"}
_ROWS_AT_ONCE = 10_000


class ScoreRow(NamedTuple):
    """The result for one image; higher scores = more OOD."""

    path: str
    score: float
    p_value: float
    is_ood: bool
    kind: str  # see `Decision.kind`


class FinishedPart(NamedTuple):
    """A finished part in the journal: the rows of its images, and the unreadable inputs."""

    rows: list[ScoreRow]
    unreadable: list[Unreadable]

    def to_json(self) -> list[Any]:
        """Return it as JSON values."""
        return [list(self.rows), [[note.path, note.reason] for note in self.unreadable]]

    @classmethod
    def from_json(cls, content: Any) -> FinishedPart:
        """Rebuild it from what `to_json` returned."""
        try:
            rows, unreadable = content
            return cls([_checked(ScoreRow(*row)) for row in rows], [Unreadable(*map(str, note)) for note in unreadable])
        except (TypeError, ValueError):
            raise ArtefactError(
                "Expected the journal to hold scores of images, but it does not. Leave out --resume to start again."
            ) from None


def _checked(row: ScoreRow) -> ScoreRow:
    numbers = all(type(number) in (int, float) for number in (row.score, row.p_value))
    if not numbers or not isinstance(row.path, str) or type(row.is_ood) is not bool or not isinstance(row.kind, str):
        raise ValueError("this is no row")
    return row


def format_of(out: Path | None, asked: str | None) -> str:
    """Return the format to write: the requested one, else that of the file's ending, or a table without a file."""
    if asked is not None and asked not in FORMATS:
        raise InputError(f"Expected the format to be one of {list(FORMATS)}, but got {asked!r}.")
    chosen = asked or ("table" if out is None else _BY_ENDING.get(out.suffix.lower()))
    if chosen is None:
        raise InputError(
            f"Expected `out` to end in one of {sorted(_BY_ENDING)}, but got {str(out)!r}. Use one, or name the format."
        )
    if chosen == "parquet":
        if out is None:
            raise InputError("Expected a file to write parquet to. Pass --out FILE.")
        _import_parquet()
    return chosen


def write_rows(out: Path, kind: str, rows: Iterable[ScoreRow]) -> None:
    """Write rows to a file, whole or not at all."""
    if kind == "parquet":
        _write_parquet(out, rows)
        return
    with write_atomically(out, "w") as file:
        file.writelines(f"{line}\n" for line in format_rows(kind, rows))


def format_rows(kind: str, rows: Iterable[ScoreRow], *, header: bool = True) -> Iterator[str]:
    """Yield the lines of a table, JSON or CSV.

    Example:
        >>> list(format_rows("csv", [ScoreRow("a,b.png", 1.5, 0.25, False, "typical")]))
        ['path,score,p_value,is_ood,kind', '"a,b.png",1.5,0.25,false,typical']
    """
    if kind == "json":
        yield from (json.dumps(row._asdict()) for row in rows)
    elif kind == "csv":
        if header:
            yield ",".join(ScoreRow._fields)
        yield from (_csv_line(row) for row in rows)
    else:
        if header:
            yield f"{'verdict':<8}{'kind':<11}{'p-value':>9}{'score':>12}  path"
        for row in rows:
            verdict = f"{'OOD' if row.is_ood else 'ok':<8}{row.kind:<11}"
            yield f"{verdict}{row.p_value:>9.4f}{row.score:>12.4f}  {printable(row.path)}"


def _as_text(path: str) -> str:
    """Return the path with undecodable bytes escaped, as JSON does: Linux allows any bytes in file names."""
    return path.encode("utf-8", "backslashreplace").decode()


def _as_cell(path: str) -> str:
    """Return the path in a form that no spreadsheet reads as a formula and that still names the file."""
    return f"./{path}" if path.startswith(("=", "+", "-", "@", "\t", "\r")) else path


def _csv_line(row: ScoreRow) -> str:
    class Line:
        text = ""

        def write(self, text: str) -> None:
            self.text = text

    line = Line()
    # Python before 3.11.9 quotes a line end in a name only if it is one that ends lines here.
    csv.writer(line, lineterminator="\r\n").writerow(
        [_as_cell(_as_text(row.path)), repr(row.score), repr(row.p_value), str(row.is_ood).lower(), row.kind]
    )
    return line.text.removesuffix("\r\n")


def _write_parquet(out: Path, rows: Iterable[ScoreRow]) -> None:
    pyarrow, parquet = _import_parquet()
    kinds = (pyarrow.string(), pyarrow.float64(), pyarrow.float64(), pyarrow.bool_(), pyarrow.string())
    schema = pyarrow.schema(list(zip(ScoreRow._fields, kinds, strict=True)))
    rows = (row._replace(path=_as_text(row.path)) for row in rows)
    with write_atomically(out) as file, parquet.ParquetWriter(file, schema) as writer:
        while part := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pyarrow.table(list(map(list, zip(*part, strict=True))), schema=schema))


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("Parquet needs pyarrow. Install it with `pip install neuralmean[report]`.") from None
    return pyarrow, parquet
