"""Describes a model as `Detector` would use it, and saved files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from neuralmean.data.batch import to_batch
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import ArtefactError, NeuralMeanError
from neuralmean.files.artefact import Artefact
from neuralmean.models.layers import Layer, has_running_mean, select_layers, unwrap
from neuralmean.recording import find_head
from neuralmean.scorers.typicality import TERMS, left_out


@dataclass(frozen=True)
class Inspection:
    """The watched layers of a model, where its reference comes from, and which terms the default scorer can use."""

    layers: tuple[Layer, ...]
    reference: str
    head: str | None
    head_known: bool
    preprocessing: Preprocessing | None

    def summary(self) -> list[str]:
        """Return the inspection in a few lines."""
        total = sum(layer.channels for layer in self.layers)
        source = {
            "batchnorm": "the batch-norm buffers, no data needed",
            "data": "one pass over the data given to fit",
        }[self.reference]
        lines = [f"{len(self.layers)} layers, {total} channels", f"reference: {source}"]
        if not self.head_known:
            lines.append("default scorer: chosen in fit (give --size to see it now)")
        elif self.head is None:
            lines.append(
                "default scorer: typicality, with its terms far and angle (no layer's output is the model's, so no classes)"
            )
        else:
            terms = "far, angle, reach and doubt"
            lines.append(f"default scorer: typicality, with its terms {terms} (classes from {self.head!r})")
        how = self.preprocessing
        lines.append(
            "preprocessing: not known, give --mean, --std and --size" if how is None else f"preprocessing: {how}"
        )
        return lines


def inspect_model(
    model: nn.Module, layers: Sequence[str] | None = None, preprocessing: Preprocessing | None = None
) -> Inspection:
    """Inspect `model` as `Detector` would use it; runs the model once if the size of its input is known."""
    chosen = select_layers(model, layers)
    core = unwrap(model)
    free = all(has_running_mean(core.get_submodule(layer.name)) for layer in chosen)
    head, known = None, False
    if preprocessing is not None and preprocessing.size is not None:
        try:
            head = find_head(model, to_batch(torch.zeros(2, preprocessing.channels, *preprocessing.size)))
            known = True
        except (NeuralMeanError, RuntimeError, TypeError, ValueError):
            known = False  # a model that does not take images
    return Inspection(chosen, "batchnorm" if free else "data", head, known, preprocessing)


def describe_saved(path: str | Path) -> list[str]:
    """Describe a saved detector, without its model."""
    artefact = Artefact.read(path)
    try:
        return _describe(artefact)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError):
        raise ArtefactError(
            f"Expected {str(path)!r} to describe a detector, but its content is invalid. Fit again."
        ) from None


def _describe(artefact: Artefact) -> list[str]:
    header = artefact.header
    fitted, calibration, info = header["fitted"], header["calibration"], header["info"]
    counts = ", ".join(f"{key.removeprefix('n_')} {value}" for key, value in fitted.items() if key.startswith("n_"))
    return [
        f"model: {info.get('model', header['model_class'])}",
        f"layers: {len(header['layers'])}, channels: {sum(layer[2] for layer in header['layers'])}",
        f"statistic: {header['statistic']}, scorer: {header['scorer']['name']}, reference: {header['reference']['source']}",
        *_describe_terms(artefact),
        f"fitted: {fitted.get('when', 'calibrated only')}, on {counts or 'no data'}",
        f"threshold: {calibration['threshold']:.6g} for {calibration['false_alarm_rate']:g} alarms ({calibration['source']})",
        f"weights: sha256 {header['fingerprint'][:16]}…",
        f"written by: {', '.join(' '.join(pair) for pair in header['versions'].items())}, format {header['format_version']}",
    ]


def _describe_terms(artefact: Artefact) -> list[str]:
    """Describe which terms of the typicality score count, and why others do not."""
    used = next((tensor for name, tensor in artefact.tensors.items() if name.endswith("used_")), None)
    if used is None or used.shape != (len(TERMS),):
        return []
    missing = left_out(used)
    text = ", ".join(name for name in TERMS if name not in missing)
    reasons = "; ".join(f"{name} is left out, as {reason}" for name, reason in missing.items())
    return [f"terms: {text}" + (f" ({reasons})" if reasons else "")]
