"""The default training recipe of each architecture.

The recipes are those of the papers with today's usual schedule: linear warm-up, then cosine decay to zero. Sizes are
for a GPU, except for ConvNet-4, which can be trained within an hour on two cores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from neuralmean.bench.models import architecture
from neuralmean.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that determines training except the model, the images and the seed.

    Attributes:
        epochs: Passes over the images.
        stages: Pairs of image size and epochs, in order, that add up to `epochs`; empty for the images' own size throughout.
        batch_size: Images per step; an incomplete last batch of an epoch is dropped.
        optimizer: `"sgd"` with momentum, or `"adamw"`.
        learning_rate: The peak learning rate, after the warm-up.
        momentum: Momentum of SGD.
        nesterov: Whether SGD uses Nesterov momentum.
        weight_decay: Weight decay of matrices and convolutions; biases, norms and embeddings have none.
        warmup: Share of the steps with a rising learning rate.
        label_smoothing: Share of the target spread over all classes.
        mixup: Parameter of the Beta distribution for mixing two images; 0 disables mixup.
        crop: Largest random shift in pixels.
        flip: Whether images are mirrored at random. Off for SVHN: a mirrored digit is not a digit.
        max_norm: Largest norm of the gradient; 0 for no limit.
        ema: Decay of the moving average of the weights, which is then saved instead of them; 0 for no average.
        norms: Whether to train a network without norms with temporary batch norms; see `norms`.
        temperature: Temperature of MoCo's loss.
        queue: Number of MoCo's negative keys.
        key_momentum: Momentum of MoCo's key encoder.
    """

    epochs: int
    batch_size: int = 128
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    warmup: float = 0.05
    label_smoothing: float = 0.0
    mixup: float = 0.0
    crop: int = 4
    flip: bool = True
    max_norm: float = 0.0
    ema: float = 0.0
    norms: bool = False
    temperature: float = 0.1
    queue: int = 4096
    key_momentum: float = 0.99
    stages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        positive = {"epochs": self.epochs, "batch_size": self.batch_size, "queue": self.queue}
        for name, value in positive.items():
            if not isinstance(value, int) or value < 1:
                raise InputError(f"Expected `{name}` of a recipe to be a whole number above 0, but got {value!r}.")
        if not (self.learning_rate > 0 and self.temperature > 0):
            got = f"{self.learning_rate!r} and {self.temperature!r}"
            raise InputError(f"Expected `learning_rate` and `temperature` of a recipe to be above 0, but got {got}.")
        shares = ("momentum", "warmup", "label_smoothing", "ema", "key_momentum")
        for name in shares:
            if not 0.0 <= getattr(self, name) < 1.0:
                raise InputError(f"Expected `{name}` of a recipe to be in [0, 1), but got {getattr(self, name)!r}.")
        if self.optimizer not in ("sgd", "adamw"):
            raise InputError(f"Expected `optimizer` of a recipe to be 'sgd' or 'adamw', but got {self.optimizer!r}.")
        if self.stages and sum(epochs for _, epochs in self.stages) != self.epochs:
            raise InputError(
                f"Expected the epochs of the `stages` of a recipe to add up to {self.epochs}, but got {self.stages!r}."
            )

    def size_at(self, epoch: int) -> int | None:
        """Size of the images in an epoch, counted from 0; None for their own size.

        Example:
            >>> [Recipe(epochs=3, stages=((16, 2), (32, 1))).size_at(epoch) for epoch in range(3)]
            [16, 16, 32]
        """
        for size, epochs in self.stages:
            if epoch < epochs:
                return size
            epoch -= epochs
        return None

    def to_json(self) -> str:
        """Return the recipe as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Recipe:
        """Create a recipe from parsed JSON, rejecting unknown keys."""
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(set(raw) - set(allowed))
        if unknown:
            raise InputError(f"Expected only the keys {allowed} in a recipe, but got {unknown}.")
        stages = tuple((int(size), int(epochs)) for size, epochs in raw.get("stages", ()))
        return cls(**{**raw, "stages": stages})


_RESNET = Recipe(epochs=200)
_RECIPES = {
    # An epoch of 50,000 images takes about 19 minutes on two cores, so there are few epochs, with small shifts.
    "convnet4": Recipe(epochs=3, learning_rate=0.1, warmup=0.2, crop=2),
    "resnet20": replace(_RESNET, weight_decay=1e-4),
    "resnet32": replace(_RESNET, weight_decay=1e-4),
    "resnet44": replace(_RESNET, weight_decay=1e-4),
    "resnet56": replace(_RESNET, weight_decay=1e-4),
    "resnet110": replace(_RESNET, weight_decay=1e-4),
    "resnet18": _RESNET,
    "resnet34": _RESNET,
    "wideresnet40-2": _RESNET,
    "wideresnet28-10": _RESNET,
    "densenet100": Recipe(epochs=300, batch_size=64, weight_decay=1e-4),
    "vgg19": Recipe(epochs=200, learning_rate=0.05, max_norm=5.0),
    "vit": Recipe(
        epochs=300,
        batch_size=256,
        optimizer="adamw",
        learning_rate=1e-3,
        weight_decay=0.05,
        label_smoothing=0.1,
        mixup=0.8,
        max_norm=1.0,
    ),
    # From the authors' CIFAR demonstration, for half its batch size.
    "moco-resnet34": Recipe(epochs=400, batch_size=256, learning_rate=0.03, nesterov=False, warmup=0.0, crop=0),
}


def default_recipe(name: str, *, dataset: str = "cifar10") -> Recipe:
    """Return the default recipe of a model.

    Args:
        name: One of `models.names()`.
        dataset: The training set.
    """
    architecture(name)
    recipe = _RECIPES[name]
    return replace(recipe, flip=False) if dataset == "svhn" else recipe


def full_recipe(name: str, *, dataset: str = "cifar10") -> Recipe:
    """Return the recipe of the architecture's paper at full length; ConvNet-4, which has none, gets that of ResNets.

    Args:
        name: One of `models.names()`.
        dataset: The training set.
    """
    recipe = default_recipe(name, dataset=dataset)
    return replace(_RESNET, flip=recipe.flip) if name == "convnet4" else recipe
