"""The application: its commands, and how errors and warnings are shown at the terminal."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer

from neuralmean import __version__
from neuralmean.data.progress import printable
from neuralmean.errors import NeuralMeanError, NeuralMeanWarning, UsageError
from neuralmean.models import allocator as memory

app = typer.Typer(
    name="nmd",
    help="Tells you when a PyTorch model is looking at something it was not trained for.",
    epilog="Exit codes: 0 fine, 1 failed, 2 wrong usage, 3 something is OOD (with `--fail-on-ood`).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS = ("demo", "inspect", "fit", "score", "explain", "report", "export", "serve", "history", "mcp", "bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        import torch

        from neuralmean.files.artefact import FORMAT_VERSION

        typer.echo(f"neuralmean {__version__}, torch {torch.__version__}, file format {FORMAT_VERSION}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Tells you when a PyTorch model is looking at something it was not trained for."""
    # A server runs for months with requests of all sizes, which would fragment the memory that is kept.
    if context.invoked_subcommand != "serve":
        memory.keep_freed()


def _note_once() -> Callable[..., None]:
    """Return a function that shows warnings of this library, each sentence once however many batches give it."""
    shown: set[str] = set()

    def show(message: Warning | str, category: type[Warning], *rest: Any, **named: Any) -> None:
        if issubclass(category, NeuralMeanWarning) and str(message) not in shown:
            shown.add(str(message))
            typer.echo(f"Note: {printable(str(message))}", err=True)

    return show


def load_commands() -> typer.Typer:
    """Register every command and return the application."""
    for name in _COMMANDS:
        import_module(f"neuralmean.cli.{name}_command")
    return app


def _open_closed_streams() -> None:
    """Reopen closed standard streams, so that no other file gets their descriptors."""
    for number, name, mode in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest free descriptor; writing to this stdout is an error
            how = "r" if number == 0 else "w"
            setattr(sys, name, open(number, how, closefd=False, encoding="utf-8"))  # noqa: SIM115 - a descriptor


def main() -> None:
    """Run the command and exit with its code."""
    _open_closed_streams()
    load_commands()
    warnings.showwarning = _note_once()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may hold any bytes
    try:
        app()
    except NeuralMeanError as error:
        typer.echo("\n".join(map(printable, f"Error: {error}".splitlines())), err=True)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output is gone
        sys.exit(1)
    except MemoryError:
        typer.echo("Error: out of memory. Use a smaller --batch-size.", err=True)
        sys.exit(1)
    except OSError as error:
        if error.filename is not None:
            typer.echo(f"Error: {error}.", err=True)
        else:  # most likely stdout, which Python would flush again on exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            typer.echo(f"Error: expected to write the answer, but {error.strerror or error}.", err=True)
        sys.exit(1)
