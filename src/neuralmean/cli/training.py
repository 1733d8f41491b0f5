"""The progress bar of a training run."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING, Any

import typer
from typing_extensions import Self

if TYPE_CHECKING:
    from neuralmean.bench.train import Progress


class TrainingBar:
    """Shows how far a training run is: a bar on a terminal, a line per epoch elsewhere.

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
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
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
        text = f"{self.title}, epoch {state.epoch} of {state.epochs}, loss {state.loss:.3f}"
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text, total=state.steps)
            self._bar.update(self._task, completed=state.step, description=text)
        elif not self.quiet and state.epoch != self._epoch:
            typer.echo(text, err=True)
        self._epoch = state.epoch
