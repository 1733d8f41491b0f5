"""GOOD: guaranteed bounds on the confidence around OOD images (Bitterwolf et al., NeurIPS 2020, Sec. 3)."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuralmean.bench.baselines.base import Context
from neuralmean.bench.baselines.finetune import Budget, FineTuned, Tuner, counted_as
from neuralmean.models.execution import device_of

RADIUS = 0.01  # radius of the neighbourhood, in images scaled to [0, 1]; from the paper
WEIGHT = 0.3  # the paper's
SLOW_START = 0.6  # share of the steps during which radius and weight ramp up
QUANTILE = 0.8  # share of the OOD images, the easiest ones, whose bound is trained: GOOD_80
CHANNELS = (3, 32, 64)


class SmallNetwork(nn.Module):
    """Two strided convolutions and two linear layers, small enough to train with interval bounds."""

    def __init__(self, num_classes: int, size: int = 32) -> None:
        super().__init__()
        convolutions = [nn.Conv2d(before, after, 4, stride=2, padding=1) for before, after in pairwise(CHANNELS)]
        self.body = nn.Sequential(
            *(layer for convolution in convolutions for layer in (convolution, nn.ReLU())),
            nn.Flatten(),
            nn.Linear(CHANNELS[-1] * (size // 4) ** 2, 128),
            nn.ReLU(),
        )
        self.head = nn.Linear(128, num_classes)
        self.steps: Tensor
        self.register_buffer(
            "steps", torch.zeros((), dtype=torch.int64)
        )  # progress of the training, stored in checkpoints

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, size, size) to logits (N, num_classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits

    def largest_gap(self, low: Tensor, high: Tensor) -> Tensor:
        r"""Upper bound of :math:`\max_{k, l} f_k - f_l` over all images between `low` and `high`, shape (N,).

        Interval bounds through the body; for the last layer, differences of two logits are bounded directly.
        """
        centre, radius = (high + low) / 2, (high - low) / 2
        for layer in self.body:
            centre, radius = interval(layer, centre, radius)
        weight, bias = self.head.weight, self.head.bias
        differences = (weight.unsqueeze(1) - weight.unsqueeze(0)).flatten(0, 1)  # (K * K, F)
        offsets = (bias.unsqueeze(1) - bias.unsqueeze(0)).flatten()
        return (centre @ differences.T + radius @ differences.abs().T + offsets).amax(dim=1)


class Good(FineTuned):
    r"""Trains a small network whose confidence is bounded around OOD images, and scores by its MSP.

    .. math::
        L = E_{id}[-\log p_y(x)] + \kappa \left( \frac{1}{M} \sum_{i \in I_q} \log\Big(\tfrac12 b_\epsilon(x_i)^2 + 1\Big)
            + \frac{1}{M} \sum_{i \notin I_q} \log\Big(\tfrac12 b_0(x_i)^2 + 1\Big) \right), \quad
        b_\epsilon(x) = \max_{k,l} \overline{f_k - f_l}

    :math:`I_q` are the 80 % of the OOD images with the smallest bound. Scaled down: the paper trains a larger
    convolutional network on all of CIFAR-10 and 80 Million Tiny Images for hundreds of epochs; here one of 4 layers
    learns from at most 4,096 images of each kind for 10 epochs. Radius and weight start at zero and grow, as in the
    paper; otherwise the network can collapse to a constant output. The network replaces the given model, which is not
    used.
    """

    name = "good"
    title = "GOOD"
    paper = "Bitterwolf et al., Certifiably Adversarially Robust Detection of Out-of-Distribution Data, NeurIPS 2020"
    uses_outliers = True
    budget = Budget(images=4096, epochs=10, batch_size=32, learning_rate=0.02)
    version = 2

    def __init__(self) -> None:
        super().__init__()
        self._slow_steps = 1.0

    def prepare(self, context: Context) -> nn.Module:
        """Return a new small network; its weights depend on the seed alone."""
        images = min(len(context.inliers), self.budget.images)
        self._slow_steps = SLOW_START * self.budget.epochs * images / min(self.budget.batch_size, images)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(context.seed)
            network = SmallNetwork(context.trained.num_classes, context.trained.size)
        return counted_as(network.to(device_of(context.model.modules())), context.model)

    def loss(self, tuner: Tuner, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Loss of one batch of images in [0, 1], and as many OOD images."""
        network = tuner.model
        if not isinstance(network, SmallNetwork):
            raise TypeError("bounds are implemented for this method's own network only")
        network.steps += 1
        share = min(1.0, int(network.steps) / self._slow_steps)
        outliers = tuner.draw_outliers(len(images), generator)
        plain = tuner.normalise(outliers)
        low, high = (tuner.normalise((outliers + share * change).clamp(0, 1)) for change in (-RADIUS, RADIUS))
        bounded, exact = network.largest_gap(low, high), network.largest_gap(plain, plain)
        bound = share * WEIGHT * bound_loss(bounded, exact)
        return F.cross_entropy(network(tuner.normalise(images)), labels) + bound

    def score_outputs(self, outputs: Tensor) -> Tensor:
        """Score logits (N, K); higher = more OOD."""
        return -F.softmax(outputs.double(), dim=1).amax(dim=1)


def interval(layer: nn.Module, centre: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Centre and radius of a box that contains the image of a box under `layer`."""
    if isinstance(layer, nn.Linear):
        return layer(centre), F.linear(radius, layer.weight.abs())
    if isinstance(layer, nn.Conv2d):
        return layer(centre), F.conv2d(radius, layer.weight.abs(), None, layer.stride, layer.padding)
    if isinstance(layer, nn.Flatten):
        return layer(centre), layer(radius)
    low, high = layer(centre - radius), layer(centre + radius)  # monotonic
    return (high + low) / 2, (high - low) / 2


def bound_loss(bounded: Tensor, exact: Tensor, quantile: float = QUANTILE) -> Tensor:
    """Loss of upper bounds (M,) for the easiest share of the images, and of the gaps themselves (M,) for the others."""
    order = bounded.detach().argsort()
    cut = round(quantile * len(bounded))
    gaps = torch.cat([bounded[order[:cut]], exact[order[cut:]]])
    return torch.log1p(gaps**2 / 2).mean()
