"""The paper's architectures, and models with trained weights."""

from neuralmean.bench.models.evaluate import accuracy, expected_accuracy, outputs
from neuralmean.bench.models.installed import LITE, installed_names, load_installed, load_spec, spec_name
from neuralmean.bench.models.registry import Architecture, architecture, build, names
from neuralmean.bench.models.trained import TrainedModel, load, load_weights, preprocess, untrained

__all__ = [
    "LITE",
    "Architecture",
    "TrainedModel",
    "accuracy",
    "architecture",
    "build",
    "expected_accuracy",
    "installed_names",
    "load",
    "load_installed",
    "load_spec",
    "load_weights",
    "names",
    "outputs",
    "preprocess",
    "spec_name",
    "untrained",
]
