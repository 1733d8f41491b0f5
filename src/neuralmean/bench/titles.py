"""What methods, models and sets are called in pages; a name that is not known any more stands for itself."""

from __future__ import annotations

from neuralmean.bench import baselines, data, models


def of_method(name: str) -> str:
    """What a method is called."""
    return baselines.make(name).title if name in baselines.names() else name


def of_set(name: str) -> str:
    """What a set of images is called."""
    return data.dataset(name).title if name in data.names() else name


def of_model(name: str) -> str:
    """What an architecture is called."""
    return models.architecture(name).title if name in models.names() else name
