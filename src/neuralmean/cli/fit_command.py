"""`nmd fit`: from a model and folders of images to a saved detector."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.errors import InputError, UsageError

if TYPE_CHECKING:
    from neuralmean.detector.detector import Detector
    from neuralmean.models.spec import ResolvedModel

_EPILOG = (
    "Example: `nmd fit timm:resnet18 --weights r18.safetensors --id photos/train --held-out photos/val --out model.nmd`. "
    "Without --held-out the false-alarm rate is only an estimate."
)


@app.command(epilog=_EPILOG)
def fit(
    model: options.Spec,
    id_data: Annotated[
        list[str],
        typer.Option(
            "--id", metavar="PATH", help="In-distribution images: a folder, files or .npz; or texts: .txt or .jsonl."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write the detector to.")],
    ood: Annotated[
        list[str] | None, typer.Option("--ood", metavar="PATH", help="Out-of-distribution images, if any.")
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option(
            "--held-out",
            metavar="PATH",
            help="In-distribution images that the model was not trained on; they set the threshold.",
        ),
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option(
            "--scorer",
            metavar="NAME",
            help="typicality, guided, average, logistic or mlp; by default guided with --ood, else typicality.",
        ),
    ] = None,
    statistic: Annotated[str, typer.Option("--statistic", metavar="KIND", help="mean, variance or both.")] = "mean",
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", metavar="NAME", help="Layers: names or globs, `!NAME` to leave some out."),
    ] = None,
    false_alarm_rate: Annotated[
        float,
        typer.Option("--false-alarm-rate", metavar="RATE", help="Share of in-distribution images that may be flagged."),
    ] = 0.05,
    confidence: Annotated[
        float | None,
        typer.Option(
            "--confidence",
            metavar="SHARE",
            help="Make the rate hold with this probability over the held-out images, say 0.95.",
        ),
    ] = None,
    groups: options.Groups = None,
    regions: Annotated[
        bool, typer.Option("--regions", help="Also learn regions of images, for `nmd score --boxes`.")
    ] = False,
    weights: options.Weights = None,
    mean: options.Mean = None,
    std: options.Std = None,
    size: options.Size = None,
    crop: options.Crop = None,
    interpolation: options.Interpolation = None,
    allow_untrained: Annotated[
        bool, typer.Option("--allow-untrained", help="Accept a model with random weights.")
    ] = False,
    batch_size: options.BatchSize = 64,
    workers: options.Workers = None,
    device: options.Device = None,
    engine: Annotated[str, typer.Option("--engine", metavar="NAME", help="local, or ray for a cluster.")] = "local",
    address: Annotated[str | None, typer.Option("--address", metavar="URL", help="Address of a Ray cluster.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """Fit a detector to a model and save it."""
    from neuralmean.data.texts import are_texts
    from neuralmean.detector.detector import Detector
    from neuralmean.detector.fitting import check_scorer
    from neuralmean.files.atomic import check_target
    from neuralmean.jobs import CountedBatches, LabelledBatches
    from neuralmean.models.spec import is_untrained
    from neuralmean.stats.calibration import check_confidence, check_rate, examples_needed
    from neuralmean.stats.discrepancy import check_statistic

    options.check_engine(engine)
    if device is not None and engine != "local":
        raise UsageError(f"Expected --device with --engine local, but got --engine {engine}. Leave one of them out.")
    with options.usage():
        check_statistic(statistic)
        check_rate(false_alarm_rate, "--false-alarm-rate")
        check_confidence(confidence)
        check_scorer(scorer)
        label = options.group_labels(groups)
    if regions and (engine != "local" or not held_out):
        raise UsageError("Expected --held-out images and --engine local with --regions.")
    if groups is not None and (engine != "local" or not held_out):
        raise UsageError(
            "Expected --held-out images and --engine local with --groups. Pass them, or leave --groups out."
        )
    check_target(out)
    options.check_out(out, weights, groups, *id_data, *(ood or ()), *(held_out or ()))
    resolved = options.resolve_spec(model, weights, mean, std, size, crop=crop, interpolation=interpolation)
    if are_texts(id_data):
        if engine != "local" or groups is not None or regions:
            raise UsageError("Expected --engine local without --groups and --regions for texts. Leave them out.")
        setup = {"layers": layers or None, "statistic": statistic, "scorer": scorer}
        detector = _fit_texts(
            resolved, id_data, ood, held_out, setup,
            false_alarm_rate=false_alarm_rate, confidence=confidence, batch_size=batch_size, quiet=quiet,
        )  # fmt: skip
        detector.save(out, info={"model": options.absolute_spec(model), "id": list(map(os.path.abspath, id_data))})
        typer.echo(f"{out}: {detector!r}", err=True)
        return
    how = resolved.preprocessing
    if how is None:
        raise InputError(
            f"Expected the preprocessing of the images of {model!r}, but neither the model nor an option gives it. "
            "Pass --mean, --std and --size."
        )
    if not allow_untrained and is_untrained(resolved):
        raise InputError(
            f"Expected a trained model, but {model!r} has random weights. Pass --weights FILE, or --allow-untrained."
        )
    sets = {"id": id_data, "ood": ood, "held_out": held_out}
    info: dict[str, Any] = {
        "model": options.absolute_spec(model),
        "preprocessing": how.to_json(),
        **{key: paths and list(map(os.path.abspath, paths)) for key, paths in sets.items()},
    }
    if resolved.weights_path is not None:
        info["weights"] = str(resolved.weights_path.resolve())

    def images(paths: list[str] | None) -> CountedBatches | None:
        if not paths:
            return None
        return CountedBatches(paths, how, batch_size=batch_size, workers=workers, on_unreadable=options.tell_unreadable)

    if confidence is not None and not quiet:
        typer.echo(
            f"A false-alarm rate of {false_alarm_rate:g} that holds with a confidence of {confidence:g} needs at least "
            f"{examples_needed(false_alarm_rate, confidence):,} held-out images.",
            err=True,
        )
    with options.progress(quiet):
        if engine == "ray":
            from neuralmean.jobs import cluster as distributed

            detector = distributed.fit(
                resolved.model, id_data, ood, held_out=held_out, preprocessing=how, layers=layers or None,
                statistic=statistic, scorer=scorer, false_alarm_rate=false_alarm_rate, confidence=confidence,
                batch_size=batch_size, address=address, workers=workers, on_unreadable=options.tell_unreadable,
            )  # fmt: skip
        else:
            apart = images(held_out)
            if label is not None and apart is not None:
                apart = LabelledBatches(
                    label, held_out, how, batch_size=batch_size, workers=workers, on_unreadable=options.tell_unreadable
                )
            by = apart.labels if isinstance(apart, LabelledBatches) else groups
            detector = Detector(resolved.model, layers=layers or None, statistic=statistic, scorer=scorer)
            if device is not None:
                detector.to(device)
            detector.fit(
                images(id_data), images(ood), held_out=apart, false_alarm_rate=false_alarm_rate,
                confidence=confidence, groups=by, regions=regions,
            )  # fmt: skip
    detector.save(out, info=info)
    typer.echo(f"{out}: {detector!r}", err=True)


def _fit_texts(
    resolved: ResolvedModel,
    id_data: list[str],
    ood: list[str] | None,
    held_out: list[str] | None,
    setup: dict[str, Any],
    *,
    false_alarm_rate: float,
    confidence: float | None,
    batch_size: int,
    quiet: bool,
) -> Detector:
    """Fit a detector on files of texts."""
    from neuralmean.data.texts import TextBatches
    from neuralmean.detector.detector import Detector

    tokenizer = resolved.tokenizer
    if tokenizer is None:
        raise InputError(f"Expected a model that takes texts, as `hf:DIR`, but got {resolved.spec!r}.")

    def texts(paths: list[str] | None) -> TextBatches | None:
        if not paths:
            return None
        return TextBatches(paths, tokenizer, batch_size=batch_size, on_unreadable=options.tell_unreadable_line)

    with options.progress(quiet):
        detector = Detector(resolved.model, head=None if resolved.has_classes else False, **setup)
        return detector.fit(
            texts(id_data),
            texts(ood),
            held_out=texts(held_out),
            false_alarm_rate=false_alarm_rate,
            confidence=confidence,
        )
