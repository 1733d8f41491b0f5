"""Sentences and numbers for people: the meaning of a score, and the layers behind it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuralmean.detector.decision import Explanation
from neuralmean.detector.detector import Detector

N_BINS = 40
_WORDS = {0: "early", 1: "middle", 2: "late"}
_MEANING = {
    "early": "colours, edges and textures",
    "middle": "patterns and parts",
    "late": "shapes and content",
}


def describe_p_value(p_value: float, n_held_out: int) -> str:
    """Return a sentence on how unusual an input is.

    Example:
        >>> describe_p_value(0.01, 199)
        '1 of 199 held-out images looks at least as unusual.'
        >>> describe_p_value(0.005, 199)
        'None of 199 held-out images looks as unusual.'
    """
    n_above = round(p_value * (n_held_out + 1)) - 1
    if n_above <= 0:
        return f"None of {n_held_out:,} held-out images looks as unusual."
    verb = "looks" if n_above == 1 else "look"
    return f"{n_above:,} of {n_held_out:,} held-out images {verb} at least as unusual."


def layer_profile(explanation: Explanation, row: int) -> list[dict[str, Any]]:
    """Return the contribution of each layer to a score, in the order of the model, and how many channels it has."""
    values, sizes = explanation.by_layer[row].tolist(), _n_channels(explanation).tolist()
    return [
        {"layer": name, "contribution": value, "n_channels": int(size)}
        for name, value, size in zip(explanation.layers, values, sizes, strict=True)
    ]


def describe_reason(explanation: Explanation, row: int, *, is_ood: bool) -> str:
    """Return a sentence or two on the layers that contribute most to the score, and what such layers respond to."""
    by_layer = explanation.by_layer[row]
    strangeness = by_layer / _n_channels(explanation)  # normalised by width: a wide layer contributes more anyway
    part = _strangest_third(strangeness)
    best = torch.where(_thirds(len(strangeness)) == part, strangeness, -torch.inf).topk(min(3, len(strangeness)))
    names = [
        explanation.layers[i] for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True) if value > 0
    ]
    sentences = []
    if names:
        depth = _WORDS[part]
        sentences.append(
            f"{'Strangest to' if is_ood else 'Most of the score comes from'} the {depth} layers, which see "
            f"{_MEANING[depth]}; above all {_join(names)}."
        )
    # A constant term explains no input.
    terms = {name: value[row].item() for name, value in explanation.terms.items() if name != "constant"}
    if terms:
        name = max(terms, key=lambda key: terms[key])
        total_layers = by_layer.sum().item()
        if terms[name] > max(total_layers, 0.0):
            sentences.insert(0, f"The term {name!r} weighs more than all layers together.")
    if not explanation.exact:
        sentences.append("The shares are a first-order approximation.")
    return " ".join(sentences) or "No layer raises the score."


def describe_detector(detector: Detector, name: str) -> dict[str, Any]:
    """Return the detector's data for the page: the in-distribution scores, the threshold, its guarantee."""
    calibration = detector.calibration
    scores = np.zeros(1) if calibration is None else calibration.scores.double().numpy()
    counts, edges = np.histogram(scores, bins=N_BINS)
    return {
        "name": name,
        "scorer": str(getattr(detector.scorer, "name", type(detector.scorer).__name__)),
        "threshold": detector.threshold,
        "false_alarm_rate": 0.0 if calibration is None else calibration.false_alarm_rate,
        "n_held_out": len(scores),
        "guarantee": detector.guarantee,
        "histogram": {"counts": counts.tolist(), "edges": edges.tolist()},
        "layers": list(detector.layers),
    }


def _n_channels(explanation: Explanation) -> Tensor:
    """Return how many columns of the vector belong to each layer, shape (L,)."""
    counts = Counter(channel.rpartition("[")[0] for channel in explanation.channels)
    return torch.tensor([float(counts[layer] or 1) for layer in explanation.layers])


def _thirds(n_layers: int) -> Tensor:
    """Return in which third of the model each layer is, shape (L,)."""
    return ((torch.arange(n_layers) + 0.5) * 3 / n_layers).long()


def _strangest_third(by_layer: Tensor) -> int:
    """Return in which third of the model the layers contribute most on average."""
    third = _thirds(len(by_layer))
    means: dict[int, float] = {
        part: by_layer[third == part].clamp_min(0).mean().item() for part in sorted(set(third.tolist()))
    }
    return max(means, key=lambda part: means[part])


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
