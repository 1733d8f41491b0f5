"""`nmd export`: model, NMD, scorer and threshold in one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.errors import InputError, UsageError


@app.command(epilog="Example: `nmd export model.nmd --out model.onnx`; a file ending in .pt2 is for torch.export.")
def export(
    saved: options.Saved,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to: .onnx or .pt2.")],
    model: options.Model = None,
    weights: options.Weights = None,
    trust_local_code: options.TrustLocalCode = False,
) -> None:
    """Write the model with its detector as one graph; outputs: the model's own, score, p_value, is_ood."""
    from neuralmean import export as work
    from neuralmean.detector.saved import open_saved
    from neuralmean.files.atomic import check_target

    if out.suffix not in (".onnx", ".pt2"):
        raise UsageError(f"Expected --out to end in .onnx or .pt2, but got {str(out)!r}.")
    check_target(out)
    options.check_out(out, saved, weights)
    opened = open_saved(saved, model=model, weights=weights, trust_local_code=trust_local_code)
    how = opened.need_preprocessing()
    if how.size is None:
        raise InputError("Expected to know the size of the model's input. Fit again with --size.")
    write = work.to_onnx if out.suffix == ".onnx" else work.to_pt2
    write(opened.detector, out, input_shape=(how.channels, *how.size))
    typer.echo(f"{out}: outputs are the model's own, score, p_value and is_ood", err=True)
