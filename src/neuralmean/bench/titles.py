"""What methods, models and sets are called in pages; a name that is not known any more stands for itself."""

from __future__ import annotations

from neuralmean.bench import baselines, data, models
from neuralmean.errors import InputError


def of_method(name: str) -> str:
    """What a method is called."""
    if ":" in name:
        try:
            return baselines.make(name).title
        except InputError:  # of a package that is not installed here
            return name
    return baselines.make(name).title if name in baselines.names() else name


def of_set(name: str) -> str:
    """What a set of images is called."""
    if name in data.ALTERATIONS:
        return {"photo-sketch": "Edge sketch", "photo-blur": "Blur", "photo-noise": "Noise"}[name]
    return data.dataset(name).title if name in data.names() else name


def of_model(name: str) -> str:
    """What an architecture is called."""
    if name in models.LITE:
        return f"EfficientNet-{name.rpartition('-')[2].capitalize()}"
    return models.architecture(name).title if name in models.names() else name
