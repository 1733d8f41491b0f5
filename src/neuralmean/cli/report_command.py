"""`nmd report`: one HTML file that shows how well a saved detector separates sets of images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app

_EPILOG = (
    "Example: `nmd report model.nmd --id photos/test --ood fog=photos/fog --ood night=photos/night --out report.html`. "
    "The ID images should be ones that the detector was not fitted on. The file needs no network."
)


@app.command(epilog=_EPILOG)
def report(
    saved: options.Saved,
    id_data: Annotated[
        list[str], typer.Option("--id", metavar="PATH", help="In-distribution images: folder, files or .npz.")
    ],
    ood: Annotated[
        list[str],
        typer.Option("--ood", metavar="NAME=PATH", help="Out-of-distribution images and their name; may be repeated."),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write the report to.")] = Path(
        "report.html"
    ),
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Maximum number of images of each set, spread evenly over it.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Heading of the report.")] = None,
    model: options.Model = None,
    weights: options.Weights = None,
    trust_local_code: options.TrustLocalCode = False,
    batch_size: options.BatchSize = 64,
    workers: options.Workers = None,
    quiet: options.Quiet = False,
) -> None:
    """Write an HTML report: how well the detector separates sets of images, with plots, intervals and the images themselves."""
    from neuralmean.detector.groups import refuse_labels
    from neuralmean.detector.saved import open_saved
    from neuralmean.jobs import CountedBatches
    from neuralmean.report import spread_over, write_report

    named = options.named_paths(ood)
    options.check_out(out, saved, weights, *id_data, *named.values())
    opened = open_saved(saved, model=model, weights=weights, trust_local_code=trust_local_code)
    refuse_labels(opened.detector.learnt.grouped_by, "a report")
    how = opened.need_preprocessing()

    def images(paths: list[str]) -> CountedBatches:
        skip = None if limit is None else spread_over(paths, limit)
        return CountedBatches(
            paths, how, batch_size=batch_size, workers=workers, on_unreadable=options.tell_unreadable, skip=skip
        )

    info: dict[str, Any] = {"id": id_data, "ood": named, "preprocessing": how.to_json()}
    info["id_name"] = Path(id_data[0]).stem if len(id_data) == 1 else "ID"
    with options.progress(quiet):
        outside = {name: images([path]) for name, path in named.items()}
        write_report(opened.detector, images(id_data), outside, out, title=title, info=info, limit=limit)
    if not quiet:
        typer.echo(f"The report: {out} ({out.stat().st_size / 1e6:.2f} MB)", err=True)
