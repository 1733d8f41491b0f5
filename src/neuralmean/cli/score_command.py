"""`nmd score`: a verdict on every image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.errors import InputError, UsageError

if TYPE_CHECKING:
    from neuralmean.data.images import Unreadable
    from neuralmean.jobs import ScoreRow, Tally

_EPILOG = (
    "Example: `nmd score model.nmd photos/ --format json`, or `nmd score model.nmd photos/ --out scores.csv --resume`. "
    "Files that cannot be read are named on stderr and left out; the exit code is 1 only if none could be read."
)


@app.command(epilog=_EPILOG)
def score(
    saved: options.Saved,
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Folders, files, globs, .npz, .npy.", show_default=False)
    ],
    format_: Annotated[
        str | None,
        typer.Option("--format", help="table, json (a line each), csv or parquet; by default what --out ends in."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write here instead of to stdout.")] = None,
    fail_on_ood: Annotated[
        bool, typer.Option("--fail-on-ood", help="Leave with exit code 3 if an image is OOD.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted run into --out stopped.")
    ] = False,
    model: options.Model = None,
    weights: options.Weights = None,
    batch_size: options.BatchSize = 64,
    workers: options.Workers = None,
    freeze: options.Freeze = False,
    engine: Annotated[str, typer.Option("--engine", help="local, or ray for a cluster.")] = "local",
    address: Annotated[str | None, typer.Option("--address", help="Address of a Ray cluster.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Say of each image how unusual it is: path, score, p-value, is_ood."""
    from neuralmean.detector.saved import open_saved
    from neuralmean.files.artefact import Artefact
    from neuralmean.jobs import ScoreFile, Tally, format_of, score_images

    options.check_engine(engine)
    if resume and out is None:
        raise UsageError("Expected a file to go on with. Pass --out FILE with --resume.")
    if freeze and engine != "local":
        raise UsageError(f"Expected --freeze with --engine local, but got --engine {engine}. Leave one of them out.")
    with options.usage():
        kind = format_of(out, format_)
    opened = open_saved(saved, model=model, weights=weights)
    how, tally = opened.need_preprocessing(), Tally()
    if freeze:
        opened.freeze()

    def batches(skip: Callable[[str], bool] | None) -> Iterator[list[ScoreRow]]:
        return score_images(
            opened.detector, how, paths, tally=tally, batch_size=batch_size, workers=workers,
            on_unreadable=options.tell_unreadable, skip=skip,
        )  # fmt: skip

    with options.progress(quiet):
        if engine == "ray":
            from neuralmean.jobs import cluster as distributed

            def tell(note: Unreadable) -> None:
                tally.unreadable += 1
                options.tell_unreadable(note)

            where: dict[str, Any] = {"address": address, "workers": workers, "batch_size": batch_size}
            where |= {"model": opened.detector.model, "preprocessing": how, "on_unreadable": tell}
            if out is not None:
                run = distributed.score(saved, paths, out=out, format=kind, resume=resume, **where)
                tally = Tally(run.n_images, run.n_ood, run.n_unreadable, resumed=run.n_resumed)
            else:
                _print(kind, (chunk.rows() for chunk in distributed.stream(saved, paths, **where)), tally)
        elif out is not None:
            settings = [list(map(str, paths)), how.to_json(), batch_size, freeze]
            file = ScoreFile(out, kind, artefact=Artefact.read(saved), settings=settings, resume=resume)
            try:
                file.write(batches, tally)
            except KeyboardInterrupt:
                typer.echo("Stopped. The same command with --resume goes on from here.", err=True)
                raise
        else:
            _print(kind, batches(None), tally)
    _finish(tally, quiet, fail_on_ood, paths)


def _print(kind: str, parts: Iterator[list[ScoreRow]], tally: Tally) -> None:
    from neuralmean.jobs import format_rows

    with closing(parts):  # type: ignore[type-var]  # a generator, whose decoders must not outlive a stdout that fails
        for index, rows in enumerate(parts):
            for line in format_rows(kind, tally.count(rows), header=index == 0):
                typer.echo(line)


def _finish(tally: Tally, quiet: bool, fail_on_ood: bool, paths: list[str]) -> None:
    if not quiet:
        parts = [f"{tally.scored} scored", f"{tally.flagged} OOD"]
        parts += [f"{tally.unreadable} unreadable"] if tally.unreadable else []
        parts += [f"{tally.skipped} skipped (no images)"] if tally.skipped else []
        parts += [f"{tally.resumed} from the earlier run"] if tally.resumed else []
        typer.echo(", ".join(parts), err=True)
    if not tally.scored:
        raise InputError(f"Expected at least one image that can be read in {', '.join(paths)}, but there is none.")
    if fail_on_ood and tally.flagged:
        raise typer.Exit(3)
