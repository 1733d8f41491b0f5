"""Random augmentation of batches of images, as tensors on their device.

Every function takes a `torch.Generator`, so a step's randomness depends on its seed alone and a resumed run sees the
same images. Images are floats in [0, 1], shape (N, 3, H, W), before normalisation.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor

_LUMA = (0.299, 0.587, 0.114)
# RGB to YIQ and back; a rotation of I and Q is a change of hue.
_TO_YIQ = ((0.299, 0.587, 0.114), (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135))


def shift_and_flip(images: Tensor, *, pixels: int, flip: bool, generator: Generator) -> Tensor:
    """Shift each image by up to `pixels` in both directions, with reflected edges, and mirror half of the images.

    Args:
        images: Shape (N, C, H, W).
        pixels: Largest shift.
        flip: Whether to mirror.
        generator: Source of randomness.
    """
    n, _, height, width = images.shape
    device = images.device
    if pixels:
        padded = F.pad(images, (pixels, pixels, pixels, pixels), mode="reflect")
        top, left = _integers(2 * pixels + 1, (2, n, 1), generator, device)
        rows = top + torch.arange(height, device=device)  # (N, H)
        columns = left + torch.arange(width, device=device)  # (N, W)
    else:
        padded = images
        rows = torch.arange(height, device=device).expand(n, -1)
        columns = torch.arange(width, device=device).expand(n, -1)
    if flip:
        mirrored = _integers(2, (n, 1), generator, device).bool()
        columns = torch.where(mirrored, columns.flip(1), columns)
    index = torch.arange(n, device=device)
    picked = padded.permute(0, 2, 3, 1)[index[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2)


def mix(images: Tensor, targets: Tensor, *, alpha: float, generator: Generator) -> tuple[Tensor, Tensor]:
    r"""Mix each image and its target with those of another (Zhang et al., "mixup", ICLR 2018).

    .. math::
        x = \lambda x_i + (1 - \lambda) x_j, \quad y = \lambda y_i + (1 - \lambda) y_j, \quad
        \lambda \sim \mathrm{Beta}(\alpha, \alpha)

    Args:
        images: Shape (N, C, H, W).
        targets: Class probabilities, shape (N, K).
        alpha: Parameter of the Beta distribution, one draw for the whole batch.
        generator: Source of randomness.
    """
    # Torch's Beta takes no generator.
    share = float(np.random.default_rng(int(torch.randint(2**31, (), generator=generator))).beta(alpha, alpha))
    other = torch.randperm(len(images), generator=generator).to(images.device)
    return images.lerp(images[other], 1 - share), targets.lerp(targets[other], 1 - share)


def two_crops_view(images: Tensor, *, flip: bool, generator: Generator) -> Tensor:
    """One random view of each image, as in MoCo v2: crop and rescale, mirror, jitter colours, drop colours.

    Args:
        images: Shape (N, 3, H, W).
        flip: Whether to mirror.
        generator: Source of randomness.
    """
    views = random_resized_crop(images, smallest=0.2, flip=flip, generator=generator)
    jittered = jitter_colours(views, generator=generator)
    chosen = _uniform(0, 1, len(images), generator, images.device) < 0.8
    views = torch.where(chosen, jittered, views)
    grey = _luma(views).expand_as(views)
    return torch.where(_uniform(0, 1, len(images), generator, images.device) < 0.2, grey, views)


def random_resized_crop(images: Tensor, *, smallest: float, flip: bool, generator: Generator) -> Tensor:
    """Cut a random rectangle out of each image and scale it to the whole size, bilinearly.

    Args:
        images: Shape (N, C, H, W).
        smallest: Least share of the area; the aspect ratio is between 3/4 and 4/3.
        flip: Whether to mirror half of the images.
        generator: Source of randomness.
    """
    n, device = len(images), images.device
    area = _uniform(smallest, 1.0, n, generator, device).flatten()
    ratio = _uniform(math.log(3 / 4), math.log(4 / 3), n, generator, device).flatten().exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)  # shares of the sides
    x, y = (_uniform(-1, 1, n, generator, device).flatten() * (1 - side) for side in (width, height))
    sign = torch.where(_uniform(0, 1, n, generator, device).flatten() < 0.5, -1.0, 1.0) if flip else torch.ones_like(x)
    zero = torch.zeros_like(x)
    theta = torch.stack([torch.stack([sign * width, zero, x], 1), torch.stack([zero, height, y], 1)], 1)  # (N, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def jitter_colours(images: Tensor, *, generator: Generator, strength: float = 0.4, hue: float = 0.1) -> Tensor:
    """Change brightness, contrast, saturation (by up to `strength`) and hue (by up to `hue` turns) of each image.

    Hue is rotated in YIQ rather than HSV space: one matrix product per batch, and close enough for augmentation.

    Args:
        images: Shape (N, 3, H, W).
        generator: Source of randomness.
        strength: Largest relative change.
        hue: Largest rotation; 1 is a full turn.
    """
    n, device = len(images), images.device
    brightness, contrast, saturation = (_uniform(1 - strength, 1 + strength, n, generator, device) for _ in range(3))
    images = (images * brightness).clamp(0, 1)
    mean = _luma(images).mean(dim=(2, 3), keepdim=True)
    images = (mean + (images - mean) * contrast).clamp(0, 1)
    grey = _luma(images)
    images = (grey + (images - grey) * saturation).clamp(0, 1)
    angle = _uniform(-hue, hue, n, generator, device).flatten() * 2 * math.pi
    return torch.einsum("nij,njhw->nihw", _hue_matrix(angle), images).clamp(0, 1)


def _hue_matrix(angle: Tensor) -> Tensor:
    """Matrices that rotate the hue of RGB colours, shape (N, 3, 3)."""
    to_yiq = torch.tensor(_TO_YIQ, device=angle.device, dtype=angle.dtype)
    turn = torch.zeros(len(angle), 3, 3, device=angle.device, dtype=angle.dtype)
    turn[:, 0, 0] = 1
    turn[:, 1, 1] = turn[:, 2, 2] = angle.cos()
    turn[:, 1, 2] = -angle.sin()
    turn[:, 2, 1] = angle.sin()
    matrix: Tensor = torch.linalg.inv(to_yiq) @ turn @ to_yiq
    return matrix


def _luma(images: Tensor) -> Tensor:
    weights = torch.tensor(_LUMA, device=images.device, dtype=images.dtype).view(1, 3, 1, 1)
    return (images * weights).sum(dim=1, keepdim=True)  # (N, 1, H, W)


def _uniform(low: float, high: float, n: int, generator: Generator, device: torch.device) -> Tensor:
    """One number per image, shape (N, 1, 1, 1); drawn on the CPU so that devices agree."""
    return (low + (high - low) * torch.rand(n, 1, 1, 1, generator=generator)).to(device)


def _integers(high: int, shape: tuple[int, ...], generator: Generator, device: torch.device) -> Tensor:
    return torch.randint(high, shape, generator=generator).to(device)
