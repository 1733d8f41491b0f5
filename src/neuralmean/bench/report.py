"""From a results file to a page that people read: every experiment's figures beside the paper's, with the difference.

Writes HTML (one file, plots inside) and Markdown (plots in a folder beside it). Reads rows only; measures nothing.
"""

from __future__ import annotations

import html as escaping
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuralmean.bench import experiments, gaps, plots, titles
from neuralmean.bench.experiments import paper
from neuralmean.bench.experiments.remarks import REMARKS
from neuralmean.bench.results import Row, read_rows
from neuralmean.errors import InputError
from neuralmean.files.atomic import write_atomically

DAGGER = "†"
NOTHING, MINUS = "\u2013", "\u2212"
_LEGEND = (
    "AUROC, TNR95 (share of OOD rejected when 95 % of ID is kept) and detection accuracy in percent; higher is better. "
    "Brackets hold 95 % bootstrap intervals; ± is the standard deviation over draws. ODIN and Mahalanobis are tuned on a draw "
    "of at most 100 images of each kind: another draw can change their AUROC by several points, which brackets do not contain. "
    f"{DAGGER}: the paper's figure is for ResNet-34, of which no weights were at hand; ours is for the model named."
)


@dataclass(frozen=True)
class Table:
    """A caption, column names and rows of text; the first columns are names, the others figures."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int  # how many columns are names


@dataclass(frozen=True)
class Section:
    """One experiment of the report."""

    name: str
    title: str
    reference: str
    remark: str
    gaps: str
    tables: tuple[Table, ...]
    plots: tuple[plots.Plot, ...]


def write(results: Path | str, *, html: Path | str | None = None, markdown: Path | str | None = None) -> list[Path]:
    """Write the report of a results file and return the files written.

    Args:
        results: The file that `experiments.run` made.
        html: Where the HTML page goes.
        markdown: Where the Markdown page goes; its plots go to a folder `<stem>-plots` beside it.
    """
    if html is None and markdown is None:
        raise InputError("Expected `html` or `markdown` to say where the report goes, but both are None.")
    rows = read_rows(results)
    if not rows:
        raise InputError(f"Expected rows in {str(results)!r}, but it has none yet. Make some with `nmd bench run`.")
    sections = build(rows)
    written: list[Path] = []
    if html is not None:
        with write_atomically(html, "w") as handle:
            handle.write(to_html(sections, rows))
        written.append(Path(html))
    if markdown is not None:
        path = Path(markdown)
        folder = path.parent / f"{path.stem}-plots"
        for plot in (plot for section in sections for plot in section.plots):
            folder.mkdir(exist_ok=True)
            with write_atomically(folder / f"{plot.name}.svg", "w") as handle:
                handle.write(plot.svg)
            written.append(folder / f"{plot.name}.svg")
        with write_atomically(path, "w") as handle:
            handle.write(to_markdown(sections, rows, folder.name))
        written.append(path)
    return written


def build(rows: Sequence[Row]) -> list[Section]:
    """Return a section for every experiment that has rows, in the order of the paper."""
    sections = []
    for name in experiments.names():
        experiment = experiments.get(name)
        own = in_order(experiment, [row for row in rows if row["experiment"] == name])
        if not own:
            continue
        sections.append(
            Section(
                name,
                experiment.title,
                experiment.reference,
                REMARKS.get(name, ""),
                gaps.not_measured(name, own),
                tuple(_tables(name, own)),
                tuple(plots.draw(name, own)),
            )
        )
    return sections


def in_order(experiment: experiments.Experiment, rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of the experiment's cases, methods and OOD sets, whatever order they were measured in."""
    cases = [(case.model, case.id) for case in experiment.cases]
    sets = {(case.model, case.id): case.oods for case in experiment.cases}

    def place(row: Row) -> tuple[int, int, bool, int]:
        case = (row["model"], row["id"])
        return (
            _index(cases, case),
            _index(experiment.methods, row["method"]),
            bool(row.get("setting")),
            0 if row.get("setting") else _index(sets.get(case, ()), row["ood"]),
        )

    return sorted(rows, key=place)


def _index(known: Sequence[Any], value: Any) -> int:
    return known.index(value) if value in known else len(known)


def _tables(name: str, rows: Sequence[Row]) -> list[Table]:
    if name == "latency":
        apart, runs = told_apart_by(rows), dict.fromkeys(_run_of(row) for row in rows)
        return [_latency_table([row for row in rows if _run_of(row) == run], apart) for run in runs]
    tables = []
    for model, inside in dict.fromkeys((row["model"], row["id"]) for row in rows):
        own = [row for row in rows if (row["model"], row["id"]) == (model, inside)]
        caption = f"{titles.of_model(model)}, {titles.of_set(inside)} as ID"
        varied = any(row.get("setting") for row in own)
        if len({row["ood"] for row in own}) > 1 and (name == "ablation" or not varied):
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
        printed, mark = paper.beside(row), ""
        if printed is None:
            printed, mark = paper.stand_in(row), DAGGER
        figures: list[str] = []
        for metric in ("auroc", "tnr95", "accuracy"):
            theirs = None if printed is None else getattr(printed, metric)
            figures += [_with_spread(row, metric), *_compare(row[metric], theirs, mark)]
        fitted = f"{row.get('n_fit_id') or 0:,} / {row.get('n_fit_ood') or 0:,}"
        judged = f"{row['n_id']:,} / {row['n_ood']:,}"
        lines.append((titles.of_set(row["ood"]), label_of(row, apart), *figures, judged, fitted))
    return Table(caption, columns, tuple(lines), names=2)


