"""`nmd export`: model, NMD, scorer and threshold in one graph."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.errors import InputError, UsageError


@app.command(
    epilog="Example: `nmd export model.nmd --out model.onnx --check photos/`. A .pt2 file is compiled code for torch."
)
def export(
    saved: options.Saved,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write: .onnx or .pt2.")],
    check: Annotated[
        list[str] | None,
        typer.Option("--check", metavar="DIR", help="Images on which the file is compared with the library."),
    ] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="With .pt2: a program for any machine instead of compiled code.")
    ] = False,
    model: options.Model = None,
    weights: options.Weights = None,
    trust_local_code: options.TrustLocalCode = False,
) -> None:
    """Write model and detector as one graph that returns the model's own output, score, p_value and is_ood."""
    from neuralmean import export as work
    from neuralmean.data.images import ImageBatches
    from neuralmean.detector.saved import open_saved
    from neuralmean.files.atomic import check_target

    if out.suffix not in (".onnx", ".pt2"):
        raise UsageError(f"Expected --out to end in .onnx or .pt2, but got {str(out)!r}.")
    if portable and out.suffix != ".pt2":
        raise UsageError(
            f"Expected --portable with a .pt2 file, but got {str(out)!r}. An ONNX file is portable as it is."
        )
    check_target(out)
    options.check_out(out, saved, weights)
    opened = open_saved(saved, model=model, weights=weights, trust_local_code=trust_local_code)
    how = opened.need_preprocessing()
    if how.size is None:
        raise InputError("Expected to know the size of the model's input. Fit again with --size.")
    images = None if not check else ImageBatches(check, how, batch_size=32, on_unreadable=options.tell_unreadable)
    known: dict[str, Any] = {"input_shape": (how.channels, *how.size), "check": images}
    if out.suffix == ".onnx":
        work.to_onnx(opened.detector, out, **known)
    else:
        work.to_pt2(opened.detector, out, portable=portable, **known)
    compared = "test inputs" if not check else "the images given"
    typer.echo(
        f"{out}: outputs are the model's own, score, p_value and is_ood; as the library's on {compared}", err=True
    )
