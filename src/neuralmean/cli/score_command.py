"""`nmd score`: a verdict on every image, or on every text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.data.progress import printable
from neuralmean.errors import InputError, UsageError

if TYPE_CHECKING:
    from neuralmean.data.images import Unreadable
    from neuralmean.detector.saved import SavedDetector
    from neuralmean.jobs import ScoreRow, Tally

_EPILOG = (
    "Example: `nmd score model.nmd photos/ --format json`, or `nmd score model.nmd photos/ --out scores.csv --resume`. "
    "Unreadable files are listed on stderr and skipped; the exit code is 1 only if no file could be read."
)


@app.command(epilog=_EPILOG)
def score(
    saved: options.Saved,
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH",
            help="Folders, files, globs, .npz or .npy; or .txt and .jsonl with a text in each line.",
            show_default=False,
        ),
    ],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="KIND",
            help="table, json (one line per image), csv or parquet; by default what the ending of --out says.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write to this file instead of stdout.")
    ] = None,
    fail_on_ood: Annotated[bool, typer.Option("--fail-on-ood", help="Exit with code 3 if an image is OOD.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run that writes --out.")] = False,
    rate: options.Rate = None,
    fdr: Annotated[
        float | None,
        typer.Option(
            "--fdr",
            metavar="SHARE",
            help="Flag a list of which on average at most this share is in-distribution, such as 0.1.",
        ),
    ] = None,
    groups: options.Groups = None,
    boxes: Annotated[
        Path | None,
        typer.Option(
            "--boxes",
            metavar="FILE",
            help="Score boxes of the images instead: JSON lines with path and boxes [[x0, y0, x1, y1], ...], or a .csv with "
            "path, x0, y0, x1, y1, in pixels of the image. The detector is fitted with --regions.",
        ),
    ] = None,
    model: options.Model = None,
    weights: options.Weights = None,
    trust_local_code: options.TrustLocalCode = False,
    batch_size: options.BatchSize = 64,
    workers: options.Workers = None,
    freeze: Annotated[
        bool | None,
        typer.Option(
            "--freeze/--no-freeze",
            help="Compile the model first; scores differ in their last digits. By default it is compiled where that saves time.",
            show_default=False,
        ),
    ] = None,
    device: options.Device = None,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="local, or ray for a cluster.")] = "local",
    address: Annotated[str | None, typer.Option("--address", metavar="URL", help="Address of a Ray cluster.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Score images or texts: for each its score, p-value, verdict and kind."""
    from neuralmean.data.images import count_inputs
    from neuralmean.data.texts import are_texts
    from neuralmean.detector.saved import open_saved
    from neuralmean.files.artefact import Artefact
    from neuralmean.jobs import ScoreFile, Tally, describe_flags, format_of, score_images, score_texts, select_rows
    from neuralmean.stats.calibration import check_rate

    options.check_engine(engine)
    if resume and out is None:
        raise UsageError("Expected a file to continue. Pass --out FILE with --resume.")
    if freeze and engine != "local":
        raise UsageError(f"Expected --freeze with --engine local, but got --engine {engine}. Leave one of them out.")
    if device is not None and engine != "local":
        raise UsageError(f"Expected --device with --engine local, but got --engine {engine}. Leave one of them out.")
    if rate is not None and engine != "local":
        raise UsageError(f"Expected --rate with --engine local, but got --engine {engine}. Leave one of them out.")
    if (fdr is not None or groups is not None) and engine != "local":
        raise UsageError("Expected --engine local with --fdr or --groups. Leave them out, or score on this machine.")
    with options.usage():
        kind = format_of(out, format_)
        if rate is not None:
            check_rate(rate, "--rate")
        if fdr is not None:
            check_rate(fdr, "--fdr")
        label = options.group_labels(groups)
    if boxes is not None and (engine != "local" or resume or fdr is not None or groups is not None or freeze):
        raise UsageError(
            "Expected --boxes without --engine ray, --resume, --fdr, --groups and --freeze. Leave them out."
        )
    options.check_out(out, saved, weights, boxes, groups, *paths)
    opened = open_saved(
        saved, model=model, weights=weights, rate=rate, device=device, trust_local_code=trust_local_code
    )
    if opened.detector.learnt.grouped_by == "given" and label is None and boxes is None:
        raise UsageError(
            "Expected --groups, as the detector was fitted with labels of groups. Pass --groups folder or FILE."
        )
    if boxes is not None:
        n_ood = _score_boxes(opened, paths, boxes, kind, out, quiet)
        if fail_on_ood and n_ood:
            raise typer.Exit(3)
        return
    texts, tally = are_texts(paths), Tally()
    if texts and (engine != "local" or groups is not None or freeze):
        raise UsageError("Expected --engine local without --groups and --freeze for texts. Leave them out.")
    prepared: Any = opened.need_tokenizer().most if texts else opened.need_preprocessing().to_json()
    if freeze is None:
        freeze = engine == "local" and not texts and opened.freeze_if_worth(count_inputs(paths), batch_size)
        if freeze and not quiet:
            typer.echo("The model runs as a compiled graph; --no-freeze keeps it as it is.", err=True)
    elif freeze:
        opened.freeze()

    def batches(skip: Callable[[str], bool] | None) -> Iterator[list[ScoreRow]]:
        if texts:
            return score_texts(
                opened.detector, opened.need_tokenizer(), paths, tally=tally, batch_size=batch_size,
                on_unreadable=options.tell_unreadable_line, skip=skip,
            )  # fmt: skip
        return score_images(
            opened.detector, opened.need_preprocessing(), paths, tally=tally, batch_size=batch_size, workers=workers,
            on_unreadable=options.tell_unreadable, skip=skip, label=label,
        )  # fmt: skip

    with options.progress(quiet):
        if engine == "ray":
            from neuralmean.jobs import cluster as distributed

            def tell(note: Unreadable) -> None:
                tally.unreadable += 1
                options.tell_unreadable(note)

            where: dict[str, Any] = {"address": address, "workers": workers, "batch_size": batch_size}
            where |= {
                "model": opened.detector.model,
                "preprocessing": opened.need_preprocessing(),
                "on_unreadable": tell,
            }
            if out is not None:
                run = distributed.score(saved, paths, out=out, format=kind, resume=resume, **where)
                tally = Tally(run.n_images, run.n_ood, run.n_unreadable, resumed=run.n_resumed)
            else:
                _print(kind, (chunk.rows() for chunk in distributed.stream(saved, paths, **where)), tally)
        elif out is not None:
            own = [*([] if rate is None else [rate]), *([groups] if groups else [])]
            settings = [list(map(str, paths)), prepared, batch_size, freeze, *own]
            file = ScoreFile(out, kind, artefact=Artefact.read(saved), settings=settings, resume=resume)
            try:
                file.write(batches, tally, fdr)
            except KeyboardInterrupt:
                typer.echo("Stopped. Run the same command with --resume to continue.", err=True)
                raise
        elif fdr is not None:
            rows = [row for part in batches(None) for row in part]
            _print(kind, (list(part) for part in (select_rows(lambda: rows, fdr),)), tally)
        else:
            _print(kind, batches(None), tally)
    bound = describe_flags(tally, opened.detector.calibrated())
    _finish(tally, quiet, fail_on_ood, paths, bound)


