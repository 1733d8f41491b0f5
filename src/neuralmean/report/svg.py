"""A small SVG writer for the report's plots: scales, ticks, axes, and shapes whose colours come from the page's CSS.

All text is escaped here, so that no caller can forget it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from neuralmean.report.stages import Stage, stages_of


class Scale(NamedTuple):
    """A line from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        span = self.high - self.low
        return self.start + (value - self.low) / (span or 1.0) * (self.end - self.start)


class Box(NamedTuple):
    """The rectangle between the axes, in pixels."""

    left: float
    top: float
    right: float
    bottom: float


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round numbers between `low` and `high`, in steps of 1, 2 or 5.

    Example:
        >>> ticks(0, 100), ticks(-0.3, 0.35, 3)
        ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [-0.2, 0.0, 0.2])
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, -math.floor(math.log10(step)))
    return [round(index * step, digits) + 0.0 for index in range(first, last + 1)]


def label(value: float) -> str:
    """Format a number on an axis.

    Example:
        >>> label(20.0), label(0.25), label(-3.0), label(1200000.0)
        ('20', '0.25', '\u22123', '1.2e+06')
    """
    return f"{value:.4g}".replace("-", "\u2212", 1) if "e" not in f"{value:.4g}" else f"{value:.4g}"


def shorten(text: str, length: int) -> str:
    """Cut the middle out of a long text.

    Example:
        >>> shorten("features.denseblock1.norm", 15)
        'feature…k1.norm'
    """
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


