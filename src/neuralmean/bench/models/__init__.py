"""The paper's architectures, built from their papers, and the weights that fit them."""

from neuralmean.bench.models.evaluate import accuracy, expected_accuracy, outputs
from neuralmean.bench.models.registry import Architecture, architecture, build, names
from neuralmean.bench.models.trained import TrainedModel, load, load_weights, preprocess, untrained

__all__ = [
    "Architecture",
    "TrainedModel",
    "accuracy",
    "architecture",
    "build",
    "expected_accuracy",
    "load",
    "load_weights",
    "names",
    "outputs",
    "preprocess",
    "untrained",
]
