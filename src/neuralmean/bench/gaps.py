"""Names the cells of the paper's tables that were not measured, in sentences generated from the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from neuralmean.bench import titles
from neuralmean.bench.experiments import paper
from neuralmean.bench.experiments.paper import Printed
from neuralmean.bench.results import Row


def not_measured(experiment: str, rows: Sequence[Row]) -> str:
    """Name the cells of the paper that an experiment has no row for; empty if there are none.

    A cell for ResNet-34 that has a figure of a smaller residual network counts as measured.

    Args:
        experiment: Its name.
        rows: Its rows.
    """
    there = {
        cell for row in rows for cell in (paper.printed_for(row), paper.printed_for_resnet34(row)) if cell is not None
    }
    cells = [cell for cell in paper.PRINTED if cell.experiment == experiment]
    sentences = []
    for where in dict.fromkeys(cell.where for cell in cells):
        own = [cell for cell in cells if cell.where == where]
        lost = {cell for cell in own if cell not in there}
        if lost:
            sentences.append(f"Not measured here, of the paper's {where}: {_group(own, lost)}.")
    if experiment == "latency":
        timed = {row["method"] for row in rows} | {"plain"}
        slow = [titles.of_method(line.method) for line in paper.TIMINGS if line.method not in timed]
        sentences += [f"Not measured here, of the paper's {paper.TIMINGS_IN}: {_listed(slow)}."] if slow else []
    return " ".join(sentences)


def _group(cells: Sequence[Printed], lost: set[Printed]) -> str:
    """Group cells by what they share: first whole models, then whole sets, whole methods, and finally single cells."""
    if len(lost) == len(cells):
        return "all of it"
    case = _case_of(cells)
    axes: tuple[Callable[[Printed], str], ...] = (
        case,
        lambda cell: titles.of_set(cell.ood),
        lambda cell: titles.of_method(cell.method),
    )
    rest, parts = list(cells), []
    for number, axis in enumerate(axes):
        values = dict.fromkeys(axis(cell) for cell in rest)
        whole = [value for value in values if all(cell in lost for cell in rest if axis(cell) == value)]
        if whole:
            parts.append(_listed(whole) + ("" if number == 0 else _with(cells, rest, case)))
            rest = [cell for cell in rest if axis(cell) not in whole]
    parts += [f"{axes[2](cell)} on {axes[1](cell)} with {case(cell)}" for cell in rest if cell in lost]
    return "; ".join(parts)


def _case_of(cells: Sequence[Printed]) -> Callable[[Printed], str]:
    """Return a function that names a cell's model, with the set it was trained on if the table has several."""
    one = len({cell.id for cell in cells}) == 1

    def name(cell: Printed) -> str:
        return titles.of_model(cell.model) + ("" if one else f" ({titles.of_set(cell.id)} as ID)")

    return name


def _with(cells: Sequence[Printed], rest: Sequence[Printed], case: Callable[[Printed], str]) -> str:
    """Name the models for which sets or methods are missing, if the table has more than one."""
    every, left = (list(dict.fromkeys(case(cell) for cell in some)) for some in (cells, rest))
    if len(every) == 1:
        return ""
    return " with every model" if len(left) == len(every) else f" with {_listed(left)}"


def _listed(names: Sequence[str]) -> str:
    """Join names.

    Example:
        >>> _listed(["a", "b", "c"])
        'a, b and c'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
