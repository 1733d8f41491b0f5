"""The training loop: steps, schedule, checkpoints. The task defines the loss.

No random state is carried from step to step: the order of an epoch depends on the seed and the epoch, and a step's
augmentation and dropout on the seed and the step. A killed run that resumes therefore gives exactly the numbers of an
uninterrupted one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from neuralmean.bench.train.checkpoint import load_checkpoint, save_checkpoint
from neuralmean.bench.train.recipes import Recipe
from neuralmean.errors import InputError

Precision = Literal["float32", "bfloat16"]
REPORT_EVERY = 10  # steps


@dataclass(frozen=True)
class Progress:
    """Progress of training; epochs count from 1, `step` is the number of finished steps, `loss` the mean since the last report.

    `seconds` is the time of the whole run so far, `left` an estimate of the remaining time.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    learning_rate: float
    seconds: float
    left: float


class Task(Protocol):
    """A model in training, with its loss."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimise."""

    def loss(self, images: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
        """Loss of one batch of images in [0, 1], shape (N, 3, H, W)."""

    def after_step(self) -> None:
        """Called after each step of the optimiser."""

    def state(self) -> dict[str, Tensor]:
        """Return everything that is learnt or kept between steps, by name."""

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what `state` returned."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings of a run that do not affect its result."""

    checkpoint: Path
    identity: dict[str, Any]  # identity of the run; checkpoints of other runs are rejected
    seed: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    precision: Precision = "float32"
    resume: bool = True
    checkpoint_seconds: float = 60.0
    progress: Callable[[Progress], None] | None = None


def run(task: Task, images: Tensor, labels: Tensor | None, recipe: Recipe, setting: Setting) -> float:
    """Train, resuming from the checkpoint if there is one, and return the total time in seconds.

    Args:
        task: A model in training, with its loss.
        images: uint8, shape (N, 3, 32, 32), on the device.
        labels: Shape (N,); None if the task needs none.
        recipe: How.
        setting: Where to run, and how to report progress.
    """
    if len(images) < recipe.batch_size:
        raise InputError(
            f"Expected at least {recipe.batch_size} images, one batch, but got {len(images)}. "
            "Pass a recipe with a smaller `batch_size`."
        )
    per_epoch = len(images) // recipe.batch_size
    steps = recipe.epochs * per_epoch
    optimizer = make_optimizer(task.parameters(), recipe)
    start, before = 0, 0.0
    if setting.resume and setting.checkpoint.exists():
        state, at = load_checkpoint(setting.checkpoint, optimizer, setting.identity)
        task.load_state(state)
        start, before = int(at["step"]), float(at["seconds"])
    clock = _Clock(before)

    def save(step: int) -> None:
        at = {"step": step, "seconds": clock.seconds()}
        save_checkpoint(setting.checkpoint, task.state(), optimizer, setting.identity, at)
        clock.saved()

    def report(done: int, epoch: int, loss: float, rate: float) -> None:
        if setting.progress is not None:
            work = [work_until(recipe, number, per_epoch) for number in (start, done, steps)]
            left = clock.here() * (work[2] - work[1]) / max(work[1] - work[0], 1e-9)
            setting.progress(Progress(done, steps, epoch + 1, recipe.epochs, loss, rate, clock.seconds(), left))

    step = done = start
    order, losses = torch.empty(0), []
    try:
        for step in range(start, steps):
            epoch, place = divmod(step, per_epoch)
            if place == 0 or step == start:
                order = torch.randperm(len(images), generator=_generator(setting.seed, epoch, stream=0))
            rows = order[place * recipe.batch_size : (place + 1) * recipe.batch_size].to(images.device)
            rate = set_learning_rate(optimizer, recipe, step, steps)
            inputs = resize(images[rows].float() / 255, recipe.size_at(epoch))
            loss = _step(task, inputs, None if labels is None else labels[rows], optimizer, recipe, setting, step)
            done = step + 1
            losses.append(loss)
            if done % REPORT_EVERY == 0 or done == steps:
                mean = _finite_mean(losses, done)
                losses.clear()
                report(done, epoch, mean, rate)
            if done < steps and clock.since_saved() >= setting.checkpoint_seconds:
                save(done)
    except KeyboardInterrupt:
        # Between two steps nothing is lost; within a step, the previous checkpoint is kept.
        if done == step + 1:
            save(done)
        raise
    save(done)
    return clock.seconds()


def resize(images: Tensor, size: int | None) -> Tensor:
    """Scale images (N, C, H, W) to `size` pixels a side; None keeps their size."""
    if size is None or images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, (size, size), mode="bilinear", antialias=True, align_corners=False)


