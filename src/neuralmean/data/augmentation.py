"""Augmented images: crafted out-of-distribution images for the paper's zero-shot protocol, and rotated images."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from neuralmean.errors import InputError


def permute_blocks(
    images: Tensor, *, blocks: int = 4, generator: torch.Generator | None = None, seed: int = 0
) -> Tensor:
    """Return the images with their `blocks` x `blocks` tiles in a random order, never the original one.

    The paper's crafted OOD data (appendix, "Crafting OOD data by pixel permuting"): 16 tiles of an image, permuted;
    pixels inside a tile stay as they are. If a side is not a multiple of `blocks`, the remaining rows or columns at the
    bottom and the right stay in place; a side shorter than `blocks` is divided into single pixels.

    Args:
        images: Shape (N, C, H, W), any type and size.
        blocks: Tiles along each side.
        generator: Source of randomness; None makes one from `seed`.
        seed: Seed of that generator.

    Returns:
        New images of the same shape and type, each with its own permutation.

    Example:
        >>> image = torch.arange(16.0).reshape(1, 1, 4, 4)
        >>> shuffled = permute_blocks(image)
        >>> bool((shuffled != image).any()), torch.equal(shuffled.flatten().sort()[0], image.flatten())
        (True, True)
    """
    if images.dim() != 4:
        raise InputError(
            f"Expected images of shape (N, C, H, W) to permute, but got shape {tuple(images.shape)}. "
            "Pass `ood_data`, or use a scorer that needs none."
        )
    if not isinstance(blocks, int) or blocks < 1:
        raise InputError(f"Expected `blocks` to be a positive integer, but got {blocks!r}.")
    count, channels, height, width = images.shape
    rows, columns = min(blocks, height), min(blocks, width)
    if rows * columns < 2:
        raise InputError(
            f"Expected at least two blocks to permute, but got {rows} x {columns} for {height} x {width} pixels."
        )
    block_height, block_width = height // rows, width // columns
    inner = images[:, :, : rows * block_height, : columns * block_width]
    tiles = inner.reshape(count, channels, rows, block_height, columns, block_width)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5).reshape(count, rows * columns, channels, block_height, block_width)
    order = _permutations(count, rows * columns, generator or torch.Generator().manual_seed(seed)).to(images.device)
    tiles = tiles[torch.arange(count, device=images.device).unsqueeze(1), order]
    tiles = tiles.reshape(count, rows, columns, channels, block_height, block_width).permute(0, 3, 1, 4, 2, 5)
    result = images.clone(memory_format=torch.contiguous_format)
    result[:, :, : rows * block_height, : columns * block_width] = tiles.reshape(inner.shape)
    return result


def rotate(images: Tensor, *, degrees: float = 15.0, generator: torch.Generator | None = None, seed: int = 0) -> Tensor:
    """Return the images, each rotated by a random angle of at most `degrees`; corners are filled by reflection.

    A model has memorised its training images but not their rotated copies, which can replace fresh images.

    Args:
        images: Floats of shape (N, C, H, W).
        degrees: Largest angle, either way.
        generator: Source of randomness; None makes one from `seed`.
        seed: Seed of that generator.
    """
    if images.dim() != 4 or not images.is_floating_point():
        raise InputError(
            f"Expected float images of shape (N, C, H, W) to rotate, but got {images.dtype} {tuple(images.shape)}."
        )
    generator = generator or torch.Generator().manual_seed(seed)
    angle = (torch.rand(len(images), generator=generator) * 2 - 1) * math.radians(degrees)
    cosine, sine, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    height, width = images.shape[2:]
    rows = [
        torch.stack([cosine, -sine * height / width, zero], 1),
        torch.stack([sine * width / height, cosine, zero], 1),
    ]
    grid = F.affine_grid(torch.stack(rows, 1).to(images), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def _permutations(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return `count` random permutations, shape (count, length), none of them the identity."""
    order = torch.rand(count, length, generator=generator).argsort(dim=1)
    identity = (order == torch.arange(length)).all(dim=1)
    order[identity] = order[identity].roll(1, dims=1)
    return order
