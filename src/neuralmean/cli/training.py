"""The progress bar of a training run."""

from __future__ import annotations

import re
import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer
from typing_extensions import Self

from neuralmean.errors import InputError

if TYPE_CHECKING:
    from neuralmean.bench.train import Progress

_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(text: str) -> float:
    """Return the seconds of a duration such as `90s`, `45m`, `3h` or `1h30m`.

    Example:
        >>> parse_duration("1h30m"), parse_duration("0.5h")
        (5400.0, 1800.0)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh])", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if "".join(number + unit for number, unit in parts) != text or seconds <= 0:
        raise InputError(f"Expected a time such as 90s, 45m, 3h or 1h30m, but got {text!r}.")
    return seconds


class TrainingBar:
    """Shows the progress of a training run: a bar on a terminal, a line per epoch elsewhere.

    Args:
        title: What is being trained.
        quiet: Whether to show nothing.
    """

    def __init__(self, title: str, *, quiet: bool) -> None:
        self.title, self.quiet = title, quiet
        self._bar: Any = None
        self._task: Any = None
        self._epoch = -1

    def __enter__(self) -> Self:
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            # Not rich's own estimate: steps at small image sizes are faster than later ones.
            left = TextColumn("{task.fields[left]}")
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), left)
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, state: Progress) -> None:
        """Show one more step."""
        from neuralmean.bench.train.plan import duration

        text = f"{self.title}, epoch {state.epoch} of {state.epochs}, loss {state.loss:.3f}"
        left = f"{duration(state.left)} left"
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text, total=state.steps, left=left)
            self._bar.update(self._task, completed=state.step, description=text, left=left)
        elif not self.quiet and state.epoch != self._epoch:
            typer.echo(f"{text}, {left}", err=True)
        self._epoch = state.epoch
