"""Finished chunks as one file: JSON lines, CSV or parquet, whole or not at all, in the order of the inputs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from neuralmean.distributed.extras import import_extra
from neuralmean.distributed.jobs import ChunkScores
from neuralmean.errors import InputError
from neuralmean.files import write_atomically

FIELDS = ("path", "score", "p_value", "is_ood")
FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


def check_format(path: Path) -> str:
    """Return the format that the extension of `path` asks for."""
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"Expected `out` to end in one of {sorted(FORMATS)}, but got {str(path)!r}.")
    return FORMATS[path.suffix.lower()]


def write_scores(path: Path, chunks: Iterable[ChunkScores]) -> None:
    """Write a row for every image that could be read: path, score, p_value, is_ood."""
    kind = check_format(path)
    if kind == "parquet":
        _write_parquet(path, chunks)
        return
    with write_atomically(path, "w") as file:
        if kind == "json":
            file.writelines(json.dumps(dict(zip(FIELDS, row, strict=True))) + "\n" for row in rows_of(chunks))
        else:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(FIELDS)
            writer.writerows((*row[:3], str(row[3]).lower()) for row in rows_of(chunks))


def rows_of(chunks: Iterable[ChunkScores]) -> Iterator[tuple[str, float, float, bool]]:
    """Yield path, score, p-value and whether it is OOD of every image, in order."""
    for chunk in chunks:
        yield from zip(chunk.names, chunk.score, chunk.p_value, chunk.is_ood, strict=True)


def _write_parquet(path: Path, chunks: Iterable[ChunkScores]) -> None:
    pyarrow, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
    kinds = (pyarrow.string(), pyarrow.float64(), pyarrow.float64(), pyarrow.bool_())
    schema = pyarrow.schema(list(zip(FIELDS, kinds, strict=True)))

    def table(chunk: ChunkScores) -> Any:
        return pyarrow.table([chunk.names, chunk.score, chunk.p_value, chunk.is_ood], schema=schema)

    with write_atomically(path) as file, parquet.ParquetWriter(file, schema) as writer:
        for chunk in chunks:
            writer.write_table(table(chunk))
