"""How each architecture is trained by default: one recipe per name, all of them data.

The recipes are those of the papers with the schedule that has since become usual: linear warm-up, then a cosine down to
zero. Sizes are for a GPU, except ConvNet-4, which is sized to be trained within an hour on two cores.
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
    """Everything that determines training, apart from the model, the images and the seed.

    Attributes:
        epochs: Passes over the images.
        stages: Pairs of image size and epochs, in turn, that add up to `epochs`; empty: every epoch at the images' own size.
        batch_size: Images per step; what is left over at the end of an epoch is left out of it.
        optimizer: `"sgd"` with momentum, or `"adamw"`.
        learning_rate: The highest one, reached after the warm-up.
        momentum: Of SGD.
        nesterov: Whether SGD looks ahead.
        weight_decay: On matrices and convolutions; never on biases, norms and embeddings.
        warmup: Share of the steps in which the learning rate rises.
        label_smoothing: Share of the target that is spread over all classes.
        mixup: Parameter of the Beta distribution that two images are mixed by; 0: not at all.
        crop: Pixels by which an image is shifted at most.
        flip: Whether images are mirrored at random. Off for SVHN: a mirrored digit is not a digit.
        max_norm: Largest norm of the gradient; 0: no limit.
        ema: Share that an average of the weights keeps at each step, and the average is what is saved; 0: no average.
        norms: Whether a network without norms is trained with a batch norm after each convolution, folded into it at the end.
        temperature: Of MoCo's loss.
        queue: Number of MoCo's negatives.
        key_momentum: Share that MoCo's second encoder keeps at each step.
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
        """Size of the images in an epoch that counts from 0; None where they stay as they are.

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
        """Write the recipe as one line of JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Recipe:
        """Build from parsed JSON, refusing unknown keys."""
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(set(raw) - set(allowed))
        if unknown:
            raise InputError(f"Expected only the keys {allowed} in a recipe, but got {unknown}.")
        stages = tuple((int(size), int(epochs)) for size, epochs in raw.get("stages", ()))
        return cls(**{**raw, "stages": stages})


_RESNET = Recipe(epochs=200)
_RECIPES = {
    # An epoch of 50,000 images takes about 19 minutes on two cores: few epochs, so a mild shift.
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
    # Of the authors' CIFAR demonstration, for half its batch.
    "moco-resnet34": Recipe(epochs=400, batch_size=256, learning_rate=0.03, nesterov=False, warmup=0.0, crop=0),
}


def default_recipe(name: str, *, dataset: str = "cifar10") -> Recipe:
    """Return the recipe by which a model is trained if nothing else is said.

    Args:
        name: One of `models.names()`.
        dataset: The set it is trained on.
    """
    architecture(name)
    recipe = _RECIPES[name]
    return replace(recipe, flip=False) if dataset == "svhn" else recipe


def full_recipe(name: str, *, dataset: str = "cifar10") -> Recipe:
    """Return the recipe of the architecture's paper, whatever it takes; ConvNet-4, which has none, gets that of ResNets.

    Args:
        name: One of `models.names()`.
        dataset: The set it is trained on.
    """
    recipe = default_recipe(name, dataset=dataset)
    return replace(_RESNET, flip=recipe.flip) if name == "convnet4" else recipe
