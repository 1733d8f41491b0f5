r"""Channel means inside boxes: pure functions of activations and of boxes in pixels.

A cell of a coarse layer covers a rectangle of pixels and is weighted by the share of it inside the box, so a box
smaller than a cell has the mean of the cells that it touches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from neuralmean.errors import InputError

LEAST_SIDE = 1.0  # pixels: what detection models return may be thinner


def check_corners(boxes: Tensor, *, name: str = "boxes") -> Tensor:
    """Return boxes (M, 4) in float64 after checking that each is x0, y0, x1, y1."""
    if boxes.dim() != 2 or boxes.shape[1] != 4:
        raise InputError(
            f"Expected `{name}` of shape (M, 4) for each image, with x0, y0, x1, y1 in pixels, but got {tuple(boxes.shape)}."
        )
    boxes = boxes.detach().cpu().double()
    wrong = ~(boxes.isfinite().all(dim=1) & (boxes[:, 2:] >= boxes[:, :2]).all(dim=1))
    _raise_first(boxes, wrong, f"Expected `{name}` to hold x0, y0, x1, y1 with x0 <= x1 and y0 <= y1")
    return boxes


def clip_boxes(boxes: Tensor, size: Sequence[int], *, name: str = "boxes") -> Tensor:
    """Return boxes (M, 4) clipped to an image of `size` (H, W) pixels, float64, with sides of at least a pixel.

    Raises:
        InputError: A box is outside the image.

    Example:
        >>> clip_boxes(torch.tensor([[-5.0, 2.0, 4.0, 90.0]]), (32, 32))
        tensor([[ 0.,  2.,  4., 32.]], dtype=torch.float64)
    """
    boxes = boxes.double()
    ends = torch.tensor([size[1], size[0]], dtype=torch.float64)
    start, end = boxes[:, :2].clamp_min(0), boxes[:, 2:].minimum(ends)
    _raise_first(
        boxes, (end < start).any(dim=1), f"Expected `{name}` that meet the image of {size[1]} x {size[0]} pixels"
    )
    middle = (start + end) / 2
    half = ((end - start) / 2).clamp_min(LEAST_SIDE / 2).minimum(ends / 2)
    middle = middle.maximum(half).minimum(ends - half)
    return torch.cat([middle - half, middle + half], dim=1)


def _raise_first(boxes: Tensor, wrong: Tensor, expected: str) -> None:
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        numbers = ", ".join(f"{value:g}" for value in boxes[row].tolist())
        raise InputError(
            f"{expected}, but box {row} is {numbers}. Give corners in pixels, not a centre with width and height."
        )


def box_side(boxes: Tensor) -> Tensor:
    """Return the side of the square with the area of each box, (M,)."""
    return ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()


def cell_weights(boxes: Tensor, shape: Sequence[int], size: Sequence[int]) -> Tensor:
    """Return the share of each cell of a layer in each box, float64 (M, h * w), rows adding up to 1.

    Args:
        boxes: Shape (M, 4), as `clip_boxes` returns them.
        shape: Cells of the layer, (h, w), which cover the whole input.
        size: Pixels of the input, (H, W).

    Example:
        >>> cell_weights(torch.tensor([[1.0, 0.0, 4.0, 2.0]]), (1, 2), (2, 4))
        tensor([[0.3333, 0.6667]], dtype=torch.float64)
    """
    rows = _overlaps(boxes[:, 1], boxes[:, 3], shape[0], size[0])
    columns = _overlaps(boxes[:, 0], boxes[:, 2], shape[1], size[1])
    return (rows.unsqueeze(2) * columns.unsqueeze(1)).flatten(1)


def _overlaps(start: Tensor, end: Tensor, count: int, length: int) -> Tensor:
    """Return the share of each of `count` equal parts of a `length` in each stretch, (M, count), rows adding up to 1."""
    edges = torch.arange(count + 1, dtype=torch.float64) * (length / count)
    overlap = end.double()[:, None].minimum(edges[1:]) - start.double()[:, None].maximum(edges[:-1])
    overlap = overlap.clamp_min(0)
    return overlap / overlap.sum(dim=1, keepdim=True)


def random_boxes(side: Tensor, size: Sequence[int], *, generator: torch.Generator) -> Tensor:
    """Draw a random box in an image for each side, float64 (M, 4), with aspect ratios from 1 : 2 to 2 : 1.

    Args:
        side: Side of the square with the area of each box, in pixels, (M,).
        size: Pixels of the image, (H, W).
        generator: Source of randomness.

    Example:
        >>> boxes = random_boxes(torch.full((100,), 8.0), (32, 32), generator=torch.Generator().manual_seed(0))
        >>> bool((boxes >= 0).all() & (boxes <= 32).all()), box_side(boxes).mean().item()
        (True, 8.0)
    """
    height, width = float(size[0]), float(size[1])
    drawn = torch.rand(3, len(side), generator=generator, dtype=torch.float64)
    area = side.double().square().clamp_max(height * width)
    # The aspect ratios between 1 : 2 and 2 : 1 that fit into the image.
    least = (area / height**2).log().clamp_min(-math.log(2.0))
    most = (width**2 / area).log().clamp_max(math.log(2.0))
    ratio = (least.minimum(most) + (most - least).clamp_min(0) * drawn[0]).exp()
    wide = (area * ratio).sqrt().clamp_max(width)
    high = (area / wide).clamp_max(height)
    x, y = (width - wide) * drawn[1], (height - high) * drawn[2]
    return torch.stack([x, y, x + wide, y + high], dim=1)
