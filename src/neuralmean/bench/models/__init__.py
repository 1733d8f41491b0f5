"""The paper's architectures, built from their papers, and the weights that fit them."""

from neuralmean.bench.models.registry import Architecture, architecture, build, names
from neuralmean.bench.models.trained import TrainedModel, load, load_weights, preprocess, untrained

__all__ = [
    "Architecture",
    "TrainedModel",
    "architecture",
    "build",
    "load",
    "load_weights",
    "names",
    "preprocess",
    "untrained",
]