class Canvas:
    """A drawing of a given size; its shapes take colours from CSS classes.

    Args:
        width: Width in units that are pixels at full size.
        height: Height.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str, *, title: str = "") -> None:
        """Draw a straight line."""
        self._add("line", f'x1="{_n(x1)}" y1="{_n(y1)}" x2="{_n(x2)}" y2="{_n(y2)}"', kind, title)

    def rect(self, x: float, y: float, width: float, height: float, kind: str, *, title: str = "") -> None:
        """Draw a rectangle."""
        size = f'width="{_n(max(width, 0))}" height="{_n(max(height, 0))}"'
        self._add("rect", f'x="{_n(x)}" y="{_n(y)}" {size}', kind, title)

    def path(self, points: Sequence[tuple[float, float]], kind: str, *, closed: bool = False, title: str = "") -> None:
        """Draw a line through points."""
        if points:
            steps = "L".join(f"{_n(x)} {_n(y)}" for x, y in points)
            self._add("path", f'd="M{steps}{"Z" if closed else ""}"', kind, title)

    def bars(self, bars: Sequence[tuple[float, float, float, float]], kind: str) -> None:
        """Draw many rectangles, each x, y, width and height, as one shape: a small file even for thousands."""
        if bars:
            steps = "".join(f"M{_n(x)} {_n(y)}h{_n(w)}v{_n(h)}h{_n(-w)}z" for x, y, w, h in bars)
            self._add("path", f'd="{steps}"', kind, "")

    def marker(self, x: float, y: float, shape: int, kind: str, *, size: float = 4, title: str = "") -> None:
        """Draw a mark: a dot, a square, a diamond, a triangle and so on, by number."""
        if shape % 4 == 0:
            self._add("circle", f'cx="{_n(x)}" cy="{_n(y)}" r="{_n(size)}"', kind, title)
            return
        outlines: dict[int, list[tuple[float, float]]] = {
            1: [(-1, -1), (1, -1), (1, 1), (-1, 1)],
            2: [(0, -1.35), (1.35, 0), (0, 1.35), (-1.35, 0)],
            3: [(0, -1.3), (1.25, 1), (-1.25, 1)],
        }
        self.path(
            [(x + dx * size * 0.95, y + dy * size * 0.95) for dx, dy in outlines[shape % 4]],
            kind,
            closed=True,
            title=title,
        )

    def text(
        self, x: float, y: float, text: str, kind: str = "", *, anchor: str = "start", turn: float = 0, title: str = ""
    ) -> None:
        """Write text with its baseline at `y`, rotated by `turn` degrees."""
        turned = f' transform="rotate({_n(turn)} {_n(x)} {_n(y)})"' if turn else ""
        inner = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" text-anchor="{anchor}" class="{escape(kind)}"{turned}>{inner}{escape(text)}</text>'
        )

    def render(self, *, plot: str, description: str, kind: str = "", hover: bool = False) -> str:
        """Return the drawing.

        Args:
            plot: Name of the plot, one word, by which the page and its tests find it.
            description: Description for screen readers.
            kind: Further CSS classes.
            hover: Whether to show the description on hover too.
        """
        size = f'viewBox="0 0 {_n(self.width)} {_n(self.height)}"'
        head = f'<svg {size} role="img" aria-label="{escape(description)}" data-plot="{escape(plot)}" class="{escape(kind)}">'
        head += f"<title>{escape(description)}</title>" if hover else ""
        return head + "".join(self._parts) + "</svg>"

    def _add(self, tag: str, attributes: str, kind: str, title: str) -> None:
        ending = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
        self._parts.append(f'<{tag} {attributes} class="{escape(kind)}"{ending}')


def y_axis(canvas: Canvas, box: Box, scale: Scale, caption: str, *, count: int = 5, unit: str = "") -> None:
    """Draw grid lines, numbers and the caption of a vertical axis."""
    for value in ticks(scale.low, scale.high, count):
        y = scale(value)
        canvas.line(box.left, y, box.right, y, "grid")
        canvas.text(box.left - 6, y + 4, label(value) + unit, "tick", anchor="end")
    canvas.text(box.left, box.top - 9, caption, "caption")


def x_axis(
    canvas: Canvas, box: Box, scale: Scale, caption: str, *, count: int = 6, unit: str = "", grid: bool = False
) -> None:
    """Draw ticks, numbers and the caption of a horizontal axis."""
    canvas.line(box.left, box.bottom, box.right, box.bottom, "axis")
    for value in ticks(scale.low, scale.high, count):
        x = scale(value)
        if grid:
            canvas.line(x, box.top, x, box.bottom, "grid")
        canvas.line(x, box.bottom, x, box.bottom + 4, "axis")
        canvas.text(x, box.bottom + 17, label(value) + unit, "tick", anchor="middle")
    canvas.text((box.left + box.right) / 2, box.bottom + 36, caption, "caption", anchor="middle")


def names_room(names: Sequence[str], room: int = 18) -> float:
    """Return the height in pixels of the names below an axis."""
    if stages_of(names):
        return 48
    longest = max((min(len(name), room) for name in names), default=0)
    return 22 + 5.0 * longest


def names_axis(canvas: Canvas, box: Box, places: Sequence[float], names: Sequence[str], *, room: int = 18) -> None:
    """Write names below their ticks: level if they fit, else rotated and thinned, or those of stages."""
    canvas.line(box.left, box.bottom, box.right, box.bottom, "axis")
    if not places:
        return
    if stages := stages_of(names):
        _stages_axis(canvas, box, places, stages)
        return
    gap = (places[-1] - places[0]) / max(len(places) - 1, 1)
    if len(places) > 1 and 6.6 * max(map(len, names)) + 8 < gap:
        for place, name in zip(places, names, strict=True):
            canvas.line(place, box.bottom, place, box.bottom + 4, "axis")
            canvas.text(place, box.bottom + 18, name, "tick", anchor="middle", title=name)
        return
    every = max(1, math.ceil(24 / gap)) if gap > 0 else len(places)
    for index in range(0, len(places), every):
        canvas.line(places[index], box.bottom, places[index], box.bottom + 4, "axis")
        canvas.text(
            places[index] + 3,
            box.bottom + 14,
            shorten(names[index], room),
            "tick",
            anchor="end",
            turn=-50,
            title=names[index],
        )


def _stages_axis(canvas: Canvas, box: Box, places: Sequence[float], stages: Sequence[Stage]) -> None:
    """Separate stages by thin lines and write their names below, in two rows if one is too narrow."""
    half = (places[-1] - places[0]) / max(len(places) - 1, 1) / 2
    free = [-math.inf, -math.inf]  # where each row of names ends
    for stage in stages:
        left, right = places[stage.start] - half, places[stage.end - 1] + half
        if stage.start:
            canvas.line(left, box.top, left, box.bottom + 6, "grid")
        text = shorten(stage.name, 22)
        width = 6.6 * len(text)
        middle = min(max((left + right) / 2, box.left + width / 2), box.right - width / 2)
        row = next((row for row, end in enumerate(free) if middle - width / 2 > end + 4), None)
        if row is not None:
            free[row] = middle + width / 2
            count = stage.end - stage.start
            words = f"{stage.name}: {count} {'layer' if count == 1 else 'layers'}"
            canvas.text(middle, box.bottom + 18 + 16 * row, text, "tick", anchor="middle", title=words)


def _n(value: float) -> str:
    """Write a coordinate: a tenth of a pixel is enough."""
    return f"{value:.1f}".removesuffix(".0") if math.isfinite(value) else "0"