def _score_boxes(opened: SavedDetector, paths: list[str], file: Path, kind: str, out: Path | None, quiet: bool) -> int:
    """Write a row for each box, and return how many are flagged."""
    from neuralmean.files.atomic import write_atomically
    from neuralmean.jobs.boxes import format_boxes, read_box_file, score_boxes

    found = score_boxes(
        opened.detector, opened.need_preprocessing(), paths, read_box_file(file), on_unreadable=options.tell_unreadable
    )
    counts = [0, 0]

    def lines() -> Iterator[str]:
        for index, rows in enumerate(found):
            counts[0] += len(rows)
            counts[1] += sum(row.is_ood for row in rows)
            yield from format_boxes(kind, rows, header=index == 0)

    if out is None:
        for line in lines():
            typer.echo(line)
    else:
        with write_atomically(out, "w") as target:
            target.writelines(f"{line}\n" for line in lines())
    if not quiet:
        typer.echo(f"{counts[0]} boxes scored, {counts[1]} OOD", err=True)
    return counts[1]


def _print(kind: str, parts: Iterator[list[ScoreRow]], tally: Tally) -> None:
    from neuralmean.jobs import format_rows

    with closing(parts):  # type: ignore[type-var]  # a generator, whose decoders must end when stdout fails
        for index, rows in enumerate(parts):
            for line in format_rows(kind, tally.count(rows), header=index == 0):
                # To a program every byte of a name, to a terminal none that steers it.
                typer.echo(printable(line) if sys.stdout.isatty() else line, color=True)


def _finish(tally: Tally, quiet: bool, fail_on_ood: bool, paths: list[str], bound: str | None) -> None:
    if not quiet:
        parts = [f"{tally.scored} scored", f"{tally.flagged} OOD"]
        parts += [f"{tally.unreadable} unreadable"] if tally.unreadable else []
        parts += [f"{tally.skipped} skipped (no images)"] if tally.skipped else []
        parts += [f"{tally.resumed} from the earlier run"] if tally.resumed else []
        parts += [bound] if bound else []
        typer.echo(", ".join(parts), err=True)
    if not tally.scored:
        raise InputError(
            f"Expected at least one image or text that can be read in {', '.join(paths)}, but there is none."
        )
    if fail_on_ood and tally.flagged:
        raise typer.Exit(3)
