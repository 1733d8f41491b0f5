"""Rows of figures in one JSON file: the format of a row, and atomic writes.

`Results` adds rows one at a time and finds those already there, so that an interrupted run can resume.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.atomic import locked, write_atomically

COLUMNS = (
    "experiment",
    "model",
    "id",
    "ood",
    "method",
    "protocol",
    "auroc",
    "tnr95",
    "accuracy",
    "n_id",
    "n_ood",
    "seed",
    "seconds",
)
# The columns that identify a row; `setting` is what an experiment varies (a batch size, a number of layers).
IDENTITY = ("experiment", "model", "id", "ood", "method", "protocol", "seed", "setting", "limit")

MOST_BYTES = 1 << 28  # of a results file; a row takes less than a kilobyte, or a few with the scores of mini-batches

Row = dict[str, Any]


def make_row(figures: Mapping[str, Any], **extra: Any) -> Row:
    """Return a row with the columns in the order of `COLUMNS`, followed by any further values.

    Args:
        figures: A value for every column; AUROC, TNR95 and accuracy in percent, None if there is no such figure.
        extra: Further values, such as confidence intervals; JSON values only.

    Example:
        >>> row = make_row({name: 1 for name in COLUMNS}, setting="batch 4")
        >>> list(row)[:2], list(row)[-1]
        (['experiment', 'model'], 'setting')
    """
    missing = [name for name in COLUMNS if name not in figures]
    unknown = sorted(set(figures) - set(COLUMNS))
    if missing or unknown:
        raise InputError(
            f"Expected a row with the columns {list(COLUMNS)}, but {missing} are missing, {unknown} unknown."
        )
    return {**{name: figures[name] for name in COLUMNS}, **extra}


def identity(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the values that identify a row."""
    return tuple(row.get(name) for name in IDENTITY)


class Results:
    """A JSON file with a list of rows; each addition is written before the next row is computed.

    Several processes may add rows to one file; none overwrites the rows of another.

    Args:
        path: The file; it need not exist yet.

    Raises:
        ArtefactError: The file is not a results file; it is not changed.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._rows = {identity(row): row for row in read_rows(self.path)} if self.path.exists() else {}

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def find(self, row: Mapping[str, Any]) -> Row | None:
        """Return the existing row with the same identity and the same `inputs`, or None."""
        held = self._rows.get(identity(row))
        return held if held is not None and held.get("inputs") == row.get("inputs") else None

    def add(self, *new: Row) -> None:
        """Add rows to the current content of the file, replacing those with the same identity, and write it."""
        with locked(self.path.with_name(f".{self.path.name}.lock")):
            there = read_rows(self.path) if self.path.exists() else []
            rows = {identity(one): one for one in (*there, *new)}
            write_rows(self.path, list(rows.values()))
        self._rows = rows


def read_rows(path: Path | str) -> list[Row]:
    """Read the rows of a results file.

    Raises:
        ArtefactError: There is no such file, or it is not a list of rows.
    """
    path = Path(path)
    try:
        with path.open("rb") as handle:
            content = handle.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MB")
        held = json.loads(content.decode("utf-8"))
    except FileNotFoundError:
        raise ArtefactError(
            f"Expected a results file at {str(path)!r}, but there is none. Run `nmd bench run` first."
        ) from None
    except (OSError, ValueError) as error:
        raise ArtefactError(
            f"Expected {str(path)!r} to be a results file, but it cannot be read: {error}. Name another file."
        ) from error
    if not isinstance(held, list) or not all(isinstance(row, dict) and set(COLUMNS) <= set(row) for row in held):
        raise ArtefactError(
            f"Expected {str(path)!r} to hold a list of rows with {', '.join(COLUMNS)}, but it holds something else. "
            "Name another file."
        )
    return held


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows atomically, one per line."""
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    with write_atomically(path, "w") as handle:
        handle.write(f"[\n{lines}\n]\n" if rows else "[]\n")
