"""Kinds of models registered by packages: `KIND:NAME` beyond timm, torchvision and plain Python.

A package registers a `ModelSource` under the entry point group `neuralmean.models`; the benchmark's own models are one.
Only installed packages can register, so a saved file may name such a model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import entry_points

from neuralmean.models.weights import Builder

GROUP = "neuralmean.models"


@dataclass(frozen=True)
class ModelSource:
    """Builds models by name.

    Attributes:
        builder: Returns a function from a number of classes, or None, to the named model; raises `InputError` for an
            unknown name.
        size: Height and width of the input of all its models, if they have the same size.
    """

    builder: Callable[[str], Builder]
    size: tuple[int, int] | None = None


@lru_cache
def find_source(kind: str) -> ModelSource | None:
    """Return the source that an installed package registered as `kind`, or None."""
    for entry in entry_points(group=GROUP, name=kind):
        source = entry.load()
        if isinstance(source, ModelSource):
            return source
    return None
