"""Boxes in images, from a file of boxes to rows with a p-value each.

The file holds JSON lines, `{"path": "a.png", "boxes": [[x0, y0, x1, y1], ...]}`, or is a CSV with the columns path, x0, y0, x1
and y1, a row for each box. Corners are in pixels of the image file, as it is shown.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from neuralmean.data.images import Unreadable, find_inputs, read_image
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError

MAX_BOXES = 100_000  # in one image
_COLUMNS = ("x0", "y0", "x1", "y1")


class BoxRow(NamedTuple):
    """What is said of a box of an image; higher scores = more OOD."""

    path: str
    x0: float
    y0: float
    x1: float
    y1: float
    score: float
    p_value: float
    is_ood: bool


def read_box_file(path: Path) -> dict[str, list[list[float]]]:
    """Return the boxes of each image by the path that the file gives."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Expected a file of boxes in UTF-8, but {str(path)!r} cannot be read: {error}.") from error
    lines = _from_csv(text) if path.suffix.lower() == ".csv" else _from_json(text)
    found: dict[str, list[list[float]]] = {}
    try:
        for number, name, boxes in lines:
            if not isinstance(name, str) or not all(len(box) == 4 and all(map(_is_number, box)) for box in boxes):
                raise ValueError(f"line {number}")
            found.setdefault(name, []).extend([float(value) for value in box] for box in boxes)
            if len(found[name]) > MAX_BOXES:
                raise InputError(f"Expected at most {MAX_BOXES:,} boxes in an image, but {name!r} has more.")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(
            f'Expected each line of {str(path)!r} to be {{"path": ..., "boxes": [[x0, y0, x1, y1], ...]}}, or a .csv with the '
            f"columns path, x0, y0, x1, y1, but got {error}."
        ) from None
    if not found:
        raise InputError(f"Expected boxes in {str(path)!r}, but it is empty.")
    return found


def score_boxes(
    detector: Detector,
    preprocessing: Preprocessing,
    paths: Sequence[str],
    boxes: dict[str, list[list[float]]],
    *,
    on_unreadable: Callable[[Unreadable], None],
) -> Iterator[list[BoxRow]]:
    """Yield the rows of each image that has boxes, in order of the images; boxes that the model does not see are noted."""
    by_name = (
        {Path(name).name: own for name, own in boxes.items()}
        if len({Path(n).name for n in boxes}) == len(boxes)
        else {}
    )
    n_images = 0
    for source in find_inputs(paths):
        wanted = boxes.get(source.path) or by_name.get(Path(source.path).name)
        if source.kind != "image" or not wanted:
            continue
        n_images += 1
        image = read_image(source.path)
        if isinstance(image, Unreadable):
            on_unreadable(image)
            continue
        given = torch.tensor(wanted, dtype=torch.float64)
        placed = preprocessing.place_boxes(given, (image.height, image.width))
        x = preprocessing(image)[None]
        seen = _is_seen(placed, x.shape[2:])
        for row in (~seen).nonzero()[:, 0].tolist():
            numbers = ", ".join(f"{value:g}" for value in wanted[row])
            on_unreadable(Unreadable(source.path, f"box {numbers} lies outside of what the model sees"))
        if not bool(seen.any()):
            continue
        decision = detector.score_regions(x, [placed[seen]])[0]
        columns = decision.score.tolist(), decision.p_value.tolist(), decision.is_ood.tolist()
        yield [BoxRow(source.path, *box, *row) for box, *row in zip(given[seen].tolist(), *columns, strict=True)]
    if not n_images:
        raise InputError(
            "Expected the file of boxes to name some of the images, by path or by name, but it names none."
        )


def format_boxes(kind: str, rows: Sequence[BoxRow], *, header: bool) -> Iterator[str]:
    """Yield the lines of a table, of JSON or of CSV.

    Example:
        >>> list(format_boxes("json", [BoxRow("a.png", 0.0, 0.0, 8.0, 9.0, 1.5, 0.25, False)], header=False))[0][:40]
        '{"path": "a.png", "x0": 0.0, "y0": 0.0, '
    """
    if kind == "json":
        yield from (json.dumps(row._asdict()) for row in rows)
    elif kind == "csv":
        lines = _Lines()
        writer = csv.writer(lines, lineterminator="")
        if header:
            yield ",".join(BoxRow._fields)
        for row in rows:
            path = f"./{row.path}" if row.path.startswith(("=", "+", "-", "@", "\t", "\r")) else row.path
            writer.writerow([path, *map(repr, row[1:7]), str(row.is_ood).lower()])
            yield lines.last
    elif kind == "table":
        if header:
            yield f"{'verdict':<8}{'p-value':>9}{'score':>10}  box and path"
        for row in rows:
            box = " ".join(f"{value:g}" for value in row[1:5])
            yield f"{'OOD' if row.is_ood else 'ok':<8}{row.p_value:>9.4f}{row.score:>10.3f}  {box}  {row.path}"
    else:
        raise InputError(f"Expected the format of boxes to be table, json or csv, but got {kind!r}.")


class _Lines:
    last = ""

    def write(self, text: str) -> None:
        self.last = text


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_seen(boxes: Tensor, size: Sequence[int]) -> Tensor:
    ends = torch.tensor([size[1], size[0]], dtype=torch.float64)
    return (boxes[:, 2:].minimum(ends) > boxes[:, :2].clamp_min(0)).all(dim=1)


def _from_csv(text: str) -> Iterator[tuple[int, Any, Any]]:
    for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
        yield number, row["path"], [[float(row[column]) for column in _COLUMNS]]


def _from_json(text: str) -> Iterator[tuple[int, Any, Any]]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            content = json.loads(line)
            yield number, content["path"], content["boxes"]
