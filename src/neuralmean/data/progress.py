"""Progress of long work.

`track` wraps any iterable and shows its progress: as a bar if stderr is a terminal, and not at all otherwise, so that
library calls in scripts and services stay silent. With `showing("lines")`, a command chooses plain lines for every
`track` inside the block. Nothing is written to stdout.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from neuralmean.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Style", "printable", "showing", "track"]

T = TypeVar("T")
Style = Literal["auto", "bar", "lines", "off"]
STYLES: tuple[Style, ...] = ("auto", "bar", "lines", "off")

_REFRESH_SECONDS = 0.1
_active = threading.local()


@dataclass(frozen=True)
class _Setting:
    style: Style = "auto"
    every: float = 5.0


_DEFAULT = _Setting()
_setting: ContextVar[_Setting] = ContextVar("neuralmean_progress", default=_DEFAULT)


def printable(text: str) -> str:
    r"""Escape unprintable characters in a line, so that file names cannot control a terminal.

    Example:
        >>> printable("cat\x1b[2J.png")
        'cat\\x1b[2J.png'
    """
    if text.isprintable():
        return text
    return "".join(part if part.isprintable() else ascii(part)[1:-1] for part in text)


@contextmanager
def showing(style: Style, *, every: float = 5.0) -> Generator[None]:
    """Choose how every `track` inside the block is displayed.

    Args:
        style: `"bar"` for a live bar, `"lines"` for occasional plain lines, `"off"` for nothing, `"auto"` for a bar where
            stderr is a terminal and nothing elsewhere.
        every: Seconds between two plain lines.
    """
    if style not in STYLES:
        raise InputError(f"Expected `style` to be one of {list(STYLES)}, but got {style!r}.")
    if not every >= 0:
        raise InputError(f"Expected `every` to be a number of seconds, 0 or more, but got {every!r}.")
    token = _setting.set(_Setting(style, every))
    try:
        yield
    finally:
        _setting.reset(token)


def track(
    iterable: Iterable[T],
    *,
    description: str,
    total: int | Callable[[], int] | None = None,
    unit: str = "images",
    size: Callable[[T], int] | None = None,
    quiet: bool = False,
) -> Iterator[T]:
    """Yield every item of `iterable` and show count, speed and remaining time on stderr.

    A `track` inside another one of the same thread is silent.

    Args:
        iterable: The items; consumed lazily, one at a time.
        description: A few words on the work.
        total: Total number of units, or a function that returns it once it is known; None takes the length of
            `iterable` if it has one and `size` is None.
        unit: Name of the unit.
        size: Returns the number of units in an item, such as `len` for batches; None counts each item as one.
        quiet: Whether to show nothing.

    Example:
        >>> list(track([1, 2, 3], description="Counting"))
        [1, 2, 3]
    """
    setting = _setting.get()
    style = setting.style
    if style == "auto":
        style = "bar" if _is_terminal() else "off"
    if quiet or style == "off" or getattr(_active, "flag", False):
        yield from iterable
        return
    if total is None and size is None and isinstance(iterable, Sized):
        total = len(iterable)

    def known() -> int | None:
        return total() if callable(total) else total

    display = _display(style, setting.every, description, unit)
    _active.flag = True
    try:
        display.start(known())
        done, shown = 0, time.monotonic()
        for item in iterable:
            yield item
            done += 1 if size is None else size(item)
            # Updating the display for every item could cost more than the item.
            if (now := time.monotonic()) - shown >= _REFRESH_SECONDS:
                shown = now
                display.update(done, known())
        display.finish(done)
    finally:
        _active.flag = False
        display.stop()


class _Display(Protocol):
    def start(self, total: int | None) -> None: ...
    def update(self, done: int, total: int | None) -> None: ...
    def finish(self, done: int) -> None: ...
    def stop(self) -> None: ...


def _display(style: Style, every: float, description: str, unit: str) -> _Display:
    return _Bar(description, unit) if style == "bar" else _Lines(description, unit, every)


class _Bar:
    """A live bar on stderr, drawn by rich."""

    def __init__(self, description: str, unit: str) -> None:
        self._progress = _rich_progress(unit)
        self._task = self._progress.add_task(description, total=None)

    def start(self, total: int | None) -> None:
        self._progress.update(self._task, total=total)
        self._progress.start()

    def update(self, done: int, total: int | None) -> None:
        self._progress.update(self._task, completed=done, total=total)

    def finish(self, done: int) -> None:
        self._progress.update(self._task, completed=done, total=done)

    def stop(self) -> None:
        self._progress.stop()


class _Lines:
    """A plain line on stderr every few seconds and at the end, for log files."""

    def __init__(self, description: str, unit: str, every: float) -> None:
        self._description, self._unit, self._every = description, unit, every
        self._begun = self._last = time.monotonic()

    def start(self, total: int | None) -> None:
        self._begun = self._last = time.monotonic()

    def update(self, done: int, total: int | None) -> None:
        now = time.monotonic()
        # `finish` writes the last line.
        if now - self._last >= self._every and done != total:
            self._last = now
            self._write(plain_line(self._description, done, total, self._unit, now - self._begun))

    def finish(self, done: int) -> None:
        self._write(plain_line(self._description, done, done, self._unit, time.monotonic() - self._begun))

    def stop(self) -> None:
        """Nothing to close."""

    def _write(self, line: str) -> None:
        sys.stderr.write(line + "\n")
        sys.stderr.flush()


def plain_line(description: str, done: int, total: int | None, unit: str, seconds: float) -> str:
    """Return one line that describes the progress.

    Example:
        >>> plain_line("Scoring", 1500, 6000, "images", 10.0)
        'Scoring: 1,500 of 6,000 images, 150.0 images/s, 0:30 left'
        >>> plain_line("Scoring", 6000, 6000, "images", 40.0)
        'Scoring: 6,000 images in 0:40, 150.0 images/s'
        >>> plain_line("Scoring", 1500, None, "images", 10.0)
        'Scoring: 1,500 images, 150.0 images/s'
    """
    rate = done / seconds if seconds > 0 else 0.0
    speed = f", {_rate_text(rate)} {unit}/s" if rate > 0 else ""
    if total == done:
        return f"{description}: {done:,} {unit} in {_duration_text(seconds)}{speed}"
    if total is None:
        return f"{description}: {done:,} {unit}{speed}"
    left = f", {_duration_text((total - done) / rate)} left" if rate > 0 and total > done else ""
    return f"{description}: {done:,} of {total:,} {unit}{speed}{left}"


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 1000 else f"{rate:.1f}" if rate >= 1 else f"{rate:.3f}"


def _duration_text(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _is_terminal() -> bool:
    # stderr is None under pythonw and in some services.
    return sys.stderr is not None and sys.stderr.isatty()


def _rich_progress(unit: str) -> Progress:
    """Build a bar with count, rate and time left; rich is slow to import, hence the local import."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class _Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            of = f"/{int(task.total):,}" if task.total is not None else ""
            return Text(f"{int(task.completed):,}{of} {unit}", style="progress.download")

    class _Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            rate = task.finished_speed or task.speed
            return Text("" if not rate else f"{_rate_text(rate)}/s", style="progress.data.speed")

    one_line = Column(no_wrap=True)
    columns = (
        TextColumn("{task.description}", markup=False, table_column=one_line),
        BarColumn(),
        _Count(table_column=one_line),
        _Rate(table_column=one_line),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=one_line),
    )
    return Progress(*columns, console=Console(stderr=True))
