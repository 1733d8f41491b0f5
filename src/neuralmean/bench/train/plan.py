"""Fits a recipe into a time budget: measures a few steps, then chooses image sizes and epochs.

Training starts with small images: an epoch at 16 pixels costs about a quarter of one at 32 and is nearly as useful at
the beginning. Networks with a fixed input size (ConvNet-4, VGG-19, ViT) train at that size throughout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from neuralmean.bench.models import build
from neuralmean.bench.models.trained import SIZE
from neuralmean.bench.train.recipes import Recipe
from neuralmean.errors import InputError

SIZES = (16, 20, 24, SIZE)
_SHARES = {16: 3, 20: 2, 24: 1, SIZE: 2}  # per eight epochs: ResNet-34 reached 88 % on CIFAR-10 in eight
_RESERVE = 0.05  # of the budget, for measuring the accuracy and for other load
_FEW = 20  # with fewer epochs, a network underfits: it gets smaller shifts, a longer warm-up, and norms
_STEPS = 3


def usable_sizes(name: str) -> tuple[int, ...]:
    """Return which of `SIZES` a network accepts, by a pass on the meta device."""
    with torch.device("meta"):
        model = build(name)
        return tuple(size for size in SIZES if size == SIZE or _takes(model, size))


def _takes(model: torch.nn.Module, size: int) -> bool:
    try:
        model(torch.empty(2, 3, size, size))
    except RuntimeError:
        return False
    return True


def measure(step: Callable[[int], object], sizes: tuple[int, ...]) -> dict[int, float]:
    """Measure the seconds of one step at each size: the best of a few, after a warm-up.

    Args:
        step: Runs one training step at a given size.
        sizes: The sizes.
    """
    return {size: min([_seconds(step, size) for _ in range(_STEPS + 1)][1:]) for size in sizes}


def _seconds(step: Callable[[int], object], size: int) -> float:
    begun = time.perf_counter()
    step(size)
    return time.perf_counter() - begun


def plan(recipe: Recipe, epoch_seconds: Mapping[int, float], budget: float, *, started: bool = False) -> Recipe:
    """Fit a recipe into a budget.

    Args:
        recipe: The full recipe; returned unchanged if it fits.
        epoch_seconds: Seconds per epoch at each size that the network accepts.
        budget: Seconds.
        started: Whether the network is already trained; it then gets only the largest images, at half the learning rate.

    Returns:
        The recipe with `stages` and as many epochs as fit.

    Example:
        >>> plan(Recipe(epochs=200), {16: 60, 20: 90, 24: 130, 32: 230}, 1050).stages
        ((16, 3), (20, 2), (24, 1), (32, 2))
    """
    largest = max(epoch_seconds)
    time_left = budget * (1 - _RESERVE)
    if epoch_seconds[largest] > time_left:
        raise InputError(
            f"Expected a budget for at least one epoch, about {duration(epoch_seconds[largest] / (1 - _RESERVE))}, but got "
            f"{duration(budget)}. Pass a longer `budget`, or fewer images."
        )
    if recipe.epochs * epoch_seconds[largest] <= time_left:
        return recipe
    sizes = (largest,) if started else tuple(sorted(epoch_seconds))
    stages: tuple[tuple[int, int], ...] = ((largest, 1),)
    most = min(recipe.epochs, int(time_left / min(epoch_seconds.values())))
    for epochs in range(2, most + 1):
        # One more epoch may cost less, if rounding takes one from the largest size.
        longer = _share(sizes, epochs)
        if sum(epoch_seconds[size] * number for size, number in longer) <= time_left:
            stages = longer
    return _shorten(replace(recipe, epochs=sum(number for _, number in stages), stages=stages), started=started)


def _share(sizes: tuple[int, ...], epochs: int) -> tuple[tuple[int, int], ...]:
    """Distribute epochs over sizes; the largest gets at least one, and the remainder of rounding."""
    *small, largest = sizes
    whole = sum(_SHARES.get(size, 1) for size in sizes)
    stages = [(size, epochs * _SHARES.get(size, 1) // whole) for size in small]
    rest = epochs - sum(number for _, number in stages)
    return (*((size, number) for size, number in stages if number), (largest, rest))


def _shorten(recipe: Recipe, *, started: bool) -> Recipe:
    if started:
        return replace(recipe, learning_rate=recipe.learning_rate / 2, warmup=0.0)
    if recipe.epochs < _FEW:
        return replace(recipe, warmup=0.2, crop=min(recipe.crop, 2), mixup=0.0, norms=True)
    return recipe


def duration(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> duration(40), duration(600), duration(9000)
        ('40 s', '10 min', '2.5 h')
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
