"""`write_report` turns a detector and sets of images into one HTML file.

The steps: gather, analyse, draw, fill in the template. Texts and colours are in `page/`.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from neuralmean.data.images.arrays import split_name
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError, MissingExtraError
from neuralmean.files.atomic import check_target, write_atomically
from neuralmean.report import analysis, describe, plots, svg
from neuralmean.report.analysis import Comparison, wilson
from neuralmean.report.gather import Pictured, SetResult, gather
from neuralmean.report.overlay import overlay_uri
from neuralmean.report.thumbnails import thumbnail

_COLUMNS = ("auroc", "aupr_id", "aupr_ood", "tnr95", "fpr95", "accuracy")
_TERMS = {
    "reach": "Energy over length",
    "doubt": "Doubt of the classifier",
    "learnt": "Learnt from examples",
    "rest": "Rest",
}


def write_report(
    detector: Detector,
    id_images: Any,
    ood_sets: Mapping[str, Any],
    out: str | Path,
    *,
    title: str | None = None,
    info: Mapping[str, Any] | None = None,
    limit: int | None = None,
) -> Path:
    """Write a self-contained HTML report and return its path; the model runs once over every image.

    Args:
        detector: A fitted or calibrated detector.
        id_images: In-distribution images that the detector was not fitted on: batches of `(images, names)` such as
            `ImageBatches`, or any data that a `Detector` takes.
        ood_sets: Out-of-distribution images, by their name in the report.
        out: The file to write, whole or not at all.
        title: Heading; None makes one of the model's name.
        info: Facts about the sets: `"id"` and `"ood"` as paths (to say where images come from, and to warn where the
            detector was fitted on them), `"id_name"` to call the ID set by, `"preprocessing"` as `Preprocessing.to_json`
            gives it (to show the model's inputs as pictures).
        limit: Maximum number of images of each set, the first ones; see `spread_over` for files.

    Raises:
        MissingExtraError: jinja2 is not installed.
        NotFittedError: The detector has no threshold yet.
    """
    environment = _environment()
    path = Path(out)
    _check(detector, ood_sets, path, limit)
    known = {**detector.info, **(info or {})}
    inside = gather(detector, id_images, name=str(known.get("id_name") or "ID"), limit=limit)
    outside = [gather(detector, data, name=str(name), limit=limit) for name, data in ood_sets.items()]
    content = _content(detector, inside, outside, info or {})
    content["title"] = title or f"{describe.model_name(detector)}: what is out of distribution?"
    html = environment.get_template("report.html").render(content)
    with write_atomically(path) as file:
        file.write(html.encode("utf-8", "backslashreplace"))  # file names may hold bytes that are not text
    return path


def _content(
    detector: Detector, inside: SetResult, outside: list[SetResult], info: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of the template, except the title."""
    found = [analysis.compare(detector, inside, one) for one in outside]
    return {
        "generated": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "rate": detector.false_alarm_rate,
        "threshold": detector.threshold,
        "guarantee": detector.guarantee,
        "scorer": getattr(detector.scorer, "name", type(detector.scorer).__name__),
        "facts": describe.facts(detector),
        "cautions": describe.cautions(detector, inside, outside, info),
        "layers": [(layer.name, layer.kind, layer.channels) for layer in detector.watched],
        "sets": _sets(inside, outside, info),
        "rows": [_row(index, one) for index, one in enumerate(found, start=1)],
        "plots": _plots(detector, inside, outside, found),
        "shares": _shares(detector, inside, outside),
        "galleries": _galleries(detector, inside, outside, _preprocessing({**detector.info, **info})),
        "sample": min(len(one.sample) for one in (inside, *outside)),
        "batches": analysis.BATCHES,
        "batches_sentence": describe.batches_sentence(found),
    }


def _check(detector: Detector, ood_sets: Mapping[str, Any], path: Path, limit: int | None) -> None:
    """Check the arguments before minutes of work."""
    detector.calibrated()
    if not isinstance(ood_sets, Mapping) or not ood_sets:
        raise InputError(f"Expected `ood_sets` to be at least one set of images by name, but got {ood_sets!r}.")
    if limit is not None and limit < 1:
        raise InputError(f"Expected `limit` to be at least 1, but got {limit!r}.")
    check_target(path)


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("The report needs jinja2. Install it with `pip install neuralmean[report]`.") from None
    page = resources.files("neuralmean.report") / "page"
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: (page / name).read_text(encoding="utf-8")),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": plots.percent,
        "thousands": "{:,}".format,
        "number": svg.label,
        "short": plots.short,
    }
    script = (page / "script.js").read_text(encoding="utf-8")
    # The browser then runs this script and no other, whatever a file name may hold.
    environment.globals |= {"style": (page / "style.css").read_text(encoding="utf-8"), "script": script}
    environment.globals["script_hash"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment


def _preprocessing(info: Mapping[str, Any]) -> Preprocessing | None:
    raw = info.get("preprocessing")
    return Preprocessing.from_json(raw) if isinstance(raw, Mapping) else None


def _sets(inside: SetResult, outside: list[SetResult], info: Mapping[str, Any]) -> list[dict[str, Any]]:
    places = info.get("ood")
    found = []
    for index, result in enumerate((inside, *outside)):
        place = info.get("id") if index == 0 else places.get(result.name) if isinstance(places, Mapping) else None
        found.append(
            {
                "name": result.name,
                "series": plots.series(index),
                "marker": index - 1,
                "count": len(result),
                "flagged": result.flagged,
                "n_flagged": result.n_flagged,
                "most_false": None if index == 0 else result.most_false,
                "interval": wilson(result.flagged, len(result)),
                "place": ", ".join(map(str, place)) if isinstance(place, (list, tuple)) else str(place or ""),
            }
        )
    return found


def _row(index: int, found: Comparison) -> dict[str, Any]:
    figures = found.figures.to_dict()
    cells = [(name, figures[name], found.intervals[name]) for name in _COLUMNS]
    return {"name": found.name, "series": plots.series(index), "cells": cells, "n_ood": found.figures.n_ood}


def _plots(
    detector: Detector, inside: SetResult, outside: list[SetResult], found: list[Comparison]
) -> dict[str, str | None]:
    everything = [inside, *outside]
    binned = analysis.histogram([one.scores for one in everything], detector.threshold)
    names, flagged = [one.name for one in everything], [one.flagged for one in everything]
    drawn: dict[str, str | None] = {
        "scores": plots.both_widths(plots.draw_histogram, names, binned, flagged, detector.threshold),
        "roc": plots.draw_roc(found, [(1 - one.flagged, 1 - inside.flagged) for one in outside]),
        "batches": plots.draw_batches(found),
        "layers": None,
        "depth": None,
        "weights": None,
    }
    weights = analysis.weight_by_layer(detector)
    if weights is not None:
        drawn["weights"] = plots.both_widths(plots.draw_weights, detector.layers, weights)
    excess = {one.name: values for one in outside if (values := analysis.excess_by_part(inside, one)) is not None}
    if excess and inside.parts is not None:
        n_layers = len(detector.layers)
        by_layer = {name: values[:n_layers] for name, values in excess.items()}
        spread = inside.parts.std[:n_layers].numpy()
        drawn["layers"] = plots.both_widths(plots.draw_layers, detector.layers, by_layer, spread)
    depth = {one.name: one.by_depth for one in found if one.by_depth is not None}
    if depth and len(detector.layers) > 1:
        drawn["depth"] = plots.both_widths(plots.draw_depth, detector.layers, depth)
    return drawn


def _shares(detector: Detector, inside: SetResult, outside: list[SetResult]) -> list[dict[str, Any]]:
    """Where the mean score of each set above that of ID comes from: all layers together, then terms of no layer."""
    excess = [analysis.excess_by_part(inside, one) for one in outside]
    n_layers, names = len(detector.layers), inside.part_names
    rows: list[dict[str, Any]] = []
    for index, name in enumerate(["All layers", *(_TERMS.get(term, term) for term in names[n_layers:])]):
        part = slice(0, n_layers) if index == 0 else slice(n_layers + index - 1, n_layers + index)
        values = [float(one[part].sum()) for one in excess if one is not None]
        if len(values) == len(outside) and (index == 0 or max(map(abs, values)) >= 0.005):
            rows.append({"name": name, "values": values})
    if len(rows) < 2:
        return []
    return [*rows, {"name": "Together", "values": [float(one.scores.mean() - inside.scores.mean()) for one in outside]}]


def _galleries(
    detector: Detector, inside: SetResult, outside: list[SetResult], preprocessing: Preprocessing | None
) -> list[dict[str, Any]]:
    found = []
    for index, result in enumerate((inside, *outside)):
        ends = min(len(result.most), max(1, len(result) // 2))
        rows = {
            words: [_card(detector, inside, picture, preprocessing, index) for picture in pictures[:ends]]
            for words, pictures in (("Most unusual", result.most), ("Least unusual", result.least))
        }
        found.append({"name": result.name, "series": plots.series(index), "rows": rows, "is_id": index == 0})
    return found


def _map(detector: Detector, picture: Pictured, preprocessing: Preprocessing | None) -> str | None:
    """Return the image under a map of where its score comes from; None if there is no such map."""
    if picture.image is None:
        return None
    try:
        found = detector.locate(picture.image.unsqueeze(0))[0]
    except InputError:  # a scorer without contributions, or an input that is not an image
        return None
    return overlay_uri(picture.image, found, preprocessing, 96)


def _card(
    detector: Detector, inside: SetResult, picture: Pictured, preprocessing: Preprocessing | None, index: int
) -> dict[str, Any]:
    profile = None
    if picture.parts is not None and inside.parts is not None:
        n_layers = len(detector.layers)
        spread = inside.parts.std.clamp_min(1e-12)
        values = ((picture.parts.double() - inside.parts.mean) / spread)[:n_layers].numpy()
        profile = plots.draw_profile(np.nan_to_num(values), detector.layers, plots.series(index))
    name = picture.name if picture.name is not None else f"image {picture.row}"
    return {
        "uri": thumbnail(picture, preprocessing),
        "map": _map(detector, picture, preprocessing),
        "name": name,
        "short": Path(name).name if split_name(name)[1] is None else f"#{split_name(name)[1]}",
        "score": picture.score,
        "p_value": picture.p_value,
        "kind": picture.kind,
        "is_ood": picture.kind != "typical",
        "profile": profile,
    }
