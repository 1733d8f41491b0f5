"""`nmd bench`: the paper, reproduced."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.errors import InputError

bench = typer.Typer(
    name="bench",
    help="The paper as a program, on your own copies of the data sets and weights.",
    epilog="Example: `nmd bench list`, then `nmd bench run few-shot --data data --weights weights`.",
    no_args_is_help=True,
)
app.add_typer(bench)

Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="Folder of the image sets.")]
Models = Annotated[Path, typer.Option("--weights", metavar="DIR", help="Folder of the trained models.")]


class Recipes(str, Enum):
    """Recipes by name."""

    full = "full"


class Precisions(str, Enum):
    """What `--precision` takes."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@bench.command("list", epilog="Example: `nmd bench list --methods`.")
def list_(
    methods: Annotated[bool, typer.Option("--methods", help="List the methods instead.")] = False,
    data: Data = Path("data"),
    weights: Models = Path("weights"),
) -> None:
    """List the experiments, the parts of the paper they reproduce, and whether their data and weights are available."""
    if methods:
        from neuralmean.bench import baselines

        for name in baselines.names():
            typer.echo(name)
        return
    from neuralmean.bench import experiments

    if data.is_dir() and weights.is_dir():
        for entry in experiments.available(data, weights):
            state = f"ready: {'; '.join(entry.ready)}" if entry.ready else "no data for it"
            typer.echo(f"{entry.name:<15}{entry.title} ({entry.reference})\n{'':<15}{state}")
            if entry.missing:
                typer.echo(f"{'':<15}missing: {', '.join(entry.missing)}")
        return
    for name in experiments.names():
        found = experiments.get(name)
        typer.echo(f"{name:<15}{found.title} ({found.reference})")
    typer.echo("Pass --data DIR and --weights DIR to see what can be run.", err=True)


@bench.command(epilog="Example: `nmd bench run statistical few-shot --data data --weights weights --out results.json`.")
def run(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Experiments; all by default.")] = None,
    data: Data = Path("data"),
    weights: Models = Path("weights"),
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Results file; existing rows are kept.")] = Path(
        "results.json"
    ),
    cache: Annotated[
        Path | None,
        typer.Option("--cache", metavar="DIR", help="Folder of the feature cache; next to --out by default."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=50, help="Maximum number of images of a set, for a quick run.")
    ] = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="Only these methods; may be repeated.")] = None,
    models: Annotated[
        list[str] | None, typer.Option("--model", help="Only these models: names, or specs such as package:build.")
    ] = None,
    oods: Annotated[
        list[str] | None, typer.Option("--ood", metavar="NAME=DIR", help="A set of your own; may be repeated.")
    ] = None,
    id_set: Annotated[
        str | None, typer.Option("--id", metavar="SET", help="The set that models given as specs were trained on.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure rows again that are in the results file.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of draws and fits.")] = 0,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Number of worker processes.")] = 1,
    quiet: options.Quiet = False,
) -> None:
    """Run experiments; an interrupted run resumes where it stopped."""
    from neuralmean.bench import experiments

    def announce(line: str) -> None:
        if not quiet:
            typer.echo(line, err=True)

    with options.progress(quiet):
        rows = experiments.run(
            names or None, data=data, weights=weights, out=out, cache=cache, limit=limit, seed=seed,
            methods=methods or None, models=models or (), oods=options.named_paths(oods or []), id_set=id_set, again=again,
            jobs=jobs, announce=announce,
        )  # fmt: skip
    from neuralmean.bench.table import as_text

    ran = [row for row in rows if names and row["experiment"] in names]
    typer.echo(as_text(ran))
    typer.echo(f"{out}: {len(rows)} rows. Write tables and plots with `nmd bench report {out}`.", err=True)


@bench.command(epilog="Example: `nmd bench report results.json --html results.html --markdown results.md`.")
def report(
    results: Annotated[Path, typer.Argument(metavar="FILE", help="A results file.", show_default=False)],
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write an HTML page to this file.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write a Markdown page to this file.")
    ] = None,
) -> None:
    """Write results next to the paper's figures, with differences and plots; without options, both pages next to FILE."""
    from neuralmean.bench import report as work

    if not results.name:
        raise InputError(f"Expected the name of a results file, but got {str(results)!r}.")
    if html is None and markdown is None:
        html, markdown = results.with_suffix(".html"), results.with_suffix(".md")
    for path in work.write(results, html=html, markdown=markdown):
        typer.echo(str(path))


