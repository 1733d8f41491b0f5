"""Training inside a fit: a copy of the model, a small budget, and the trainer's resumable loop.

A method defines the loss and how the trained copy scores. The method's own model is never changed.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuralmean.bench.baselines.base import Context, Method, View
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.train.augment import shift_and_flip
from neuralmean.bench.train.loop import Setting, run
from neuralmean.bench.train.recipes import Recipe
from neuralmean.data.batch import Batch
from neuralmean.errors import ArtefactError, InputError, NeuralMeanWarning, NotFittedError
from neuralmean.models.execution import device_of
from neuralmean.recording import find_head


@dataclass(frozen=True)
class Budget:
    """How long a copy is trained: the number of images of each kind, and of epochs."""

    images: int = 1024
    epochs: int = 2
    batch_size: int = 32
    learning_rate: float = 0.001


class Tuner:
    """A task of the training loop with the loss of a method.

    Args:
        model: Trained in place.
        loss: Called with this object, images in [0, 1] (N, 3, H, W), labels (N,) and a generator.
        trained: The model whose normalisation is used.
        outliers: OOD images, uint8, shape (M, 3, H, W), if the loss needs them.
    """

    def __init__(self, model: nn.Module, loss: Loss, trained: TrainedModel, outliers: Tensor | None = None) -> None:
        self.model, self.trained, self._loss, self._outliers = model, trained, loss, outliers
        device = device_of(model.modules())
        self._mean, self._std = (torch.tensor(v, device=device).view(1, 3, 1, 1) for v in (trained.mean, trained.std))
        self._flip = "svhn" not in trained.metadata.get("dataset", "").lower()  # a mirrored digit is not a digit

    def normalise(self, images: Tensor) -> Tensor:
        """Normalise images in [0, 1] as the model expects."""
        return (images - self._mean) / self._std

    def augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Shift and mirror images at random."""
        return shift_and_flip(images, pixels=4, flip=self._flip, generator=generator)

    def draw_outliers(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw OOD images, augmented too, in [0, 1], shape (count, 3, H, W)."""
        if self._outliers is None:
            raise InputError("Expected OOD images to train with, but got none. Use a protocol that provides them.")
        rows = torch.randint(len(self._outliers), (count,), generator=generator)
        return self.augment(self._outliers[rows.to(self._outliers.device)].float() / 255, generator)

    def parameters(self) -> list[nn.Parameter]:
        """Return what the optimiser changes."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def loss(self, images: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Loss of one batch of images in [0, 1], shape (N, 3, 32, 32)."""
        if labels is None:
            raise TypeError("a classifier is trained on labels")
        self.model.train()
        return self._loss(self, self.augment(images, generator), labels, generator)

    def after_step(self) -> None:
        """Nothing follows a step."""

    def state(self) -> dict[str, Tensor]:
        """Return the weights and buffers."""
        return dict(self.model.state_dict())

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.model.load_state_dict(state)


Loss = Callable[[Tuner, Tensor, Tensor, torch.Generator], Tensor]


class FineTuned(Method):
    """Base of methods that train a copy of the model and score with it.

    A subclass implements `loss` and `score_outputs`, and `prepare` if it changes the network.

    Attributes:
        budget: How long to train.
    """

    reads = frozenset({"images", "labels"})
    fine_tunes = True
    heavy = True
    budget = Budget()

    def __init__(self) -> None:
        self.most_inliers = self.most_outliers = self.budget.images
        self._tuned: nn.Module | None = None
        self._trained: TrainedModel | None = None

    def prepare(self, context: Context) -> nn.Module:
        """Return the network to train: a copy of the model."""
        return counted_copy(context.model)

    def loss(self, tuner: Tuner, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Loss of one batch of images in [0, 1]."""
        raise NotImplementedError

    def score_outputs(self, outputs: Tensor) -> Tensor:
        """Score the outputs of the trained copy, (N, K); higher = more OOD."""
        raise NotImplementedError

    def fit(self, context: Context) -> None:
        """Train the copy, resuming from its checkpoint if there is one."""
        self._trained = context.trained
        network = self.prepare(context)
        outliers = None if context.outliers is None else _pixels(context.outliers, self.budget, context.seed)[0]
        tuner = Tuner(
            network, self.loss, context.trained, None if outliers is None else outliers.to(device_of(network.modules()))
        )
        train(tuner, context, self.budget, self.name)
        self._tuned = network.eval()

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        with torch.no_grad():
            return torch.cat([self.score_outputs(self.network(batch)) for batch in examples.batches()])

    def suits(self, trained: TrainedModel) -> bool:
        """Whether the model has classes."""
        return trained.num_classes > 0

    @property
    def network(self) -> nn.Module:
        """The trained copy, in eval mode."""
        if self._tuned is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return self._tuned

    @property
    def trained(self) -> TrainedModel:
        """The model that the copy was made from."""
        if self._trained is None:
            raise NotFittedError(f"The method {self.name!r} is not fitted yet. Call `fit` before `score`.")
        return self._trained


class NewHead(FineTuned):
    """Base of methods that replace the last layer of the copy and train it by cross-entropy."""

    budget = Budget(learning_rate=0.01)

    def new_head(self, old: nn.Linear) -> nn.Module:
        """Make the new layer from the old one."""
        raise NotImplementedError

    def prepare(self, context: Context) -> nn.Module:
        """Return a copy of the model with the new head."""
        network = super().prepare(context)
        replace_head(network, next(context.inliers.batches(1)), self.new_head)
        return network

    def loss(self, tuner: Tuner, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Cross-entropy of one batch of images in [0, 1]."""
        return F.cross_entropy(tuner.model(tuner.normalise(images)), labels)


def counted_copy(model: nn.Module) -> nn.Module:
    """Return a copy of `model` to train; its passes are counted as passes of the model."""
    return counted_as(copy.deepcopy(model).requires_grad_(True), model)


def counted_as(network: nn.Module, model: nn.Module) -> nn.Module:
    """Count passes of `network` as passes of `model`, and return it.

    Both share one set of hooks from then on, so a hook added to or removed from one is added to or removed from the
    other.
    """
    network._forward_pre_hooks = model._forward_pre_hooks
    network._forward_pre_hooks_with_kwargs = model._forward_pre_hooks_with_kwargs
    return network


def train(tuner: Tuner, context: Context, budget: Budget, name: str) -> None:
    """Minimise the tuner's loss on the inliers, within the budget.

    Args:
        tuner: The task.
        context: The images, the seed, and the folder for the checkpoint; without a folder, training cannot resume.
        budget: How long to train.
        name: Name of the method.
    """
    images, rows = _pixels(context.inliers, budget, context.seed)
    device = device_of(tuner.model.modules())
    images, labels = images.to(device), context.inliers.labels[rows].to(device)
    recipe = Recipe(
        epochs=budget.epochs,
        batch_size=min(budget.batch_size, len(images)),
        learning_rate=budget.learning_rate,
        warmup=0.0,
        max_norm=5.0,
    )
    identity = {"method": name, "recipe": recipe.to_json(), "seed": context.seed, "images": len(images)}
    with ExitStack() as stack:
        folder = context.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        checkpoint = folder / f"{name}.safetensors"
        setting = Setting(checkpoint=checkpoint, identity=identity, seed=context.seed, device=device)
        start = {key: value.clone() for key, value in tuner.state().items()}
        try:
            run(tuner, images, labels, recipe, setting)
        except ArtefactError as error:
            warnings.warn(f"{error} Training starts over.", NeuralMeanWarning, stacklevel=2)
            checkpoint.unlink(missing_ok=True)
            tuner.load_state(start)
            run(tuner, images, labels, recipe, setting)


def replace_head(network: nn.Module, example: Tensor, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the last linear layer.

    Args:
        network: Changed in place.
        example: A batch that it accepts.
        make: Makes the new module from the old one.
    """
    name = find_head(network, Batch((example,)))
    head = None if name is None else network.get_submodule(name)
    if name is None or not isinstance(head, nn.Linear):
        raise InputError(
            "Expected the model to end in a linear layer, but it does not. Use a method that needs no head."
        )
    parent, _, last = name.rpartition(".")
    setattr(network.get_submodule(parent), last, make(head))


def _pixels(view: View, budget: Budget, seed: int) -> tuple[Tensor, Tensor]:
    """Images within the budget, uint8 (N, 3, H, W), and their rows in the view."""
    count = min(len(view), budget.images)
    rows = np.sort(np.random.default_rng([seed, len(view)]).permutation(len(view))[:count])
    images = torch.from_numpy(np.ascontiguousarray(view.pixels[rows].transpose(0, 3, 1, 2)))
    return images, torch.from_numpy(rows)
