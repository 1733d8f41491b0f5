"""Tables of a report, made from rows of results and the paper's figures.

Text only: `report` turns a table into HTML or Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from neuralmean.bench import titles
from neuralmean.bench.data import ALTERATIONS
from neuralmean.bench.experiments import paper
from neuralmean.bench.experiments.imagenet import NEAR
from neuralmean.bench.models.registry import is_weak
from neuralmean.bench.results import Row

DAGGER = "†"


NOTHING, MINUS = "\u2013", "\u2212"


@dataclass(frozen=True)
class Table:
    """A caption, column names and rows of text; the first columns are names, the others figures."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int  # how many columns are names


def make_tables(name: str, rows: Sequence[Row]) -> list[Table]:
    """Return the tables of one experiment, given its rows."""
    if name == "latency":
        apart, runs = told_apart_by(rows), dict.fromkeys(_run_of(row) for row in rows)
        return [_latency_table([row for row in rows if _run_of(row) == run], apart) for run in runs]
    if name == "false-alarms":
        return [_false_alarm_table(rows)]
    tables = []
    for model, inside in dict.fromkeys((row["model"], row["id"]) for row in rows):
        own = [row for row in rows if (row["model"], row["id"]) == (model, inside)]
        caption = f"{titles.of_model(model)}, {titles.of_set(inside)} as ID{accuracy_words(own)}"
        varied = any(row.get("setting") for row in own)
        if len({row["ood"] for row in own}) > 1 and (name == "ablation" or not varied):
            tables.append(near_and_far(caption, own) if name == "imagenet" else _overview(caption, own))
            if name == "imagenet":
                tables.append(_overview(caption, own))
        tables.append(_detail(caption, own))
    return tables


def _overview(caption: str, rows: Sequence[Row]) -> Table:
    """AUROC of methods by OOD sets."""
    apart = told_apart_by(rows)
    oods = list(dict.fromkeys(row["ood"] for row in rows))
    methods = list(dict.fromkeys(label_of(row, apart) for row in rows))
    cells = {(label_of(row, apart), row["ood"]): row["auroc"] for row in rows}
    lines = []
    for method in methods:
        values = [cells.get((method, ood)) for ood in oods]
        known = [value for value in values if value is not None]
        mean = sum(known) / len(known) if known else None
        lines.append((method, *map(_percent, values), _percent(mean)))
    columns = ("method", *map(titles.of_set, oods), "mean")
    return Table(f"{caption}: AUROC at a glance", columns, tuple(lines), names=1)


def near_and_far(caption: str, rows: Sequence[Row]) -> Table:
    """AUROC and FPR95, averaged over near and over far OOD sets, as on OpenOOD's leaderboard."""
    groups = {
        "near": [name for name in NEAR if any(row["ood"] == name for row in rows)],
        "far": list(dict.fromkeys(row["ood"] for row in rows if row["ood"] not in (*NEAR, *ALTERATIONS))),
        "altered": list(dict.fromkeys(row["ood"] for row in rows if row["ood"] in ALTERATIONS)),
    }
    shown = {group: sets for group, sets in groups.items() if sets}
    cells = {(row["method"], row["ood"]): row for row in rows}
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        figures: list[str] = []
        for sets in (*shown.values(), [name for group in shown.values() for name in group]):
            own = [cells[method, name] for name in sets if (method, name) in cells]
            for value in ([row["auroc"] for row in own], [100 - row["tnr95"] for row in own]):
                figures.append(_percent(sum(value) / len(value)) if len(own) == len(sets) else NOTHING)
        lines.append((titles.of_method(method), *figures))
    columns = ["method"]
    for group in (*shown, "all"):
        columns += [f"{group}, AUROC", f"{group}, FPR95"]
    return Table(f"{caption}: means over sets", tuple(columns), tuple(lines), names=1)


def _false_alarm_table(rows: Sequence[Row]) -> Table:
    columns = (
        "model",
        "ID",
        "held-out images",
        "asked, %",
        "measured, %",
        "flagged",
        "images",
        "between half and twice the rate",
    )
    lines = []
    for row in rows:
        low, high = row["false_alarms_ci"]
        lines.append(
            (
                titles.of_model(row["model"]),
                titles.of_set(row["id"]),
                f"{row['n_held_out']:,}" if row["n_held_out"] else "none",
                f"{row['rate']:g}",
                f"{row['false_alarms']:.1f} [{low:.1f}, {high:.1f}]",
                str(row["flagged"]),
                f"{row['n_id']:,}",
                "yes" if row["as_asked"] else "no",
            )
        )
    caption = "False alarms of the default detector; brackets hold exact 95 % binomial intervals"
    return Table(caption, columns, tuple(lines), names=3)


