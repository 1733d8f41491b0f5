"""The architectures by name, and how to build them. Independent of weights and data."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from neuralmean.bench.models.cifar_resnet import CifarResNet
from neuralmean.bench.models.convnet4 import ConvNet4
from neuralmean.bench.models.densenet import DenseNet
from neuralmean.bench.models.resnet import ResNet, ResNetEncoder
from neuralmean.bench.models.vgg import VGG19
from neuralmean.bench.models.vit import VisionTransformer
from neuralmean.bench.models.wideresnet import WideResNet
from neuralmean.errors import InputError
from neuralmean.models.sources import ModelSource
from neuralmean.models.weights import Builder


@dataclass(frozen=True)
class Architecture:
    """One architecture: how to build it, and the name of its last linear layer."""

    title: str  # the name in the paper's tables
    head: str | None  # dotted name of the last linear layer; None: features only
    make: Callable[[int], nn.Module]  # number of classes -> untrained model


_REGISTRY: dict[str, Architecture] = {
    "convnet4": Architecture("ConvNet-4", "fc", ConvNet4),
    "resnet20": Architecture("ResNet-20", "linear", lambda classes: CifarResNet(20, classes)),
    "resnet32": Architecture("ResNet-32", "linear", lambda classes: CifarResNet(32, classes)),
    "resnet44": Architecture("ResNet-44", "linear", lambda classes: CifarResNet(44, classes)),
    "resnet56": Architecture("ResNet-56", "linear", lambda classes: CifarResNet(56, classes)),
    "resnet110": Architecture("ResNet-110", "linear", lambda classes: CifarResNet(110, classes)),
    "resnet18": Architecture("ResNet-18", "fc", lambda classes: ResNet(18, classes)),
    "resnet34": Architecture("ResNet-34", "fc", lambda classes: ResNet(34, classes)),
    "wideresnet40-2": Architecture("WideResNet-40-2", "fc", lambda classes: WideResNet(40, 2, classes)),
    "wideresnet28-10": Architecture("WideResNet-28-10", "fc", lambda classes: WideResNet(28, 10, classes)),
    "densenet100": Architecture("DenseNet-100", "fc", lambda classes: DenseNet(100, 12, classes)),
    "vgg19": Architecture("VGG-19", "classifier.6", VGG19),
    "vit": Architecture("ViT", "head", VisionTransformer),
    "moco-resnet34": Architecture("ResNet-34 (self)", None, lambda _: ResNetEncoder(34)),
}


# Test accuracy in percent below which a network of this kind is marked as weak.
_SHOULD_REACH = {
    ("resnet34", "cifar10"): 93.0,
    ("resnet34", "svhn"): 93.0,
    ("vgg19", "cifar10"): 90.0,
    ("vit", "cifar10"): 75.0,
    ("convnet4", "cifar10"): 78.0,
    ("convnet4", "svhn"): 88.0,
}


def is_weak(name: str, inside: str, accuracy: float | None) -> bool:
    """Whether a network trained on the set `inside` is known to be weak for its architecture.

    Example:
        >>> is_weak("resnet34", "cifar10", 88.4), is_weak("resnet34", "cifar10", 93.4), is_weak("resnet34", "cifar10", None)
        (True, False, False)
    """
    least = _SHOULD_REACH.get((name, inside))
    return least is not None and accuracy is not None and accuracy < least


def names() -> list[str]:
    """Names that `build` knows, in the order of the registry."""
    return list(_REGISTRY)


def architecture(name: str) -> Architecture:
    """Look up an architecture by its name."""
    if name not in _REGISTRY:
        raise InputError(f"Expected the name of a model, but got {name!r}. {suggestion(name, _REGISTRY)}")
    return _REGISTRY[name]


def build(name: str, *, num_classes: int = 10) -> nn.Module:
    """Build an untrained model, in eval mode, with torch's global random state.

    Args:
        name: One of `names()`.
        num_classes: Number of logits; ignored for `moco-resnet34`, which has no class head.

    Returns:
        A model that maps (N, 3, 32, 32) to (N, num_classes), or to (N, 512) for `moco-resnet34`.

    Example:
        >>> type(build("resnet20")).__name__
        'CifarResNet'
    """
    if num_classes < 2:
        raise InputError(f"Expected `num_classes` to be at least 2, but got {num_classes!r}.")
    return architecture(name).make(num_classes).eval()


def _builder(name: str) -> Builder:
    architecture(name)  # raises for an unknown name
    return lambda classes: build(name, num_classes=10 if classes is None else classes)


SOURCE = ModelSource(_builder, size=(32, 32))  # resolves `bench:NAME`; see the entry points in pyproject.toml


def suggestion(name: str, known: Iterable[str]) -> str:
    """Suggest the closest known names instead of `name`, or list them all."""
    known = list(known)
    close = difflib.get_close_matches(name.lower(), known, n=3)
    if close:
        return f"Did you mean {' or '.join(map(repr, close))}?"
    return f"Known names: {', '.join(known)}."
