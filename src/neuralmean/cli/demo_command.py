"""`nmd demo`: everything on embedded data."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from neuralmean.cli.app import app
from neuralmean.errors import ArtefactError


@app.command(epilog="Example: `nmd demo --out demo-output`. Under a minute, nothing is downloaded.")
def demo(
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            help="Folder for the picture, the report, the detector, its weights and some images.",
        ),
    ] = Path("demo-output"),
    seed: Annotated[int, typer.Option("--seed", help="Seed of data split and training.")] = 0,
) -> None:
    """Train a small model on the digits 0 to 7, then detect the digits 8 and 9 and patches of photographs."""
    from neuralmean.cli import demo as job

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArtefactError(
            f"Expected to make the folder {str(out)!r}, but {error.strerror or error}. Name another with --out."
        ) from None
    typer.echo("Training a small network on the digits 0 to 7 of scikit-learn…", err=True)
    result = job.run(seed)
    typer.echo(f"It recognises {result.accuracy:.1f} % of unseen digits. Results of each detector on unknown images:\n")
    typer.echo(f"{'detector':<21}{'learnt from':<21}{'tested on':<16}{'AUROC':>7}{'caught':>9}{'false alarms':>14}")
    for row in result.rows:
        numbers = f"{row.auroc:>6.1f}%{row.caught:>8.1f}%{row.false_alarms:>13.1f}%"
        typer.echo(f"{row.method:<21}{row.needs:<21}{row.ood:<16}{numbers}")
    picture = out / "scores.png"
    job.save_picture(result, picture)
    saved = job.save_detector(result, out)
    typer.echo(f"\nThe picture: {picture}\nThe report: {job.write_demo_report(result, out / 'report.html')}")
    # `make demo` has the command in its own environment.
    nmd = "nmd" if shutil.which("nmd") else f"{sys.executable} -m neuralmean"
    typer.echo(f"The detector: {saved}. Try `{nmd} score {saved} {out / 'images'}`, or `{nmd} serve {saved}`.")
