"""Momentum contrast: trains an encoder on images without labels, and evaluates it by a linear probe.

He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", CVPR 2020, with the projection head and the
augmentation of its second version (Chen et al. 2020), sized as in the authors' CIFAR demonstration.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from neuralmean.bench.train.augment import two_crops_view
from neuralmean.bench.train.recipes import Recipe
from neuralmean.bench.train.supervised import part
from neuralmean.errors import InputError

WIDTH = 128  # width of the projection
GROUP = 32  # images per batch-norm group of the key encoder


class MoCo:
    r"""A task of `loop.run` that trains an encoder by momentum contrast.

    Let q be the encoder's projection of one view of an image, k+ the projection of another view by the key encoder (a
    moving average of the encoder), and k- the queue of earlier keys, all of unit length. The loss is

    .. math::
        -\log \frac{\exp(q \cdot k_+ / \tau)}{\exp(q \cdot k_+ / \tau) + \sum_{k_-} \exp(q \cdot k_- / \tau)}

    (Eq. 1 of the paper). Keys go through the key encoder in shuffled groups, so that batch norm cannot reveal which key
    belongs to which query ("Shuffling BN", section 3.3; there the groups are GPUs).

    Args:
        encoder: Maps normalised images to features (N, `features`); trained in place.
        features: Width of the features.
        recipe: Temperature, queue, momentum.
        mean: Mean per colour.
        std: Standard deviation per colour.
        seed: Seed of the heads and of the queue's initial content.
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        features: int,
        recipe: Recipe,
        mean: Sequence[float],
        std: Sequence[float],
        seed: int = 0,
    ) -> None:
        if recipe.batch_size > recipe.queue:
            raise InputError(
                f"Expected the queue to hold at least one batch, but got {recipe.queue} for a batch of "
                f"{recipe.batch_size}. Pass a recipe with a longer `queue`."
            )
        device = next(encoder.parameters()).device
        self.recipe = recipe
        self.model = encoder
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            head = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, WIDTH))
            queue = F.normalize(torch.randn(recipe.queue, WIDTH), dim=1)
        self.query = nn.Sequential(encoder, head.to(device))
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.queue = queue.to(device)  # (queue, WIDTH)
        self.place = torch.zeros((), dtype=torch.int64)
        self.mean, self.std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std))
        self._keys: Tensor | None = None

    @property
    def result(self) -> nn.Module:
        """A copy of the encoder, without its projection head."""
        return copy.deepcopy(self.model).eval()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimise."""
        return list(self.query.parameters())

    def compile(self) -> None:
        """Compile both encoders in place, for each size of images."""
        self.query.compile(dynamic=False)
        self.key.compile(dynamic=False)

    def loss(self, images: Tensor, labels: Tensor | None, generator: Generator) -> Tensor:
        """Contrastive loss of one batch of images in [0, 1], shape (N, 3, H, W); labels are ignored."""
        one, other = (
            (two_crops_view(images, flip=self.recipe.flip, generator=generator) - self.mean) / self.std
            for _ in range(2)
        )
        self.query.train()
        queries = F.normalize(self.query(one.contiguous(memory_format=torch.channels_last)).float(), dim=1)
        keys = self._encode_keys(other, generator)
        self._keys = keys
        return contrast(queries, keys, self.queue, self.recipe.temperature)

    @torch.no_grad()
    def _encode_keys(self, images: Tensor, generator: Generator) -> Tensor:
        """Keys of the images, shape (N, WIDTH), computed in shuffled groups."""
        order = torch.randperm(len(images), generator=generator).to(images.device)
        self.key.train()
        groups = images[order].contiguous(memory_format=torch.channels_last).chunk(max(1, len(images) // GROUP))
        shuffled = torch.cat([self.key(group).float() for group in groups])
        return F.normalize(shuffled[order.argsort()], dim=1)

    @torch.no_grad()
    def after_step(self) -> None:
        """Update the key encoder, and replace the oldest keys by those of the step."""
        for moved, leading in zip(self.key.parameters(), self.query.parameters(), strict=True):
            moved.lerp_(leading, 1 - self.recipe.key_momentum)
        if self._keys is not None:
            rows = (self.place + torch.arange(len(self._keys))) % len(self.queue)
            self.queue[rows.to(self.queue.device)] = self._keys
            self.place = (self.place + len(self._keys)) % len(self.queue)
            self._keys = None

    def state(self) -> dict[str, Tensor]:
        """Return both encoders, the queue and its position."""
        state = {f"query.{key}": value for key, value in self.query.state_dict().items()}
        state |= {f"key.{key}": value for key, value in self.key.state_dict().items()}
        return state | {"queue": self.queue, "place": self.place}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""
        self.query.load_state_dict(part(state, "query."))
        self.key.load_state_dict(part(state, "key."))
        self.queue = state["queue"].to(self.queue.device)
        self.place = state["place"]


def contrast(queries: Tensor, keys: Tensor, queue: Tensor, temperature: float) -> Tensor:
    """Return the mean loss of queries (N, D) with their keys (N, D) and the queue (K, D)."""
    positive = (queries * keys).sum(dim=1, keepdim=True)
    negative = queries @ queue.T
    logits = torch.cat([positive, negative], dim=1) / temperature
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64, device=logits.device))


def linear_accuracy(features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor) -> float:
    """Accuracy in percent of a linear classifier on frozen features, the usual measure of an encoder.

    Args:
        features: Features of the training images, shape (N, D).
        labels: Their classes, shape (N,).
        test_features: Features of the test images, shape (M, D).
        test_labels: Their classes, shape (M,).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=200, tol=1e-3))
    probe.fit(features.double().numpy(), labels.numpy())
    return 100 * float(probe.score(test_features.double().numpy(), test_labels.numpy()))
