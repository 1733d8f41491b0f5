"""Results as plain text: one table for each model of an experiment, methods in rows, OOD sets in columns."""

from __future__ import annotations

from collections.abc import Sequence

from neuralmean.bench import titles
from neuralmean.bench.results import Row
from neuralmean.bench.tables import Table, accuracy_words, make_tables, near_and_far


def as_text(rows: Sequence[Row], *, figure: str = "auroc") -> str:
    """Return tables of one figure, in percent, with the mean over the sets that all methods of a table have.

    Args:
        rows: Rows of a results file; rows without the figure are skipped.
        figure: `"auroc"` or `"tnr95"`.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if isinstance(row.get(figure), (int, float)) and row["experiment"] != "latency":
            key = tuple(str(row.get(name) or "") for name in ("experiment", "model", "id", "protocol", "limit"))
            groups.setdefault(key, []).append(row)
    alarms = [row for row in rows if "false_alarms" in row]
    tables = [text for key, group in groups.items() for text in _tables(key, group, figure)]
    times = [row for row in rows if row["experiment"] == "latency"]
    tables += [_aligned(table, "") for table in make_tables("latency", times)]
    return "\n\n".join([*tables, *_alarms(alarms)])


def _alarms(rows: Sequence[Row]) -> list[str]:
    """Return one table of false-alarm rates, or none if there are no such rows."""
    lines = [
        f"{row['model']:<22}{row['setting']:<38}{row['false_alarms']:6.1f} %  [{row['false_alarms_ci'][0]:.1f}, "
        f"{row['false_alarms_ci'][1]:.1f}]  of {row['n_id']}"
        for row in rows
    ]
    return ["\n".join(["false alarms of the default detector on unseen ID images", *lines])] if lines else []


def _tables(key: tuple[str, ...], rows: list[Row], figure: str) -> list[str]:
    """Return the table of a figure and, for ImageNet, the means over near and far sets, as on OpenOOD's leaderboard."""
    whole = _table(key, rows, figure)
    return [whole, _aligned(near_and_far(titles.of_model(key[1]), rows), ", %")] if key[0] == "imagenet" else [whole]


def _aligned(table: Table, unit: str) -> str:
    """Return a table as text, names aligned left and figures right."""
    lines = [table.columns, *table.rows]
    widths = [max(len(line[place]) for line in lines) for place in range(len(table.columns))]
    ordered = ("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines)
    return "\n".join([f"{table.caption}{unit}", *ordered])


def _table(key: tuple[str, ...], rows: list[Row], figure: str) -> str:
    experiment, model, inside, protocol, limit = key
    values = {(_label(row), row["ood"]): float(row[figure]) for row in rows}
    methods = list(dict.fromkeys(map(_label, rows)))
    sets = list(dict.fromkeys(row["ood"] for row in rows))
    common = [name for name in sets if all((method, name) in values for method in methods)]
    quick = f", at most {limit} images" if limit else ""
    which = f"{titles.of_model(model)} on {titles.of_set(inside)}{accuracy_words(rows)}"
    title = f"{experiment}: {which}, {protocol}{quick}"
    width = max(map(len, methods)) + 2
    columns = [max(len(name), 5) + 2 for name in sets]
    lines = [f"{title}; {figure.upper()} in %", "".ljust(width) + "   mean" + "".join(map(str.rjust, sets, columns))]
    for method in methods:
        mean = sum(values[method, name] for name in common) / len(common) if common else None
        cells = [_cell(values.get((method, name))).rjust(size) for name, size in zip(sets, columns, strict=True)]
        lines.append(method.ljust(width) + _cell(mean).rjust(7) + "".join(cells))
    return "\n".join(lines)


def _label(row: Row) -> str:
    return f"{row['method']}, {row['setting']}" if row.get("setting") else str(row["method"])


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
