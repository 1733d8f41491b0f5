"""Display names of methods, models and sets; an unknown name is returned unchanged."""

from __future__ import annotations

from neuralmean.bench import baselines, data, models
from neuralmean.errors import InputError


def of_method(name: str) -> str:
    """Return the display name of a method."""
    if ":" in name:
        try:
            return baselines.make(name).title
        except InputError:  # of a package that is not installed
            return name
    return baselines.make(name).title if name in baselines.names() else name


def of_set(name: str) -> str:
    """Return the display name of a set of images."""
    if name in data.ALTERATIONS:
        return {"photo-sketch": "Edge sketch", "photo-blur": "Blur", "photo-noise": "Noise"}[name]
    return data.dataset(name).title if name in data.names() else name


def of_model(name: str) -> str:
    """Return the display name of an architecture."""
    if name in models.LITE:
        return f"EfficientNet-{name.rpartition('-')[2].capitalize()}"
    return models.architecture(name).title if name in models.names() else name
