"""`nmd history`: what `nmd serve --history` kept, as a summary or as a table in a file."""

from __future__ import annotations

from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.data.progress import printable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from neuralmean.service.history import HistoryRow

_EPILOG = "Example: `nmd history history.db`, or `nmd history history.db --out rows.parquet`."
_ROWS_AT_ONCE = 50_000


@app.command(epilog=_EPILOG)
def history(
    path: Annotated[Path, typer.Argument(metavar="HISTORY", help="A file that `nmd serve --history` writes.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the decisions here: .parquet or .csv.")
    ] = None,
    flagged: Annotated[bool, typer.Option("--flagged", help="Write only the flagged ones.")] = False,
) -> None:
    """Show the days and alarms that `nmd serve --history` recorded, or write the decisions to a file."""
    from neuralmean.errors import UsageError
    from neuralmean.files.atomic import check_target
    from neuralmean.service.history import read_rows

    if out is None:
        _show(path)
        return
    if out.suffix.lower() not in (".parquet", ".csv"):
        raise UsageError(f"Expected --out to end in .parquet or .csv, but got {str(out)!r}.")
    check_target(out)
    options.check_out(out, path)
    count = (_write_csv if out.suffix.lower() == ".csv" else _write_parquet)(out, read_rows(path, flagged=flagged))
    typer.echo(f"{out}: {count:,} decisions", err=True)


def _show(path: Path) -> None:
    from neuralmean.service.history import read_alarms, read_span, read_totals

    totals = read_totals(path)
    since = "" if totals["since"] is None else f" since {_day(totals['since'])}"
    typer.echo(f"{totals['n']:,} decisions{since}, {totals['n_ood']:,} OOD, {totals['n_alarms']} alarms")
    typer.echo(f"{'day':<12}{'inputs':>12}{'OOD':>10}{'share':>8}{'alarms':>8}")
    for row in read_span(path, "days"):
        if row["n"]:
            share = f"{100 * row['n_ood'] / row['n']:.1f} %"
            typer.echo(f"{_day(row['start']):<12}{row['n']:>12,}{row['n_ood']:>10,}{share:>8}{row['n_alarms']:>8}")
    for alarm in read_alarms(path, limit=20):
        when = datetime.fromtimestamp(alarm["time"]).strftime("%Y-%m-%d %H:%M")  # in local time
        typer.echo(printable(f"Alarm {alarm['id']}, {when}: {alarm.get('sentence', '')}"))


def _day(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d")  # in local time


def _write_csv(out: Path, rows: Iterator[HistoryRow]) -> int:
    import csv

    from neuralmean.files.atomic import write_atomically
    from neuralmean.service.history import HistoryRow

    count = 0
    with write_atomically(out, "w") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HistoryRow._fields)
        for count, row in enumerate(rows, 1):  # noqa: B007
            writer.writerow(row)
    return count


def _write_parquet(out: Path, rows: Iterator[HistoryRow]) -> int:
    from neuralmean.files.atomic import write_atomically
    from neuralmean.jobs.rows import _import_parquet
    from neuralmean.service.history import HistoryRow

    pyarrow, parquet = _import_parquet()
    double, text, integer = pyarrow.float64(), pyarrow.string(), pyarrow.int64()
    kinds = (integer, double, double, double, pyarrow.bool_(), text, integer)
    schema, count = pyarrow.schema(list(zip(HistoryRow._fields, kinds, strict=True))), 0
    with write_atomically(out) as file, parquet.ParquetWriter(file, schema) as writer:
        while part := list(islice(rows, _ROWS_AT_ONCE)):
            writer.write_table(pyarrow.table(list(map(list, zip(*part, strict=True))), schema=schema))
            count += len(part)
    return count
