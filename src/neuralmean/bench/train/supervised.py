"""Training a classifier by cross-entropy."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from neuralmean.bench.models.trained import SIZE
from neuralmean.bench.train.augment import mix, shift_and_flip
from neuralmean.bench.train.norms import add_norms, fold_norms
from neuralmean.bench.train.recipes import Recipe


class Supervised:
    """A task of `loop.run` that trains a classifier.

    Args:
        model: Maps normalised images to logits; trained in place.
        recipe: Augmentation, smoothing and averaging.
        mean: Mean per colour.
        std: Standard deviation per colour.
        num_classes: Number of logits.
    """

    def __init__(
        self, model: nn.Module, *, recipe: Recipe, mean: Sequence[float], std: Sequence[float], num_classes: int
    ) -> None:
        if recipe.norms:
            add_norms(model)
        self.model = model
        self.recipe = recipe
        self.num_classes = num_classes
        self.average = copy.deepcopy(model) if recipe.ema else None
        device = next(model.parameters()).device
        self.mean, self.std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std))

    @property
    def result(self) -> nn.Module:
        """A copy of the trained model, or of its moving average if there is one, without temporary norms."""
        return fold_norms(self.model if self.average is None else self.average)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimise."""
        return list(self.model.parameters())

    def compile(self) -> None:
        """Compile the model in place, for each size of images."""
        self.model.compile(dynamic=False)

    def loss(self, images: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        """Cross-entropy of one batch of images in [0, 1], shape (N, 3, H, W), with labels (N,)."""
        if labels is None:
            raise TypeError("a classifier is trained on labels")
        recipe = self.recipe
        pixels = round(recipe.crop * images.shape[-1] / SIZE)
        images = shift_and_flip(images, pixels=pixels, flip=recipe.flip, generator=generator)
        images = (images - self.mean) / self.std
        targets = F.one_hot(labels, self.num_classes).float()
        if recipe.mixup:
            images, targets = mix(images, targets, alpha=recipe.mixup, generator=generator)
        self.model.train()
        logits: Tensor = self.model(images.contiguous(memory_format=torch.channels_last))
        return F.cross_entropy(logits.float(), targets, label_smoothing=recipe.label_smoothing)

    def after_step(self) -> None:
        """Update the moving average, including batch-norm buffers."""
        if self.average is None:
            return
        current = self.model.state_dict()
        for key, value in self.average.state_dict().items():
            if value.is_floating_point():
                value.lerp_(current[key], 1 - self.recipe.ema)
            else:
                value.copy_(current[key])

    def state(self) -> dict[str, Tensor]:
        """Return the weights and their moving average."""
        state = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        if self.average is not None:
            state |= {f"average.{key}": value for key, value in self.average.state_dict().items()}
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.model.load_state_dict(part(state, "model."))
        if self.average is not None:
            self.average.load_state_dict(part(state, "average."))


def part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Entries whose names begin with `prefix`, without it."""
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
