"""ACET: a copy learns low confidence in whole neighbourhoods of noise (Hein et al., CVPR 2019, Sec. 4)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from neuralmean.bench.baselines.finetune import FineTuned, Tuner

RADIUS = 0.3  # of the neighbourhood, in images scaled to [0, 1]; the paper's
ATTACK_STEPS = 5  # the paper's: 40
WEIGHT = 1.0
Logits = Callable[[Tensor], Tensor]
BLURS = (1.0, 2.5)  # range of the noise's standard deviations, in pixels


class Acet(FineTuned):
    r"""Fine-tunes with adversarial noise, and scores by MSP.

    .. math::
        L = E_{id}[-\log p_y(x)] + \lambda E_z\left[\max_{\|u - z\|_\infty \le \epsilon} \max_k \log p_k(u)\right], \quad
        s(x) = -\max_k p_k(x)

    Noise :math:`z` is half uniform, half ID images with their pixels permuted, blurred and stretched to full contrast,
    as in the paper. Scaled down: a copy is fine-tuned within the budget instead of trained from scratch, and the
    inner maximum is found by 5 steps instead of 40. No OOD image is used.
    """

    name = "acet"
    title = "ACET"
    paper = (
        "Hein et al., Why ReLU Networks Yield High-confidence Predictions Far Away From the Training Data, CVPR 2019"
    )

    def loss(self, tuner: Tuner, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Loss of one batch of images in [0, 1] and as many noise images."""
        noise = make_noise(images, generator)
        worst = attack(lambda batch: tuner.model(tuner.normalise(batch)), noise, tuner.model)
        logits = tuner.model(tuner.normalise(torch.cat([images, worst])))
        return acet_loss(logits[: len(images)], labels, logits[len(images) :])

    def score_outputs(self, outputs: Tensor) -> Tensor:
        """Score logits (N, K); higher = more OOD."""
        return -F.softmax(outputs.double(), dim=1).amax(dim=1)


def acet_loss(inliers: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
    """Loss of logits (N, K) with labels (N,), and of logits of adversarial noise (M, K)."""
    return F.cross_entropy(inliers, labels) + WEIGHT * _confidence(noise).mean()


def attack(
    logits_of: Logits, start: Tensor, model: nn.Module, *, radius: float = RADIUS, steps: int = ATTACK_STEPS
) -> Tensor:
    """Return images within `radius` of `start` that maximise the model's confidence, by projected gradient ascent.

    Args:
        logits_of: Maps images in [0, 1] to logits.
        start: Images in [0, 1], shape (N, 3, H, W).
        model: Kept in eval mode during the search, so that running statistics do not change.
        radius: Largest change of a value.
        steps: Number of steps of size 2.5 `radius` / `steps`.
    """
    training, current = model.training, start.clone()
    model.eval()
    try:
        for _ in range(steps):
            current.requires_grad_()
            (gradient,) = torch.autograd.grad(_confidence(logits_of(current)).sum(), current)
            moved = current.detach() + 2.5 * radius / steps * gradient.sign()
            current = torch.minimum(torch.maximum(moved, start - radius), start + radius).clamp(0, 1)
    finally:
        model.train(training)
    return current.detach()


def make_noise(images: Tensor, generator: torch.Generator) -> Tensor:
    """Blurred noise of full contrast in the shape of `images`: half uniform, half permuted pixels of the images."""
    half = len(images) // 2
    uniform = torch.rand(images[:half].shape, generator=generator).to(images.device)
    order = torch.rand(len(images) - half, images[0, 0].numel(), generator=generator).argsort(dim=1).to(images.device)
    permuted = images[half:].flatten(2).gather(2, order.unsqueeze(1).expand(-1, images.shape[1], -1))
    noise = torch.cat([uniform, permuted.view_as(images[half:])])
    width = BLURS[0] + (BLURS[1] - BLURS[0]) * float(torch.rand(1, generator=generator))
    noise = _blur(noise, width)
    low, high = noise.amin(dim=(1, 2, 3), keepdim=True), noise.amax(dim=(1, 2, 3), keepdim=True)
    return (noise - low) / (high - low).clamp_min(1e-6)


def _confidence(logits: Tensor) -> Tensor:
    """Logarithm of the largest probability, shape (N,)."""
    return F.log_softmax(logits, dim=1).amax(dim=1)


def _blur(images: Tensor, width: float) -> Tensor:
    """Gaussian filter of standard deviation `width`, with reflected edges."""
    reach = min(int(3 * width), images.shape[-1] - 1, images.shape[-2] - 1)
    offsets = torch.arange(-reach, reach + 1, device=images.device, dtype=images.dtype)
    line = torch.exp(-(offsets**2) / (2 * width**2))
    line = (line / line.sum()).expand(images.shape[1], 1, 1, -1)
    images = F.conv2d(F.pad(images, (reach, reach, 0, 0), mode="reflect"), line, groups=images.shape[1])
    return F.conv2d(F.pad(images, (0, 0, reach, reach), mode="reflect"), line.transpose(2, 3), groups=images.shape[1])