def work_until(recipe: Recipe, step: int, per_epoch: int) -> float:
    """Work before a step, in steps at the largest size, assuming time proportional to the number of pixels.

    Example:
        >>> work_until(Recipe(epochs=2, stages=((16, 1), (32, 1))), 15, per_epoch=10)
        7.5
    """
    if not recipe.stages:
        return float(step)
    largest, done = max(size for size, _ in recipe.stages), 0.0
    for size, epochs in recipe.stages:
        steps = min(step, epochs * per_epoch)
        done, step = done + steps * (size / largest) ** 2, step - steps
    return done


def _step(
    task: Task,
    images: Tensor,
    labels: Tensor | None,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    setting: Setting,
    step: int,
) -> Tensor:
    """One step of the optimiser; return the loss before it."""
    device = setting.device
    generator = _generator(setting.seed, step, stream=1)
    autocast = torch.autocast(device.type, torch.bfloat16) if setting.precision == "bfloat16" else nullcontext()
    # Dropout uses the global random state: set it for the step, then restore the caller's.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _attention(device):
        torch.manual_seed(_seed(setting.seed, step, stream=2))
        with autocast:
            loss = task.loss(images, labels, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
    if recipe.max_norm:
        nn.utils.clip_grad_norm_(task.parameters(), recipe.max_norm)
    optimizer.step()
    task.after_step()
    return loss.detach()


def _attention(device: torch.device) -> AbstractContextManager[None]:
    """Use plain attention on a CPU: the backward pass of the fused kernel took two thirds of a ViT's step."""
    return sdpa_kernel(SDPBackend.MATH) if device.type == "cpu" else nullcontext()


def trial_step(
    task: Task, images: Tensor, labels: Tensor | None, recipe: Recipe, *, device: torch.device, precision: Precision
) -> Callable[[int], None]:
    """Return a function that runs one step on the first batch at a given size, for timing; it changes the task."""
    setting = Setting(checkpoint=Path(), identity={}, device=device, precision=precision)
    optimizer = make_optimizer(task.parameters(), recipe)
    first = None if labels is None else labels[: recipe.batch_size]

    def step(size: int) -> None:
        inputs = resize(images[: recipe.batch_size].float() / 255, size)
        # `item` waits for the GPU.
        _step(task, inputs, first, optimizer, recipe, setting, 0).item()

    return step


def make_optimizer(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    """Create the recipe's optimiser, without weight decay for biases, norms and embeddings."""
    decayed = [parameter for parameter in parameters if parameter.ndim in (2, 4)]
    others = [parameter for parameter in parameters if parameter.ndim not in (2, 4)]
    groups = [
        {"params": decayed, "weight_decay": recipe.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.learning_rate)
    nesterov = recipe.nesterov and recipe.momentum > 0
    return torch.optim.SGD(groups, lr=recipe.learning_rate, momentum=recipe.momentum, nesterov=nesterov)


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    r"""Rate of one step: linear warm-up to the highest, then half a cosine to zero.

    Example:
        >>> recipe = Recipe(epochs=1, learning_rate=1.0, warmup=0.5)
        >>> [round(learning_rate(recipe, step, 8), 3) for step in range(8)]
        [0.25, 0.5, 0.75, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    warm = round(recipe.warmup * steps)
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    return recipe.learning_rate * (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, recipe: Recipe, step: int, steps: int) -> float:
    """Set the rate of one step, and return it."""
    rate = learning_rate(recipe, step, steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _finite_mean(losses: list[Tensor], step: int) -> float:
    mean = float(torch.stack(losses).mean())
    if not math.isfinite(mean):
        raise InputError(
            f"Expected the loss to be finite, but got {mean!r} at step {step}. Training diverged: pass a recipe with a "
            "lower `learning_rate` or a `max_norm`."
        )
    return mean


def _seed(seed: int, number: int, *, stream: int) -> int:
    """One seed per (run, number, stream), far apart from its neighbours (multipliers of SplitMix64)."""
    mixed = (seed * 0x9E3779B97F4A7C15 + number * 0xBF58476D1CE4E5B9 + stream * 0x94D049BB133111EB) & (2**64 - 1)
    mixed ^= mixed >> 31
    return mixed * 0xD6E8FEB86659FD93 & (2**63 - 1)


def _generator(seed: int, number: int, *, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(seed, number, stream=stream))


class _Clock:
    """Time of a run, including the time before interruptions."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._start = self._saved = time.monotonic()

    def seconds(self) -> float:
        return self._before + time.monotonic() - self._start

    def here(self) -> float:
        """Seconds of this process alone."""
        return time.monotonic() - self._start

    def saved(self) -> None:
        self._saved = time.monotonic()

    def since_saved(self) -> float:
        return time.monotonic() - self._saved
