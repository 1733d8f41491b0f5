"""The texts of the report: what was fitted on what, the guarantee of the threshold, cautions."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from neuralmean import __version__
from neuralmean.detector.detector import Detector
from neuralmean.models.layers import unwrap
from neuralmean.report.analysis import Comparison, wilson
from neuralmean.report.gather import SetResult
from neuralmean.stats.calibration import likely_rates

_REFERENCE = {
    "batchnorm": "the model's batch-norm buffers: training means without a pass over data",
    "data": "one pass over in-distribution data",
}
_STATISTIC = {
    "mean": "channel means (NMD)",
    "variance": "channel variances (NVD)",
    "both": "channel means and variances (NMD and NVD)",
}
_CALIBRATION = {
    "held_out": "held-out images",
    "rotated": "ID images, slightly rotated",
    "kept_aside": "a part of the ID images kept aside",
    "folds": "the ID images, cross-fitted",
    "all": "all ID images",
}


class Fact(NamedTuple):
    """A line of the table of facts."""

    name: str
    value: str
    more: str = ""


def model_name(detector: Detector) -> str:
    """Return the name of the model: its spec if known, else its class."""
    spec = detector.info.get("model")
    return spec if isinstance(spec, str) else type(unwrap(detector.model)).__name__


def batches_sentence(found: Sequence[Comparison]) -> str:
    """Return a sentence on how judging several images together changes the AUROC of each set."""
    parts = []
    for one in found:
        size = max(one.by_batch)
        alone, together = one.by_batch[1][0], one.by_batch[size][0]
        if size == 1:
            parts.append(f"{one.name} has too few images for batches")
        elif abs(together - alone) < 0.1:
            parts.append(f"{one.name} stays at {alone:.1f} %")
        else:
            verb = "rises" if together > alone else "falls"
            parts.append(f"{one.name} {verb} from {alone:.1f} to {together:.1f} % with {size}")
    return f"AUROC when several images of one source are judged as a batch: {'; '.join(parts)}."


def facts(detector: Detector) -> list[Fact]:
    """Return the table of what was fitted on what."""
    fitted, calibration = detector.fitted, detector.calibrated()
    scorer = getattr(detector.scorer, "name", type(detector.scorer).__name__)
    options = detector.scorer.get_options() if hasattr(detector.scorer, "get_options") else {}
    lines = [
        Fact("Model", model_name(detector), type(unwrap(detector.model)).__name__),
        Fact("Weights", f"sha256 {detector.fingerprint[:16]}…", _text(detector.info.get("weights"))),
        Fact(
            "Watched",
            f"{len(detector.layers)} layers, {len(detector.channels):,} channels",
            _STATISTIC[detector.statistic],
        ),
        Fact("Scorer", str(scorer), ", ".join(f"{name} {value}" for name, value in options.items())),
        _reference(detector),
    ]
    if fitted.get("n_id"):
        lines.append(Fact("Fitted on", f"{fitted['n_id']:,} ID images", _text(detector.info.get("id"))))
    if fitted.get("n_ood"):
        lines.append(Fact("and on", f"{fitted['n_ood']:,} OOD images", _text(detector.info.get("ood"))))
    if fitted.get("n_crafted"):
        lines.append(
            Fact("and on", f"{fitted['n_crafted']:,} crafted OOD images", "ID images with their blocks permuted")
        )
    source = detector.calibration_source or "held_out"
    where = _text(detector.info.get("held_out")) if source == "held_out" else ""
    lines.append(Fact("Threshold from", f"{len(calibration.scores):,} scores of {_CALIBRATION[source]}", where))
    rate = f"{100 * calibration.false_alarm_rate:g} % false alarms requested"
    lines.append(Fact("Threshold", f"{calibration.threshold:.5g}", rate))
    if fitted.get("when"):
        lines.append(Fact("Fitted at", _when(str(fitted["when"]))))
    lines.append(Fact("Written by", f"neuralmean {__version__}", f"torch {torch.__version__}"))
    return lines


def cautions(
    detector: Detector, inside: SetResult, outside: list[SetResult], info: Mapping[str, Any] | None
) -> list[str]:
    """Return what a reader must know before trusting the figures."""
    found = []
    rate = detector.false_alarm_rate
    interval, calibration = wilson(inside.flagged, len(inside)), detector.calibrated()
    # Both the images here and the scores that set the threshold are draws.
    _, highest = likely_rates(len(calibration.scores), calibration.level)
    if interval.low > 100 * highest:
        found.append(
            f"False alarms are {100 * inside.flagged:.1f} % of {len(inside):,} ID images, more than the {100 * rate:g} % "
            f"requested, and more than chance explains. {detector.guarantee}"
        )
    elif detector.calibration_source not in (None, "held_out"):
        found.append(detector.guarantee)
    if _share_images(_paths(detector.info, "id", "held_out"), _paths(info or {}, "id")):
        found.append(
            "The ID images of this report are ones that the detector was fitted or calibrated on: "
            "the figures flatter. Report on images that it has not seen."
        )
    if _share_images(_paths(detector.info, "ood"), _paths(info or {}, "ood")):
        found.append("Some OOD images of this report are ones that the detector was fitted on: their figures flatter.")
    for result in (inside, *outside):
        if len(result) < 100:
            found.append(f"There are only {len(result)} images in {result.name!r}: expect wide intervals.")
        if result.unreadable:
            found.append(f"{result.unreadable:,} files of {result.name!r} could not be read and are left out.")
    return found


def _reference(detector: Detector) -> Fact:
    reference = detector.reference
    if reference is None:
        return Fact("Reference", "none")
    count = f"{reference.count:,} images" if reference.count else ""
    return Fact("Reference", _REFERENCE.get(reference.source, reference.source), count)


def _text(value: object) -> str:
    """Write a path, or several."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return str(value) if isinstance(value, str) else ""


def _paths(info: Mapping[str, Any], *keys: str) -> set[Path]:
    found: set[Path] = set()
    for key in keys:
        value = info.get(key)
        values = (
            list(value.values())
            if isinstance(value, Mapping)
            else value
            if isinstance(value, (list, tuple))
            else [value]
        )
        found |= {Path(item).resolve() for item in values if isinstance(item, str)}
    return found


def _share_images(some: set[Path], others: set[Path]) -> bool:
    """Return whether one of the paths is, or certainly lies below, one of the others; two globs are never compared."""
    return any(a == b or _is_below(a, b) or _is_below(b, a) for a in some for b in others)


def _is_below(path: Path, folder: Path) -> bool:
    """Return whether everything that a path or glob names is in a folder."""
    if _is_glob(folder):
        return False
    if not _is_glob(path):
        return folder in path.parents
    fixed = Path(*takewhile(lambda part: not glob.has_magic(part), path.parts))
    return fixed == folder or folder in fixed.parents


def _is_glob(path: Path) -> bool:
    return glob.has_magic(str(path)) and not path.exists()


def _when(text: str) -> str:
    """Write an ISO time for people.

    Example:
        >>> _when("2026-05-01T12:30:59+00:00")
        '2026-05-01 12:30 UTC'
    """
    day, _, clock = text.partition("T")
    zone = "UTC" if clock.endswith(("+00:00", "Z")) else ""
    return f"{day} {clock[:5]} {zone}".strip()
