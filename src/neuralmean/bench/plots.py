"""The paper's figures, drawn from rows: bars of AUROC, scatter of mini-batches, layers, time against AUROC.

Plots are returned as SVG text; the same rows give the same text. A plot shows one run of a model, the one with the
largest limit and the first seed, as its heading says; tables show all runs.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from neuralmean.bench import titles
from neuralmean.bench.results import Row
from neuralmean.errors import MissingExtraError

GREEN, RED, BLUE, PINK = "#1b7f3b", "#c62828", "#0b5fa5", "#9c4f96"  # the colours of the HTML report
PEERS = ("#cfd6df", "#b3bdc9", "#98a4b3", "#7f8c9c", "#667485")  # greys, so that our methods stand out
OURS = ("#7cc0f5", "#3a8fd0", "#0b5fa5", "#08406f")
TEXT, AXIS, GRID = "#181b20", "#9aa3af", "#e8ebef"
MOST_BARS = 10  # for one OOD set; for more methods, a plot of means is easier to read


@dataclass(frozen=True)
class Plot:
    """A plot: its file name, alternative text, and the SVG."""

    name: str
    alt: str
    svg: str


def draw(experiment: str, rows: Sequence[Row]) -> list[Plot]:
    """Return the plots of one experiment, given its rows."""
    if experiment in ("variance", "false-alarms", "readings", "sample-size"):
        return []
    crowded = len({row["method"] for row in rows}) > MOST_BARS
    found: list[Plot] = []
    for model, inside in dict.fromkeys((row["model"], row["id"]) for row in rows):
        own = [row for row in rows if (row["model"], row["id"]) == (model, inside)]
        shown, which = one_run(own)
        if experiment in ("batch-size", "untrained", "layers", "latency"):
            drawn = _of_one_model(experiment, shown, which)
            found += [replace(plot, name=f"{plot.name}-{model}-{inside}") for plot in drawn] if found else drawn
        else:
            title = f"{titles.of_model(model)}, {titles.of_set(inside)} as ID{which}"
            bars = _ladder if experiment == "ablation" or crowded else _bars
            found.append(bars(f"{experiment}-{model}-{inside}", title, shown))
    return found


def one_run(rows: Sequence[Row]) -> tuple[list[Row], str]:
    """Return the rows with the largest limit and the first seed, and a text that names both, if there is a choice."""
    limit = max(rows, key=_limit_of).get("limit")
    kept = [row for row in rows if row.get("limit") == limit]
    seed = min(row["seed"] for row in kept)
    words = f", seed {seed}" if len({row["seed"] for row in rows}) > 1 else ""
    if limit is not None and any(row.get("limit") != limit for row in rows):
        words += f", limit {limit}"
    return [row for row in kept if row["seed"] == seed], words


def _limit_of(row: Row) -> float:
    return math.inf if row.get("limit") is None else float(row["limit"])


def _of_one_model(experiment: str, rows: Sequence[Row], which: str) -> list[Plot]:
    if experiment == "layers":
        return [_layers(rows, which)]
    return [_latency(rows, which)] if experiment == "latency" else _scatters(experiment, rows, which)


def _bars(name: str, title: str, rows: Sequence[Row]) -> Plot:
    """AUROC of every method for every OOD set, as in figures 4 to 6."""
    own = [row for row in rows if row["auroc"] is not None]
    oods = list(dict.fromkeys(row["ood"] for row in own))
    methods = list(dict.fromkeys(row["method"] for row in own))
    cells = {(row["method"], row["ood"]): row for row in own}
    figure, axes = _figure(width=max(6.0, 1.2 * len(oods) * max(1, len(methods) / 5)), height=3.2)
    width = 0.8 / max(1, len(methods))
    colours = _colours(methods)
    for place, method in enumerate(methods):
        there = [(x, cells[method, ood]) for x, ood in enumerate(oods) if (method, ood) in cells]
        axes.bar(
            [x + (place - (len(methods) - 1) / 2) * width for x, _ in there],
            [row["auroc"] for _, row in there],
            width,
            color=colours[method],
            yerr=[row.get("auroc_std", 0.0) for _, row in there],
            label=titles.of_method(method),
            error_kw={"linewidth": 0.8},
        )
    axes.set_xticks(range(len(oods)), [titles.of_set(ood) for ood in oods])
    axes.axhline(50, color="#999", linewidth=0.8, linestyle=":")
    axes.set_ylim(min(40.0, *(row["auroc"] for row in own)) - 2, 101)
    axes.set_ylabel("AUROC, %")
    axes.set_title(title, fontsize=10)
    figure.legend(fontsize=7, ncols=min(6, len(methods)), loc="outside lower center", frameon=False)
    return Plot(name, f"Bars of AUROC by method and OOD set, {title}", _svg(figure))


def _colours(methods: Sequence[str]) -> dict[str, str]:
    """Return a colour for each method: shades of blue for ours, of grey for peers."""
    found: dict[str, str] = {}
    for ours, shades in ((True, OURS), (False, PEERS)):
        own = [method for method in methods if _is_ours(method) == ours]
        found.update({method: shades[place % len(shades)] for place, method in enumerate(own)})
    return found


def _is_ours(method: str) -> bool:
    return method.startswith("ours") or method in ("typicality", "guided")


def _ladder(name: str, title: str, rows: Sequence[Row]) -> Plot:
    """Mean AUROC over the OOD sets: one bar for each peer, each of our methods and, if measured, each part of ours."""
    found: dict[str, list[float]] = {}
    ours: dict[str, bool] = {}
    for row in rows:
        if row["auroc"] is not None:
            setting = row.get("setting")
            label = setting or titles.of_method(row["method"])
            found.setdefault(label, []).append(row["auroc"])
            ours[label] = _is_ours(row["method"])
    means = {label: sum(values) / len(values) for label, values in found.items()}
    figure, axes = _figure(width=7.0, height=1.0 + 0.22 * len(means))
    axes.barh(range(len(means)), list(means.values()), color=[BLUE if ours[label] else PEERS[1] for label in means])
    for place, value in enumerate(means.values()):
        axes.annotate(
            f"{value:.1f}", (value, place), fontsize=7, va="center", xytext=(3, 0), textcoords="offset points"
        )
    axes.set_yticks(range(len(means)), list(means), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(min(60.0, *means.values(), 100.0) - 2, 101)
    axes.set_xlabel("mean AUROC over the OOD sets, %", fontsize=8)
    axes.set_title(title, fontsize=10)
    return Plot(name, f"Mean AUROC of peers and of ours, {title}", _svg(figure))


def _scatters(experiment: str, rows: Sequence[Row], which: str) -> list[Plot]:
    """Scores of mini-batches, one panel per batch size, as in figures 3 and 8."""
    found = []
    for kind, ood in dict.fromkeys((row["kind"], row["ood"]) for row in rows):
        own = [row for row in rows if (row["kind"], row["ood"]) == (kind, ood)]
        own.sort(key=lambda row: row["batch_size"])
        figure, axes = _figure(width=2.2 * len(own), height=2.6, columns=len(own))
        for panel, row in zip(axes if len(own) > 1 else [axes], own, strict=True):
            panel.scatter(
                range(len(row["id_scores"])), row["id_scores"], s=5, color=GREEN, label=titles.of_set(row["id"])
            )
            panel.scatter(range(len(row["ood_scores"])), row["ood_scores"], s=5, color=RED, label=titles.of_set(ood))
            panel.set_title(f"batch of {row['batch_size']}: {row['auroc']:.1f}", fontsize=9)
            panel.tick_params(labelsize=7)
            panel.set_xticks([])
        first = axes[0] if len(own) > 1 else axes
        first.set_ylabel("mean |NMD|", fontsize=8)
        first.legend(fontsize=7, frameon=False)
        words = "random weights, " + kind if experiment == "untrained" else "trained"
        figure.suptitle(f"{titles.of_model(own[0]['model'])}, {words}{which}; AUROC above each panel", fontsize=9)
        alt = f"Scores of mini-batches of {titles.of_set(own[0]['id'])} and {titles.of_set(ood)}, {words}"
        found.append(Plot(f"{experiment}-{ood}-{kind.replace(' ', '-')}", alt, _svg(figure)))
    return found


def _layers(rows: Sequence[Row], which: str) -> Plot:
    """Importance of each layer (top) and AUROC of the first k layers (bottom), as in figure 7."""
    oods = list(dict.fromkeys(row["ood"] for row in rows))
    figure, axes = _figure(width=4.5 * len(oods), height=5.0, columns=len(oods), lines=2, squeeze=False)
    for column, (ood, colour) in enumerate(zip(oods, (BLUE, PINK, GREEN, RED) * 3, strict=False)):
        own = sorted((row for row in rows if row["ood"] == ood), key=lambda row: row["layers"])
        importance: dict[str, float] = next((row["importance"] for row in own if "importance" in row), {})
        top, bottom = axes[0][column], axes[1][column]
        top.bar(range(1, len(importance) + 1), list(importance.values()), color=colour)
        words = f"{titles.of_model(own[0]['model'])}, {titles.of_set(own[0]['id'])} against {titles.of_set(ood)}{which}"
        top.set_title(words, fontsize=10)
        top.set_ylabel("mean |coefficient|", fontsize=8)
        bottom.plot([row["layers"] for row in own], [row["auroc"] for row in own], "o-", color=colour, markersize=3)
        bottom.set_xlabel("first k layers", fontsize=8)
        bottom.set_ylabel("AUROC, %", fontsize=8)
    alt = "Importance of each layer, and AUROC when only the first k layers are used"
    return Plot("layers", alt, _svg(figure))


def _latency(rows: Sequence[Row], which: str) -> Plot:
    """AUROC against the time to fit and against the time for one image, as in figure 1."""
    rows = [row for row in rows if row["auroc"] is not None]  # the other rows are times of a frozen detector
    figure, axes = _figure(width=9.0, height=4.6, columns=2)
    panels = (("fit_seconds", "time to fit, s"), ("ratio", "one image, times the plain forward pass"))
    for panel, (key, label) in zip(axes, panels, strict=True):
        for row in rows:
            ours = _is_ours(row["method"])
            panel.scatter([max(row[key], 0.1)], [row["auroc"]], color=RED if ours else BLUE, s=18)
        if key == "fit_seconds" or max(row[key] for row in rows) > 5:
            panel.set_xscale("log")
        _label(panel, [(max(row[key], 0.1), row["auroc"], titles.of_method(row["method"])) for row in rows])
        panel.set_xlabel(label, fontsize=8)
        panel.set_ylabel("AUROC, %", fontsize=8)
        panel.set_title(f"{titles.of_model(rows[0]['model'])}{which}", fontsize=9)
    axes[1].axvline(1.0, color="#999", linestyle=":", linewidth=0.8)
    alt = "AUROC against the time to fit and the time for one image; the dotted line is the plain forward pass"
    return Plot("latency", alt, _svg(figure))


def _label(panel: Any, points: Sequence[tuple[float, float, str]]) -> None:
    """Place the label of each point on the side with room."""
    panel.margins(x=0.2, y=0.1)
    panel.figure.draw_without_rendering()  # fixes the layout, which positions depend on
    scale = 72 / panel.figure.dpi  # in points from here on
    places = [panel.transData.transform(point[:2]) * scale for point in points]
    right, top = panel.bbox.xmax * scale, panel.bbox.ymax * scale - 5
    taken = [(x - 3, x + 3, y) for x, y in places]
    for (x, y, text), (at, base) in sorted(zip(points, places, strict=True), key=lambda pair: -pair[0][1]):
        width = 3.9 * len(text)  # approximate size of a letter at font size 7
        spots = [
            (left, base + lift)
            for lift in sorted(range(-80, 81, 2), key=abs)
            for left in (at + 5, at - 5 - width)
            if base + lift < top and left + width < right
        ]
        free = (
            spot for spot in spots
            if all(abs(spot[1] - y) > 7.5 or spot[0] > end or spot[0] + width < start for start, end, y in taken)
        )  # fmt: skip
        left, height = next(free, (at + 5, base))
        taken.append((left, left + width, height))
        line = {"arrowstyle": "-", "color": "#aaa", "linewidth": 0.5} if abs(height - base) > 8 else None
        panel.annotate(
            text, (x, y), fontsize=7, xytext=(left - at, height - base - 2.5), textcoords="offset points",
            arrowprops=line,
        )  # fmt: skip


def _figure(*, width: float, height: float, columns: int = 1, lines: int = 1, squeeze: bool = True) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "Drawing plots needs the 'matplotlib' package. Install it with `pip install neuralmean[bench]`."
        ) from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)  # no global state, no display
    axes = figure.subplots(lines, columns, squeeze=squeeze)
    for panel in figure.axes:
        panel.spines[["top", "right"]].set_visible(False)
        panel.spines[["bottom", "left"]].set_color(AXIS)
        panel.tick_params(colors=TEXT, color=AXIS)
        panel.grid(axis="y", color=GRID, linewidth=0.8)
        panel.set_axisbelow(True)
    return figure, axes


def _svg(figure: Any) -> str:
    import matplotlib as mpl

    text = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "neuralmean", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    whole = text.getvalue()
    return whole[whole.index("<svg") :]
