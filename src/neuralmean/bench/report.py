"""Turns a results file into a page: every experiment's figures next to the paper's, with the difference.

Writes HTML (one file with its plots) and Markdown (plots in a folder next to it).
"""

from __future__ import annotations

import html as escaping
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuralmean.bench import experiments, gaps, plots, titles
from neuralmean.bench.experiments.remarks import REMARKS
from neuralmean.bench.results import Row, read_rows
from neuralmean.bench.tables import DAGGER, Table, make_tables
from neuralmean.errors import InputError
from neuralmean.files.atomic import write_atomically

_LEGEND = (
    "AUROC, TNR95 (share of OOD rejected when 95 % of ID is kept) and detection accuracy in percent; higher is better. "
    "Brackets hold 95 % bootstrap intervals; ± is the standard deviation over draws. ODIN and Mahalanobis are tuned on a draw "
    "of at most 100 images of each kind: another draw can change their AUROC by several points, which brackets do not contain. "
    f"{DAGGER}: the paper's figure is for ResNet-34, whose weights were not available; ours is for the model named. "
    "imagenet-crop, imagenet-resize, lsun-crop and lsun-resize are the sets of the ODIN release that the paper calls ImageNet-C, "
    "ImageNet-R, LSUN-C and LSUN-R; today ImageNet-C and ImageNet-R mean other sets."
)

_LONG = 20  # rows; longer tables are collapsed in Markdown


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
        results: The file written by `experiments.run`.
        html: Path of the HTML page.
        markdown: Path of the Markdown page; its plots go to a folder `<stem>-plots` next to it.
    """
    if html is None and markdown is None:
        raise InputError("Expected a path as `html` or `markdown`, but both are None.")
    rows = read_rows(results)
    if not rows:
        raise InputError(f"Expected rows in {str(results)!r}, but it has none yet. Run `nmd bench run` first.")
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
                tuple(make_tables(name, own)),
                tuple(plots.draw(name, own)),
            )
        )
    return sections


def in_order(experiment: experiments.Experiment, rows: Sequence[Row]) -> list[Row]:
    """Sort rows by the experiment's cases, methods and OOD sets."""
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
        parts += [f"## {section.name}: {section.title}", _where(section)]
        parts += [f"![{plot.alt}]({plots_folder}/{plot.name}.svg)" for plot in section.plots]
        parts += [text for text in (section.remark, section.gaps) if text]
        for table in section.tables:
            parts += _folded(table) if len(table.rows) > _LONG else [f"**{table.caption}**", _markdown_table(table)]
    return "\n\n".join(parts) + "\n"


def _folded(table: Table) -> list[str]:
    """Return a long table as a collapsed block."""
    summary = f"<summary>{escaping.escape(table.caption)}: {len(table.rows)} rows</summary>"
    return [f"<details>\n{summary}", _markdown_table(table), "</details>"]


def _where(section: Section) -> str:
    """Name the part of the paper that an experiment reproduces, or say that it is not in the paper."""
    first, rest = section.reference[:1], section.reference[1:]
    if section.reference.startswith("not in the paper"):
        return f"{first.upper()}{rest}."
    return f"The paper's {section.reference}."


def _markdown_table(table: Table) -> str:
    marks = ["---" if place < table.names else "---:" for place in range(len(table.columns))]
    lines = [table.columns, marks, *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def to_html(sections: Iterable[Section], rows: Sequence[Row]) -> str:
    """Return the report as one self-contained HTML page."""
    body: list[str] = [f"<h1>Results</h1><p>{_text(_summary(rows))}</p><p>{_text(_LEGEND)}</p>"]
    sections = list(sections)
    links = " · ".join(f'<a href="#{section.name}">{_text(section.name)}</a>' for section in sections)
    body.append(f"<nav>{links}</nav>")
    for section in sections:
        body.append(f'<h2 id="{section.name}">{_text(section.name)}: {_text(section.title)}</h2>')
        body.append(f"<p>{_text(_where(section))}</p>")
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
:root{color-scheme:light}body{font:16px/1.5 system-ui,sans-serif;margin:0;color:#181b20;background:#f4f5f7}
main{max-width:72rem;margin:0 auto;padding:1.5rem}h2{margin-top:3rem;border-bottom:1px solid #dde1e7}
nav{margin:1rem 0}a{color:#0b5fa5}
.t,figure{overflow-x:auto;margin:1rem 0;padding:.5rem 1rem;background:#fff;border:1px solid #dde1e7;border-radius:8px}
table{border-collapse:collapse;font-size:14px}caption{text-align:left;font-weight:600;padding:.4rem 0}
th,td{padding:.25rem .6rem;border-bottom:1px solid #e4e4e4;text-align:left;white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}th{border-bottom:2px solid #999}
figure svg{max-width:100%;height:auto}
"""
