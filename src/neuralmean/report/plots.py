"""The report's plots, each as one SVG drawing. Set 0 is ID; every set keeps its colour, dash and marker throughout.

Wide plots are drawn twice, for desktop and phone: the font size stays the same, and CSS shows the one that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from neuralmean.report.analysis import Comparison, Histogram
from neuralmean.report.gather import Scores
from neuralmean.report.svg import Box, Canvas, Scale, label, names_axis, names_room, shorten, x_axis, y_axis
from neuralmean.stats.metrics import RocCurve

WIDE, NARROW, HALF = 900, 360, 390
_SERIES = 7  # colours of the palette, after that of ID


def series(index: int) -> str:
    """Return the CSS classes of a set: 0 is ID."""
    return "s0" if index == 0 else f"s{(index - 1) % _SERIES + 1} d{(index - 1) // _SERIES % 3}"


def percent(share: float) -> str:
    """Format a share of 0 to 1 in percent.

    Example:
        >>> percent(0.0512), percent(1.0), percent(0.9999)
        ('5.1 %', '100 %', '99.9 %')
    """
    value = 100 * share
    if 0 < share < 1:  # less than all must not be rounded to 100 %
        value = min(max(value, 0.1), 99.9)
    return f"{value:.1f} %" if 0 < share < 1 else f"{value:.0f} %"


def short(value: float) -> str:
    """Format a score with three digits.

    Example:
        >>> short(-7.62249)
        '\u22127.62'
    """
    return label(float(f"{value:.3g}"))


def both_widths(draw: Callable[..., str], *arguments: object) -> str:
    """Draw a plot for desktop and phone."""
    return f"{draw(*arguments, width=WIDE)}{draw(*arguments, width=NARROW)}"


def _fit(width: int) -> str:
    return "wide" if width == WIDE else "narrow"


def draw_histogram(
    names: Sequence[str], found: Histogram, flagged: Sequence[float], threshold: float, *, width: int
) -> str:
    """One row of bars per set over a common axis of scores, with ID as a shadow behind each and the threshold across all."""
    row, top = (92, 34) if width == WIDE else (80, 34)
    box = Box(12, top, width - 12, top + row * len(names))
    canvas = Canvas(width, box.bottom + 46)
    scale = Scale(float(found.edges[0]), float(found.edges[-1]), box.left, box.right)
    cut = scale(threshold)
    canvas.rect(cut, box.top - 6, box.right - cut, box.bottom - box.top + 6, "flagged")
    pixels = [scale(float(edge)) for edge in found.edges]
    for index, name in enumerate(names):
        base = box.top + row * (index + 1)
        height = row - 32
        if index:
            _outline(canvas, pixels, found.shares[0], base, height)
        _bars(canvas, found, index, pixels, base, height, threshold, name)
        canvas.line(box.left, base, box.right, base, "axis")
        canvas.text(
            box.left,
            base - height - 12,
            shorten(name, 46 if width == WIDE else 22),
            f"name {series(index)}",
            title=name,
        )
        text = f"{percent(flagged[index])} {'false alarms' if index == 0 else 'caught'}"
        if found.above[index] >= 0.005 and width == WIDE:
            text = f"{percent(found.above[index])} beyond the axis · {text}"
        canvas.text(box.right - 2, base - height - 12, text, "value", anchor="end")
    canvas.line(cut, box.top - 10, cut, box.bottom, "threshold", title=f"Threshold {threshold:.5g}")
    right = cut > (box.left + box.right) / 2
    words = (
        f"← kept\u2003threshold {label(threshold)}\u2003flagged →" if width == WIDE else f"threshold {label(threshold)}"
    )
    anchor = "middle" if box.left + 130 < cut < box.right - 130 else "end" if right else "start"
    canvas.text(cut, box.top - 16, words, "caption strong", anchor=anchor)
    x_axis(canvas, box, scale, "score: higher = less like the training data", count=8 if width == WIDE else 5)
    return canvas.render(plot="scores", description=_tell(names, flagged), kind=_fit(width))


def _tell(names: Sequence[str], flagged: Sequence[float]) -> str:
    parts = [f"{name}: {percent(share)} flagged" for name, share in zip(names, flagged, strict=True)]
    return "Histograms of the scores of each set with the threshold. " + "; ".join(parts)


def _tallest(shares: Scores) -> float:
    """Return the height to scale bars by: end bins count only if all others are empty."""
    inner = float(shares[1:-1].max()) if len(shares) > 2 else 0.0
    return inner or float(shares.max()) or 1.0


def _outline(canvas: Canvas, pixels: Sequence[float], shares: Scores, base: float, height: float) -> None:
    tallest = _tallest(shares)
    points = [(pixels[0], base)]
    for index, share in enumerate(shares):
        y = base - height * min(share / tallest, 1.0)
        points += [(pixels[index], y), (pixels[index + 1], y)]
    canvas.path([*points, (pixels[-1], base)], "shadow", closed=True)


def _bars(
    canvas: Canvas,
    found: Histogram,
    index: int,
    pixels: Sequence[float],
    base: float,
    height: float,
    threshold: float,
    name: str,
) -> None:
    shares, edges = found.shares[index], found.edges
    tallest = _tallest(shares)
    for place, share in enumerate(shares):
        if share <= 0:
            continue
        tall = height * min(share / tallest, 1.0)
        first, last = place == 0 and found.below[index] > 0, place == len(shares) - 1 and found.above[index] > 0
        span = f"up to {edges[1]:.4g}" if first else f"above {edges[-2]:.4g}" if last else ""
        span = span or f"{edges[place]:.4g} to {edges[place + 1]:.4g}"
        side = "over" if edges[place] >= threshold else "under"
        x, wide = pixels[place], pixels[place + 1] - pixels[place]
        kind = f"bar {side} {series(index)}"
        canvas.rect(x + 0.4, base - tall, wide - 0.8, tall, kind, title=f"{name}: {percent(float(share))} score {span}")


def draw_roc(comparisons: Sequence[Comparison], points: Sequence[tuple[float, float]]) -> str:
    """ROC curves with ID as the positive class, and where the threshold puts each set.

    Args:
        comparisons: One per OOD set.
        points: Share of the OOD set and of ID that is kept at the threshold, for each.
    """
    box = Box(52, 34, HALF - 14, HALF - 34)
    canvas = Canvas(HALF, HALF + 14)
    x, y = Scale(0, 100, box.left, box.right), Scale(0, 100, box.bottom, box.top)
    y_axis(canvas, box, y, "ID images kept (true positives)", unit=" %")
    x_axis(canvas, box, x, "OOD images let through (false positives)", count=5, unit=" %", grid=True)
    canvas.line(x(0), y(0), x(100), y(100), "guess", title="Guessing")
    for index, found in enumerate(comparisons, start=1):
        title = f"{found.name}: AUROC {found.figures.auroc:.2f} %"
        canvas.path(_steps(found.roc, x, y), f"curve {series(index)}", title=title)
    for index, (found, (ood_kept, id_kept)) in enumerate(zip(comparisons, points, strict=True), start=1):
        words = f"{found.name} at the threshold: {percent(ood_kept)} of OOD let through, {percent(id_kept)} of ID kept"
        canvas.marker(x(100 * ood_kept), y(100 * id_kept), index - 1, f"mark {series(index)}", size=5, title=words)
    text = "; ".join(f"{found.name}: AUROC {found.figures.auroc:.1f} %" for found in comparisons)
    return canvas.render(plot="roc", description=f"ROC curves. {text}")


def _steps(roc: RocCurve, x: Scale, y: Scale) -> list[tuple[float, float]]:
    return [(x(100 * fp), y(100 * tp)) for fp, tp in zip(roc.ood_kept.tolist(), roc.id_kept.tolist(), strict=True)]


def draw_batches(comparisons: Sequence[Comparison]) -> str:
    """AUROC against the number of images that are judged together."""
    sizes = sorted({size for found in comparisons for size in found.by_batch})
    lowest = min(interval.low for found in comparisons for _, interval in found.by_batch.values())
    box = Box(52, 34, HALF - 14, HALF - 34)
    canvas = Canvas(HALF, HALF + 14)
    y = Scale(_floor(lowest), 100, box.bottom, box.top)
    step = (box.right - box.left) / max(len(sizes), 1)
    places = {size: box.left + step * (index + 0.5) for index, size in enumerate(sizes)}
    y_axis(canvas, box, y, "AUROC", unit=" %")
    canvas.line(box.left, box.bottom, box.right, box.bottom, "axis")
    for size, place in places.items():
        canvas.text(place, box.bottom + 17, str(size), "tick", anchor="middle")
    canvas.text((box.left + box.right) / 2, box.bottom + 36, "images judged together", "caption", anchor="middle")
    for index, found in enumerate(comparisons, start=1):
        # Slightly shifted, so that intervals of equally good sets stay readable.
        shift = (index - (len(comparisons) + 1) / 2) * 4
        points = [(places[size] + shift, y(value)) for size, (value, _) in sorted(found.by_batch.items())]
        canvas.path(points, f"curve {series(index)}")
        for size, (value, interval) in sorted(found.by_batch.items()):
            place = places[size] + shift
            canvas.line(place, y(interval.low), place, y(interval.high), f"whisker {series(index)}")
            words = f"{found.name}, {size} together: AUROC {value:.1f} % ({interval.low:.1f} to {interval.high:.1f})"
            canvas.marker(place, y(value), index - 1, f"mark {series(index)}", size=4.5, title=words)
    return canvas.render(plot="batches", description="AUROC against the number of images judged together")


def _floor(lowest: float) -> float:
    """A round number below the lowest AUROC, at most 90: so that the axis does not exaggerate small differences."""
    return float(max(0, min(90, int(lowest // 10) * 10)))


def draw_layers(names: Sequence[str], sets: Mapping[str, Scores], spread: Scores, *, width: int) -> str:
    """Mean contribution of each layer to the scores of each OOD set, minus that to the ID scores.

    Args:
        names: Names of the layers.
        sets: Excess over ID by name of the set, each of shape (L,).
        spread: Standard deviation of ID images' contributions, shape (L,).
        width: `WIDE` or `NARROW`.
    """
    box = Box(52, 34, width - 14, 270)
    canvas = Canvas(width, box.bottom + names_room(names))
    places = _places(box, len(names))
    low = min(float(min(values.min() for values in sets.values())), -float(spread.max()), 0.0)
    high = max(float(max(values.max() for values in sets.values())), float(spread.max()), low + 1e-9)
    y = Scale(low - 0.04 * (high - low), high + 0.06 * (high - low), box.bottom, box.top)
    y_axis(canvas, box, y, "contribution to the score, compared with ID")
    upper = [(x, y(float(one))) for x, one in zip(places, spread, strict=True)]
    lower = [(x, y(-float(one))) for x, one in zip(places, spread, strict=True)]
    canvas.path([*upper, *reversed(lower)], "band", closed=True, title="ID images: one standard deviation either way")
    canvas.line(box.left, y(0), box.right, y(0), "zero s0", title="ID images: the mean")
    for index, (name, values) in enumerate(sets.items(), start=1):
        points = [(x, y(float(value))) for x, value in zip(places, values, strict=True)]
        canvas.path(points, f"curve {series(index)}")
        for (x, place), layer, value in zip(points, names, values, strict=True):
            words = f"{layer}: {signed(float(value))} for {name}, compared with ID" if width == WIDE else ""
            canvas.marker(x, place, index - 1, f"mark {series(index)}", size=_dot(len(names), width), title=words)
    names_axis(canvas, box, places, names)
    text = "; ".join(f"{name}: most from {names[int(np.argmax(values))]}" for name, values in sets.items())
    return canvas.render(plot="layers", description=f"Contribution of each layer. {text}", kind=_fit(width))


def signed(value: float) -> str:
    """Format a difference with its sign."""
    return f"{value:+.3g}".replace("-", "\u2212")


def _dot(count: int, width: int) -> float:
    """Return the size of the markers of a plot with `count` of them."""
    return 4.2 if count * 22 < width else 3.0 if count * 10 < width else 2.0


def draw_depth(names: Sequence[str], sets: Mapping[str, Scores], *, width: int) -> str:
    """AUROC of the contributions of the first layers alone."""
    box = Box(52, 34, width - 14, 210)
    canvas = Canvas(width, box.bottom + names_room(names))
    places = _places(box, len(names))
    low, high = (float(edge([edge(values) for values in sets.values()])) for edge in (np.min, np.max))
    y = Scale(_floor(min(low, 50.0)), 100 if high <= 100 else high, box.bottom, box.top)
    y_axis(canvas, box, y, "AUROC with the layers up to here", unit=" %")
    for index, (name, values) in enumerate(sets.items(), start=1):
        points = [(x, y(float(value))) for x, value in zip(places, values, strict=True)]
        canvas.path(points, f"curve {series(index)}")
        for (x, place), layer, value in zip(points, names, values, strict=True):
            words = f"{name}: AUROC {value:.1f} % with the layers up to {layer}" if width == WIDE else ""
            canvas.marker(x, place, index - 1, f"mark {series(index)}", size=_dot(len(names), width), title=words)
    names_axis(canvas, box, places, names)
    return canvas.render(plot="depth", description="AUROC with the first layers only", kind=_fit(width))


def draw_weights(names: Sequence[str], values: Scores, *, width: int) -> str:
    """Mean magnitude of the weights of a logistic scorer in each layer: the paper's layer importance."""
    box = Box(52, 34, width - 14, 210)
    canvas = Canvas(width, box.bottom + names_room(names))
    places = _places(box, len(names))
    y = Scale(0, float(values.max()) * 1.06 or 1.0, box.bottom, box.top)
    y_axis(canvas, box, y, "mean |weight| of the layer's channels", count=4)
    wide = min(26.0, 0.72 * (box.right - box.left) / len(names))
    for x, name, value in zip(places, names, values, strict=True):
        canvas.rect(
            x - wide / 2,
            y(float(value)),
            wide,
            box.bottom - y(float(value)),
            "bar over s0",
            title=f"{name}: {value:.4g}",
        )
    names_axis(canvas, box, places, names)
    return canvas.render(
        plot="weights", description="Layer importance: mean magnitude of the weights", kind=_fit(width)
    )


def draw_profile(values: Scores, names: Sequence[str], kind: str) -> str:
    """A sparkline of one image: how far each layer's contribution is from that of ID images, in standard deviations."""
    canvas = Canvas(96, 30)
    step = 96 / len(values)
    middle, reach = 20.0, 20.0
    wide = max(step * 0.8, 0.6)
    heights = [max(-8.0, min(reach, value / 5 * reach)) for value in values.tolist()]
    canvas.bars([(i * step, middle - tall, wide, tall) for i, tall in enumerate(heights) if tall > 0], "up")
    canvas.bars([(i * step, middle, wide, -tall) for i, tall in enumerate(heights) if tall < 0], "down")
    canvas.line(0, middle, 96, middle, "axis")
    place = int(np.argmax(values))
    words = f"Layer profile; most unusual: {names[place]}, {label(round(float(values[place]), 1))} standard deviations above ID"
    return canvas.render(plot="profile", description=words, kind=f"profile {kind}", hover=True)


def _places(box: Box, count: int) -> list[float]:
    """Return the pixel of each of `count` columns."""
    step = (box.right - box.left) / count
    return [box.left + step * (index + 0.5) for index in range(count)]