@bench.command(
    epilog="Example: `nmd bench train resnet34 --id cifar10 --data data --budget 3h --out resnet34.safetensors`."
)
def train(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model; see `nmd bench models`.", show_default=False)],
    id_set: Annotated[str, typer.Option("--id", metavar="SET", help="The set to train on.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write the weights to.")],
    data: Data = Path("data"),
    epochs: Annotated[
        int | None, typer.Option("--epochs", min=1, help="Epochs, instead of those of the recipe.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="TIME", help="Time for training, such as 45m or 3h; sets image sizes and epochs."
        ),
    ] = None,
    recipe: Annotated[
        Recipes | None, typer.Option("--recipe", help="full: the recipe of the architecture's paper.")
    ] = None,
    init: Annotated[Path | None, typer.Option("--init", metavar="FILE", help="Weights to start from.")] = None,
    precision: Annotated[
        Precisions, typer.Option("--precision", help="auto: bfloat16 if a trial shows that it works and is faster.")
    ] = Precisions.auto,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model first; needs a C++ compiler.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of images.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Random seed.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Overwrite existing weights.")] = False,
    quiet: options.Quiet = False,
) -> None:
    """Train a model; after an interruption, run the same command again to resume."""
    from neuralmean.bench import data as sets
    from neuralmean.bench.train import full_recipe
    from neuralmean.bench.train import train as work
    from neuralmean.cli.training import TrainingBar, parse_duration

    if budget is not None and (recipe is not None or epochs is not None):
        raise InputError("Expected either --budget or --recipe and --epochs, but got both. Leave one of them out.")

    images, test = sets.load(id_set, "train", data), sets.load(id_set, "test", data)
    if limit is not None:
        images = images.limit(limit)
    with TrainingBar(f"Training {name}", quiet=quiet) as bar:
        trained = work(
            name, images, out=out, test_set=test, epochs=epochs, seed=seed, overwrite=overwrite, progress=bar,
            recipe=None if recipe is None else full_recipe(name, dataset=images.name), init=init,
            budget=None if budget is None else parse_duration(budget), precision=precision.value,
            compiled=compiled,
        )  # fmt: skip
    found = trained.metadata.get("accuracy") or trained.metadata.get("linear_accuracy") or "not measured"
    typer.echo(f"{out}: accuracy {found}", err=True)


@bench.command("data", epilog="Example: `nmd bench data --data data --download svhn`.")
def data_(
    data: Data = Path("data"),
    download: Annotated[
        list[str] | None, typer.Option("--download", metavar="SET", help="Download this set first.")
    ] = None,
) -> None:
    """List the image sets that were found, and how to get the missing ones."""
    from neuralmean.bench import data as sets

    for name in download or []:
        typer.echo(f"Getting {name}…", err=True)
        sets.download(name, data)
    if not data.is_dir():
        raise InputError(f"Expected the folder of the image sets, but {str(data)!r} is none. Say --data DIR.")
    for entry in sets.find(data):
        where = f"{entry.count or 0:>7} images  {entry.path}  {entry.check}" if entry.path else f"missing: {entry.hint}"
        typer.echo(f"{entry.name:<17}{entry.split:<7}{where}")


@bench.command(epilog="Example: `nmd bench models --data data --weights weights`.")
def models(
    data: Data = Path("data"),
    weights: Models = Path("weights"),
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Maximum number of test images.")] = None,
    quiet: options.Quiet = False,
) -> None:
    """List every architecture, with the measured and expected accuracy of the trained ones."""
    from neuralmean.bench import data as sets
    from neuralmean.bench import models as zoo
    from neuralmean.bench.models.evaluate import accuracy, expected_accuracy

    found = sorted(weights.glob("*.safetensors")) if weights.is_dir() else []
    typer.echo("architectures: " + ", ".join(zoo.names()))
    for path in found:
        trained = zoo.load_weights(path)
        expected = expected_accuracy(trained)
        told = "" if expected is None else f", expected {expected:.2f} %"
        name = trained.metadata.get("dataset", "")
        if not data.is_dir() or not trained.num_classes:
            typer.echo(f"{path.name}: {trained.name}, {trained.num_classes} classes{told}")
            continue
        test = sets.load(name, "test", data)
        test = test if limit is None else test.limit(limit)
        if test.labels is None:
            raise InputError(f"Expected labels in the test set of {name!r}, but there are none.")
        images, labels = test.images, test.labels
        if not quiet:
            typer.echo(f"{path.name}: running {len(images)} images…", err=True)
        typer.echo(f"{path.name}: {accuracy(trained, images, labels):.2f} % of {len(images)}{told}")
