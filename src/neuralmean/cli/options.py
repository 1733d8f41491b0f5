"""Options that several commands share, and how progress is shown."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from neuralmean.data.images import Unreadable
from neuralmean.data.progress import printable, showing
from neuralmean.errors import InputError, UsageError
from neuralmean.models.spec import ResolvedModel, resolve

Saved = Annotated[Path, typer.Argument(metavar="model.nmd", help="A file that `nmd fit` wrote.", show_default=False)]
Spec = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="`package.module:callable`, `timm:NAME`, `torchvision:NAME`, `bench:NAME`, or `hf:DIR` for texts.",
        show_default=False,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        "--weights", metavar="FILE", help="The weights: safetensors, or a torch file that holds tensors only."
    ),
]
Mean = Annotated[
    str | None, typer.Option("--mean", metavar="R,G,B", help="Mean of each channel, for pixels from 0 to 1.")
]
Std = Annotated[str | None, typer.Option("--std", metavar="R,G,B", help="Standard deviation of each channel.")]
Size = Annotated[str | None, typer.Option("--size", metavar="N or HxW", help="Size of the model's input in pixels.")]
Crop = Annotated[
    str | None,
    typer.Option(
        "--crop",
        metavar="MODE[:SHARE]",
        help="How images are cut to size: center, center:0.875 (keeps the middle 87.5 %), squash or border.",
    ),
]
Interpolation = Annotated[
    str | None, typer.Option("--interpolation", metavar="KIND", help="How images are resized: bilinear or bicubic.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", metavar="MODEL", help="The model, if the file names none or the wrong one."),
]
Rate = Annotated[
    float | None,
    typer.Option(
        "--rate", metavar="RATE", help="False-alarm rate to use instead of that of the fit; nothing is refitted."
    ),
]
TrustLocalCode = Annotated[
    bool,
    typer.Option(
        "--trust-local-code", help="Allow the file to name a model in Python code of this folder; that code is run."
    ),
]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Images per forward pass.")]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        min=0,
        help="Processes that decode images; by default one fewer than there are cores. With ray: its workers.",
    ),
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="DEVICE", help="Where the model runs: cpu, cuda, cuda:1 ...")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress on stderr.")]


def numbers(text: str | None, option: str) -> tuple[float, ...] | None:
    """Read `0.5,0.5,0.5`."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"Expected {option} to be comma-separated numbers, but got {text!r}.") from None


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


def crop_settings(crop: str | None, interpolation: str | None) -> dict[str, Any]:
    """Read `center:0.875`, `center`, `squash` or `border`, and the kind of interpolation, as fields of `Preprocessing`."""
    found: dict[str, Any] = {} if interpolation is None else {"interpolation": interpolation}
    if crop is not None:
        mode, mark, share = crop.partition(":")
        found["crop"] = mode
        if mark:
            try:
                found["crop_fraction"] = float(share)
            except ValueError:
                raise UsageError(f"Expected --crop to be MODE or MODE:SHARE, but got {crop!r}.") from None
    return found


def resolve_spec(
    spec: str,
    weights: Path | None,
    mean: str | None,
    std: str | None,
    side: str | None,
    *,
    crop: str | None = None,
    interpolation: str | None = None,
) -> ResolvedModel:
    """Build the model that the options describe."""
    return resolve(
        spec,
        weights=weights,
        mean=numbers(mean, "--mean"),
        std=numbers(std, "--std"),
        size=size(side),
        settings=crop_settings(crop, interpolation),
    )


Groups = Annotated[
    str | None,
    typer.Option(
        "--groups",
        metavar="HOW",
        help="Groups that the rate holds for: 'folder' (each image's), 'predicted' (the class that the model predicts, "
        "when fitting), or a .csv with the columns path and group.",
    ),
]


def group_labels(how: str | None) -> Callable[[str], str] | None:
    """Return a function from the name of an image to its group, as `--groups` says; None without labels."""
    if how is None or how == "predicted":
        return None
    if how == "folder":
        return lambda name: Path(name).parent.name
    path = Path(how)
    if path.suffix.lower() != ".csv" or not path.is_file():
        raise InputError(f"Expected --groups to be 'folder', 'predicted' or a .csv file, but got {how!r}.")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"path", "group"} <= set(rows[0]):
        raise InputError(f"Expected {how!r} to have the columns path and group, but it has not.")
    known = {row["path"]: row["group"] for row in rows}
    by_file: dict[str, set[str]] = {}  # for images that are named from another folder
    for row in rows:
        by_file.setdefault(Path(row["path"]).name, set()).add(row["group"])

    def label(name: str) -> str:
        found = {known[name]} if name in known else by_file.get(Path(name).name, set())
        if len(found) != 1:
            what = f"it has {len(found)} of that file name in different groups" if found else "it has none"
            raise InputError(f"Expected {how!r} to have a row for {name!r}, but {what}. Add one with this path.")
        return next(iter(found))

    return label


def check_engine(engine: str) -> None:
    """Raise unless `engine` is the name of an engine."""
    if engine not in ("local", "ray"):
        raise UsageError(f"Expected --engine to be local or ray, but got {engine!r}.")


@contextmanager
def usage() -> Generator[None]:
    """Report an `InputError` raised inside the block as wrong usage of the command."""
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
    typer.echo(printable(f"Cannot read {note}"), err=True)


def tell_unreadable_line(name: str, reason: str) -> None:
    """Name a line that is no text on stderr."""
    typer.echo(f"Cannot read {name}: {reason}", err=True)


def absolute_spec(spec: str) -> str:
    """Return a spec that means the same in any folder."""
    kind, mark, folder = spec.partition(":")
    return f"hf:{Path(folder).resolve()}" if mark and kind == "hf" else spec


def check_out(out: Path | None, *inputs: str | Path | None, option: str = "--out") -> None:
    """Raise if `out`, the value of `option`, is one of the files that the command reads."""
    for path in inputs:
        if out is not None and path is not None and os.path.realpath(out) == os.path.realpath(path):
            raise UsageError(
                f"Expected {option} to be another file than {str(path)!r}, which is read. Choose another name."
            )


def named_paths(values: Sequence[str]) -> dict[str, str]:
    """Read `NAME=DIR` options; a bare path is named after its last part."""
    named: dict[str, str] = {}
    for value in values:
        name, mark, path = value.partition("=")
        if not mark:
            name, path = Path(value).stem, value
        if not name or not path:
            raise UsageError(f"Expected NAME=DIR, but got {value!r}.")
        if name in named:
            raise UsageError(f"Expected a name for each set, but {name!r} occurs twice.")
        named[name] = path
    return named