def _detail(caption: str, rows: Sequence[Row]) -> Table:
    columns = (
        "OOD",
        "method",
        "AUROC",
        "paper",
        "diff.",
        "TNR95",
        "paper",
        "diff.",
        "accuracy",
        "paper",
        "diff.",
        "images (ID / OOD)",
        "fitted on (ID / OOD)",
    )
    lines, apart = [], told_apart_by(rows)
    for row in rows:
        printed, mark = paper.printed_for(row), ""
        if printed is None:
            printed, mark = paper.printed_for_resnet34(row), DAGGER
        figures: list[str] = []
        for metric in ("auroc", "tnr95", "accuracy"):
            theirs = None if printed is None else getattr(printed, metric)
            figures += [_with_spread(row, metric), *_compare(row[metric], theirs, mark)]
        fitted = f"{row.get('n_fit_id') or 0:,} / {row.get('n_fit_ood') or 0:,}"
        judged = f"{row['n_id']:,} / {row['n_ood']:,}"
        lines.append((titles.of_set(row["ood"]), label_of(row, apart), *figures, judged, fitted))
    return Table(caption, columns, tuple(lines), names=2)


def _run_of(row: Row) -> tuple[Any, ...]:
    """Return the values shared by all rows of one run."""
    return tuple(row.get(key) for key in ("model", "id", "ood", "seed", "limit"))


def _latency_table(rows: Sequence[Row], apart: Sequence[str]) -> Table:
    columns = (
        "method",
        "AUROC",
        "fit, s",
        "paper, s",
        "one image, ms",
        "paper, ms",
        "ratio to plain pass",
        "paper's ratio",
        "passes an image",
        "peak MB",
    )
    plain = paper.timing("plain")
    base = plain.latency_ms if plain else None
    first = rows[0]
    lines = [("Plain pass", *[NOTHING] * 3, f"{first['plain_ms']:.1f}", _number(base), "1.00", "1.00", "1", NOTHING)]
    for row in rows:
        theirs = None if row.get("setting") else paper.timing(row["method"])
        ratio = None if theirs is None or base is None else theirs.latency_ms / base
        lines.append(
            (
                label_of(row),
                _percent(row["auroc"]),
                _number(row.get("fit_seconds")),
                _number(None if theirs is None else theirs.fit_seconds),
                _number(row["latency_ms"]),
                _number(None if theirs is None else theirs.latency_ms),
                _number(row["ratio"], 2),
                _number(ratio, 2),
                _number(row.get("passes_per_image")),
                _number(row.get("peak_mb"), 0),
            )
        )
    sets = f"{titles.of_set(first['id'])} against {titles.of_set(first['ood'])}"
    machines = " and ".join(dict.fromkeys(str(row["machine"]) for row in rows))
    where = f"{_span(rows, 'threads')} threads, {machines}, median of {_span(rows, 'repeats')} images"
    model = f"{titles.of_model(first['model'])}{accuracy_words(rows)}"
    caption = f"{', '.join([model, sets, *_run_words(first, apart)])}; {where}"
    return Table(caption, columns, tuple(lines), names=1)


def accuracy_words(rows: Sequence[Row]) -> str:
    """Describe the accuracy of a model, and whether it falls short of its architecture.

    Example:
        >>> accuracy_words([{"model": "resnet34", "id": "cifar10", "model_accuracy": 88.4}])
        ' (88.4 % accuracy: a weak network)'
    """
    known = sorted({row["model_accuracy"] for row in rows if row.get("model_accuracy") is not None})
    if not known:
        return ""
    weak = any(is_weak(row["model"], row["id"], row.get("model_accuracy")) for row in rows)
    said = " and ".join(f"{value:.1f}" for value in known)
    probe = " of a linear probe" if any(row["model"].startswith("moco-") for row in rows) else ""
    return f" ({said} % accuracy{probe}{': a weak network' if weak else ''})"


def told_apart_by(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return which of seed and limit differ between rows, and so must be shown."""
    return tuple(key for key in ("seed", "limit") if len({row.get(key) for row in rows}) > 1)


def label_of(row: Row, apart: Sequence[str] = ()) -> str:
    """Return the label of a row: its method, its setting, and whatever else distinguishes it."""
    setting = [str(row["setting"])] if row.get("setting") else []
    return ", ".join([titles.of_method(row["method"]), *setting, *_run_words(row, apart)])


def _span(rows: Sequence[Row], key: str) -> str:
    low, high = min(row[key] for row in rows), max(row[key] for row in rows)
    return f"{low}" if low == high else f"{low} to {high}"


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


def _number(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _with_spread(row: Row, metric: str) -> str:
    text = _percent(row[metric])
    if f"{metric}_std" in row:
        return f"{text} ± {row[f'{metric}_std']:.1f}"
    if f"{metric}_ci" in row:
        low, high = row[f"{metric}_ci"]
        return f"{text} [{low:.1f}, {high:.1f}]"
    return text


def _compare(ours: float | None, theirs: float | None, mark: str) -> tuple[str, str]:
    if ours is None or theirs is None:
        return NOTHING, NOTHING
    return f"{theirs:.1f}{mark}", f"{ours - theirs:+.1f}{mark}".replace("-", MINUS)


def _run_words(row: Row, apart: Sequence[str]) -> list[str]:
    return [f"{key} {row[key]}" for key in apart if row.get(key) is not None]
