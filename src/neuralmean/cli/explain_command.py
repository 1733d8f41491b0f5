"""`nmd explain`: which layers saw something strange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.errors import InputError, UsageError

_BAR = 40


@app.command(epilog="Example: `nmd explain model.nmd photo.png`, or `nmd explain model.nmd photos.npz#12`.")
def explain(
    saved: options.Saved,
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE", help="An image, or a row of an array file as `nmd score` names it.", show_default=False
        ),
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="How many channels to show.")] = 5,
    format_: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
    model: options.Model = None,
    weights: options.Weights = None,
) -> None:
    """Show how much each layer adds to the score of an image."""
    from neuralmean.data.images import ImageBatches
    from neuralmean.data.images.arrays import row_name, split_name
    from neuralmean.detector.saved import open_saved

    if format_ not in ("table", "json"):
        raise UsageError(f"Expected --format to be table or json, but got {format_!r}.")
    if Path(image).is_dir():
        raise UsageError(f"Expected one image to explain, but {image!r} is a folder. Name a file in it.")
    opened = open_saved(saved, model=model, weights=weights)
    path, row = split_name(image)
    if row is None or Path(image).exists():
        batches = ImageBatches([image], opened.need_preprocessing(), workers=0)
    else:
        wanted = row_name(path, row)
        batches = ImageBatches([path], opened.need_preprocessing(), workers=0, skip=lambda name: name != wanted)
    batch = next(iter(batches), None)
    if batch is None:
        reason = f": {batches.unreadable[0]}" if batches.unreadable else ", of which there is none."
        raise InputError(f"Expected an image that can be read, but got {image!r}{reason}")
    decision, found = opened.detector.predict(batch.images[:1])[0], opened.detector.explain(batch.images[:1])
    layers = list(zip(found.layers, found.by_layer[0].tolist(), strict=True))
    terms = {name: value[0].item() for name, value in found.terms.items()}
    if format_ == "json":
        answer: dict[str, Any] = {
            "path": batch.names[0],
            "score": decision.score.item(),
            "p_value": decision.p_value.item(),
        }
        answer |= {"is_ood": bool(decision.is_ood), "layers": dict(layers), "terms": terms, "exact": found.exact}
        typer.echo(json.dumps(answer))
        return
    typer.echo(f"{batch.names[0]}: {decision}")
    parts = [*layers, *terms.items()]
    largest = max((abs(value) for name, value in parts if name != "constant"), default=0.0) or 1.0
    width = max(len(name) for name, _ in parts)
    for name, value in parts:
        bar = ("█" if value > 0 else "░") * min(round(abs(value) / largest * _BAR), _BAR)
        typer.echo(f"{name:<{width}}  {value:>9.4f}  {bar if name != 'constant' else ''}".rstrip())
    typer.echo("channels: " + ", ".join(f"{name} {value:.3g}" for name, value in found.top_channels(n=top)))
    typer.echo("layers and terms add up to the score" if found.exact else "to first order: gradient times vector")
    typer.echo("█ raises the score, ░ lowers it")