def _run_of(row: Row) -> tuple[Any, ...]:
    """What rows share that were measured in one go."""
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
        theirs = paper.timing(row["method"])
        ratio = None if theirs is None or base is None else theirs.latency_ms / base
        lines.append(
            (
                titles.of_method(row["method"]),
                _percent(row["auroc"]),
                _number(row["fit_seconds"]),
                _number(None if theirs is None else theirs.fit_seconds),
                _number(row["latency_ms"]),
                _number(None if theirs is None else theirs.latency_ms),
                _number(row["ratio"], 2),
                _number(ratio, 2),
                _number(row["passes_per_image"]),
                _number(row["peak_mb"], 0),
            )
        )
    sets = f"{titles.of_set(first['id'])} against {titles.of_set(first['ood'])}"
    machines = " and ".join(dict.fromkeys(str(row["machine"]) for row in rows))
    where = f"{_span(rows, 'threads')} threads, {machines}, median of {_span(rows, 'repeats')} images"
    caption = f"{', '.join([titles.of_model(first['model']), sets, *_run_words(first, apart)])}; {where}"
    return Table(caption, columns, tuple(lines), names=1)


def told_apart_by(rows: Sequence[Row]) -> tuple[str, ...]:
    """Which of seed and limit rows have to be told apart by: those that are not the same for all of them."""
    return tuple(key for key in ("seed", "limit") if len({row.get(key) for row in rows}) > 1)


def label_of(row: Row, apart: Sequence[str] = ()) -> str:
    """What a row is called in tables: its method, what is varied besides, and what it is told apart by."""
    setting = [str(row["setting"])] if row.get("setting") else []
    return ", ".join([titles.of_method(row["method"]), *setting, *_run_words(row, apart)])


def _run_words(row: Row, apart: Sequence[str]) -> list[str]:
    return [f"{key} {row[key]}" for key in apart if row.get(key) is not None]


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


def _summary(rows: Sequence[Row]) -> str:
    weights = sorted({str(row["weights"]) for row in rows if row.get("weights")})
    sets = list(dict.fromkeys(titles.of_set(row[key]) for row in rows for key in ("id", "ood")))
    limits = sorted({row["limit"] for row in rows if row.get("limit")})
    some = "A quick look" if all(row.get("limit") for row in rows) else "Some rows are a quick look"
    quick = f" {some}: at most {limits[-1]} images of a set." if limits else ""
    return (
        f"{len(rows)} rows of {len({row['experiment'] for row in rows})} experiments, on {', '.join(sets)}; "
        f"weights: {', '.join(weights)}.{quick}"
    )


def to_markdown(sections: Iterable[Section], rows: Sequence[Row], plots_folder: str) -> str:
    """Return the report as Markdown."""
    parts = [
        "# Results",
        "Made by `nmd bench report` from a results file; do not edit by hand.",
        _summary(rows),
        _LEGEND,
    ]
    for section in sections:
        parts += [f"## {section.name}: {section.title}", f"The paper's {section.reference}."]
        parts += [f"![{plot.alt}]({plots_folder}/{plot.name}.svg)" for plot in section.plots]
        parts += [text for text in (section.remark, section.gaps) if text]
        for table in section.tables:
            parts += [f"**{table.caption}**", _markdown_table(table)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(table: Table) -> str:
    marks = ["---" if place < table.names else "---:" for place in range(len(table.columns))]
    lines = [table.columns, marks, *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_html(sections: Iterable[Section], rows: Sequence[Row]) -> str:
    """Return the report as one HTML page that needs nothing from outside."""
    body: list[str] = [f"<h1>Results</h1><p>{_text(_summary(rows))}</p><p>{_text(_LEGEND)}</p>"]
    sections = list(sections)
    links = " · ".join(f'<a href="#{section.name}">{_text(section.name)}</a>' for section in sections)
    body.append(f"<nav>{links}</nav>")
    for section in sections:
        body.append(f'<h2 id="{section.name}">{_text(section.name)}: {_text(section.title)}</h2>')
        body.append(f"<p>The paper's {_text(section.reference)}.</p>")
        body += [f'<figure role="img" aria-label="{_text(plot.alt)}">{plot.svg}</figure>' for plot in section.plots]
        body += [f"<p>{_text(text)}</p>" for text in (section.remark, section.gaps) if text]
        body += [_html_table(table) for table in section.tables]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>neuralmean: results</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    lines = []
    for row in table.rows:
        cells = (
            f"<td{' class=n' if place >= table.names else ''}>{_text(cell)}</td>" for place, cell in enumerate(row)
        )
        lines.append(f"<tr>{''.join(cells)}</tr>")
    caption = f"<caption>{_text(table.caption)}</caption>"
    return f"<div class=t><table>{caption}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"


def _text(value: Any) -> str:
    return escaping.escape(str(value))


_STYLE = """
:root{color-scheme:light}body{font:16px/1.5 system-ui,sans-serif;margin:0;color:#1c1c1c;background:#fff}
main{max-width:72rem;margin:0 auto;padding:1.5rem}h2{margin-top:3rem;border-bottom:1px solid #ddd}
nav{margin:1rem 0}a{color:#0b5cad}.t{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:14px}caption{text-align:left;font-weight:600;padding:.4rem 0}
th,td{padding:.25rem .6rem;border-bottom:1px solid #e4e4e4;text-align:left;white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}th{border-bottom:2px solid #999}
figure{margin:1rem 0}figure svg{max-width:100%;height:auto}
"""
