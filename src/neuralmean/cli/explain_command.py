"""`nmd explain`: which layers make the score high, and where in the image."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app
from neuralmean.data.progress import printable
from neuralmean.errors import InputError, UsageError

if TYPE_CHECKING:
    from neuralmean.detector.saved import SavedDetector

_BAR = 40
_TERMS = {
    "reach": "large activations that lead to no confident prediction",
    "doubt": "how undecided the classifier is",
    "learnt": "likeness to the out-of-distribution examples of the fit",
}


@app.command(epilog="Example: `nmd explain model.nmd photo.png`, or `nmd explain model.nmd photos.npz#12`.")
def explain(
    saved: options.Saved,
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE",
            help="An image, a row of an array file or a line of a text file, as `nmd score` names it.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="Number of channels to show.")] = 5,
    format_: Annotated[str, typer.Option("--format", help="table or json.")] = "table",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="PNG", help="Write the image and a map of where its score comes from to this file."
        ),
    ] = None,
    model: options.Model = None,
    weights: options.Weights = None,
    trust_local_code: options.TrustLocalCode = False,
) -> None:
    """Show how much each layer adds to the score of an image, and with `--out` each place."""
    from neuralmean.data.images import ImageBatches
    from neuralmean.data.images.arrays import row_name, split_name
    from neuralmean.data.texts import are_texts
    from neuralmean.detector.groups import refuse_labels
    from neuralmean.detector.saved import open_saved

    if format_ not in ("table", "json"):
        raise UsageError(f"Expected --format to be table or json, but got {format_!r}.")
    if Path(image).is_dir():
        raise UsageError(f"Expected one image to explain, but {image!r} is a folder. Name a file in it.")
    if out is not None and out.suffix.lower() != ".png":
        raise UsageError(f"Expected --out to end in .png, but got {str(out)!r}.")
    options.check_out(out, saved, weights, Path(image))
    opened = open_saved(saved, model=model, weights=weights, trust_local_code=trust_local_code)
    refuse_labels(opened.detector.learnt.grouped_by, "an explanation")
    if are_texts([image]):
        if out is not None:
            raise UsageError("Expected --out with an image only. Leave it out: the tokens are listed.")
        _explain_text(opened, image, format_)
        return
    path, row = split_name(image)
    if row is None or Path(image).exists():
        batches = ImageBatches([image], opened.need_preprocessing(), workers=0)
    else:
        wanted = row_name(path, row)
        batches = ImageBatches([path], opened.need_preprocessing(), workers=0, skip=lambda name: name != wanted)
    batch = next(iter(batches), None)
    if batch is None:
        reason = f": {batches.unreadable[0]}" if batches.unreadable else ", but there is none."
        raise InputError(f"Expected an image that can be read, but got {image!r}{reason}")
    decision, found = opened.detector.predict(batch.images[:1])[0], opened.detector.explain(batch.images[:1])
    if out is not None:
        from neuralmean.report.overlay import write_overlay

        write_overlay(out, batch.images[0], opened.detector.locate(batch.images[:1])[0], opened.preprocessing)
    layers = list(zip(found.layers, found.by_layer[0].tolist(), strict=True))
    terms = {name: value[0].item() for name, value in found.terms.items()}
    if format_ == "json":
        answer: dict[str, Any] = {
            "path": batch.names[0],
            "score": decision.score.item(),
            "p_value": decision.p_value.item(),
        }
        answer |= {"is_ood": bool(decision.is_ood), "kind": decision.kind[0], "sentence": decision.sentence[0]}
        for name in ("p_appearance", "p_content"):
            found_p = getattr(decision, name)
            answer[name] = None if found_p is None else found_p.item()
        answer |= {"layers": dict(layers), "terms": terms, "exact": found.exact}
        typer.echo(json.dumps(answer))
        return
    typer.echo(printable(f"{batch.names[0]}: {decision}"))
    typer.echo(decision.sentence[0])
    if decision.p_appearance is not None and decision.p_content is not None:
        typer.echo(f"p-values: appearance {decision.p_appearance.item():.3g}, content {decision.p_content.item():.3g}")
    parts = [*layers, *terms.items()]
    largest = max((abs(value) for name, value in parts if name != "constant"), default=0.0) or 1.0
    width = max(len(name) for name, _ in parts)
    for name, value in parts:
        bar = ("█" if value > 0 else "░") * min(round(abs(value) / largest * _BAR), _BAR)
        typer.echo(f"{name:<{width}}  {value:>9.4f}  {bar if name != 'constant' else ''}".rstrip())
    typer.echo("channels: " + ", ".join(f"{name} {value:.3g}" for name, value in found.top_channels(n=top)))
    for name in filter(_TERMS.get, terms):
        typer.echo(f"{name}: {_TERMS[name]}")
    typer.echo("layers and terms add up to the score" if found.exact else "to first order: gradient times vector")
    typer.echo("█ raises the score, ░ lowers it")


def _explain_text(opened: SavedDetector, name: str, format_: str) -> None:
    """Show how much each token adds to the score of the first text that `name` names."""
    from neuralmean.data.texts import TextBatches

    tokenizer = opened.need_tokenizer()
    found = next(iter(TextBatches([name], tokenizer).texts()), None)
    if found is None:
        raise InputError(f"Expected a text in {name!r}, but there is none. Name a line as `texts.txt:12`.")
    inputs = dict(tokenizer([found[1]]))
    decision, shares = opened.detector.predict(inputs)[0], opened.detector.locate(inputs)[0].tolist()
    words = tokenizer.words(found[1])
    if format_ == "json":
        answer = {"path": found[0], "score": decision.score.item(), "p_value": decision.p_value.item()}
        typer.echo(
            json.dumps({**answer, "is_ood": bool(decision.is_ood), "tokens": list(zip(words, shares, strict=False))})
        )
        return
    typer.echo(f"{found[0]}: {decision}")
    typer.echo(decision.sentence[0])
    largest, width = max(map(abs, shares), default=0.0) or 1.0, max(map(len, words), default=0)
    for word, value in zip(words, shares, strict=False):
        bar = ("█" if value > 0 else "░") * round(abs(value) / largest * _BAR)
        typer.echo(f"{word:<{width}}  {value:>9.4f}  {bar}".rstrip())
