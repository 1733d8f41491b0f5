"""Options that several commands share, and how progress is shown."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from neuralmean.data.images import Unreadable
from neuralmean.data.progress import showing
from neuralmean.errors import InputError, UsageError
from neuralmean.models.spec import ResolvedModel, resolve

Saved = Annotated[Path, typer.Argument(metavar="model.nmd", help="A file that `nmd fit` wrote.", show_default=False)]
Spec = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="`package.module:callable`, `timm:NAME`, `torchvision:NAME` or `bench:NAME`.",
        show_default=False,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="FILE", help="Weights: safetensors, or a torch file with tensors only."),
]
Mean = Annotated[
    str | None, typer.Option("--mean", metavar="R,G,B", help="Mean of each channel, on a scale of 0 to 1.")
]
Std = Annotated[str | None, typer.Option("--std", metavar="R,G,B", help="Standard deviation of each channel.")]
Size = Annotated[str | None, typer.Option("--size", metavar="N or HxW", help="Size of the model's input in pixels.")]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The model, where the file does not say or says it wrongly."),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images per forward pass.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        help="Processes that decode images, by default one less than there are cores; with ray, its workers.",
    ),
]
Freeze = Annotated[
    bool,
    typer.Option("--freeze", help="Run the model as one graph: faster, and the last digits of scores differ."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Read `0.5,0.5,0.5`."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"Expected {option} to be numbers with commas between, but got {text!r}.") from None


def size(text: str | None) -> tuple[int, int] | None:
    """Read `224` or `224x160`."""
    if text is None:
        return None
    try:
        sides = [int(part) for part in text.lower().split("x")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise UsageError(f"Expected --size to be N or HxW in pixels, but got {text!r}.")
    return sides[0], sides[-1]


def resolve_spec(spec: str, weights: Path | None, mean: str | None, std: str | None, side: str | None) -> ResolvedModel:
    """Build the model that the options describe."""
    return resolve(spec, weights=weights, mean=numbers(mean, "--mean"), std=numbers(std, "--std"), size=size(side))


def check_engine(engine: str) -> None:
    """Raise unless there is such an engine."""
    if engine not in ("local", "ray"):
        raise UsageError(f"Expected --engine to be local or ray, but got {engine!r}.")


@contextmanager
def usage() -> Generator[None]:
    """Take what is wrong with a value inside the block for a wrong use of the command."""
    try:
        yield
    except InputError as error:
        raise UsageError(str(error)) from None


@contextmanager
def progress(quiet: bool) -> Generator[None]:
    """Show a bar on a terminal, plain lines elsewhere, nothing with --quiet."""
    import sys

    with showing("off" if quiet else "bar" if sys.stderr.isatty() else "lines"):
        yield


def tell_unreadable(note: Unreadable) -> None:
    """Name a file that cannot be read on stderr."""
    typer.echo(f"Cannot read {note}", err=True)


def named_paths(values: Sequence[str]) -> dict[str, str]:
    """Read `NAME=DIR` options; a bare path is called by its last part."""
    named: dict[str, str] = {}
    for value in values:
        name, mark, path = value.partition("=")
        if not mark:
            name, path = Path(value).stem, value
        if not name or not path:
            raise UsageError(f"Expected NAME=DIR, but got {value!r}.")
        if name in named:
            raise UsageError(f"Expected a name for each set, but {name!r} comes twice.")
        named[name] = path
    return named
