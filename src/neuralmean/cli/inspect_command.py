"""`nmd inspect`: layers, channels, where the reference comes from."""

from __future__ import annotations

from typing import Annotated

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.data.progress import printable


@app.command(
    epilog="Example: `nmd inspect timm:resnet18 --layers 'layer3.*'`, or `nmd inspect model.nmd` for a saved detector."
)
def inspect(
    model: options.Spec,
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", metavar="NAME", help="Layers: names or globs, `!NAME` to leave some out."),
    ] = None,
    weights: options.Weights = None,
    mean: options.Mean = None,
    std: options.Std = None,
    size: options.Size = None,
    crop: options.Crop = None,
    interpolation: options.Interpolation = None,
) -> None:
    """Show which layers of a model would be watched, their channels, and where the reference comes from."""
    if model.endswith(".nmd"):
        _inspect_saved(model)
        return
    from neuralmean.detector.inspection import inspect_model

    resolved = options.resolve_spec(model, weights, mean, std, size, crop=crop, interpolation=interpolation)
    found = inspect_model(resolved.model, layers or None, resolved.preprocessing)
    width = max(len(layer.name) for layer in found.layers)
    typer.echo(f"{'layer':<{width}}  {'kind':<12}{'channels':>9}")
    for layer in found.layers:
        typer.echo(f"{layer.name:<{width}}  {layer.kind:<12}{layer.channels:>9}")
    for line in found.summary():
        typer.echo(printable(line))


def _inspect_saved(path: str) -> None:
    from neuralmean.detector.inspection import describe_saved

    for line in describe_saved(path):
        typer.echo(printable(line))
