"""The boxes of a pass: where they come from, their place in the input of the layers, and the channel means inside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from neuralmean.data.batch import Batch
from neuralmean.errors import InputError
from neuralmean.models.execution import eval_mode
from neuralmean.models.layers import Layer
from neuralmean.recording import Recorder
from neuralmean.scorers.regions import RegionRows
from neuralmean.stats.places import patch_grid
from neuralmean.stats.regions import box_side, cell_weights, check_corners, clip_boxes, random_boxes

# Share of the watched layers, from the first on, that is read: positions of deeper layers see far more than the box.
# `python -m benchmarks.regions --depth 1` reads all layers.
DEPTH = 0.5
_SMALLEST = 1 / 16  # of the side of an image
_LEAST_PIXELS = 4.0


@dataclass(frozen=True)
class Frame:
    """Place of an image in the layers' input, the canvas."""

    canvas: tuple[int, int]  # size of the canvas in pixels, (H, W)
    size: tuple[int, int]  # size of the image in it, which starts at the first row and column
    scale: tuple[float, float] = (1.0, 1.0)  # factors from pixels of the input to pixels of the canvas, (y, x)

    def place(self, boxes: Tensor) -> Tensor:
        """Convert boxes (M, 4) from pixels of the input to pixels of the canvas, clipped to the image."""
        return clip_boxes(check_corners(boxes) * self._factors, self.size)

    def unplace(self, boxes: Tensor) -> Tensor:
        """Convert boxes (M, 4) from pixels of the canvas to pixels of the input."""
        return boxes / self._factors

    @property
    def _factors(self) -> Tensor:
        y, x = self.scale
        return torch.tensor([x, y, x, y], dtype=torch.float64)


def frames_of(recorder: Recorder, batch: Batch, model: nn.Module) -> list[Frame]:
    """Return the place of each image of a batch in the layers' input."""
    if batch.images is None:
        x = batch.first
        if x.dim() != 4:
            raise InputError(
                f"Expected images of shape (N, C, H, W) to score regions of, but got shape {tuple(x.shape)}."
            )
        return [Frame((x.shape[2], x.shape[3]), (x.shape[2], x.shape[3]))] * len(x)
    sizes = [(image.shape[1], image.shape[2]) for image in batch.images]
    transform = getattr(model, "transform", None)
    if isinstance(transform, nn.Module) and hasattr(transform, "size_divisible"):
        # The detection models of torchvision resize all images and place them on one canvas.
        with torch.no_grad(), eval_mode(recorder.modules):
            placed = transform([image.cpu() for image in batch.images])[0]
        height, width = placed.tensors.shape[-2:]
        return [
            Frame((height, width), (new[0], new[1]), (new[0] / old[0], new[1] / old[1]))
            for new, old in zip(placed.image_sizes, sizes, strict=True)
        ]
    if len(set(sizes)) > 1:
        raise InputError(
            "Expected images of one size, as the model does not say where it places images of different sizes. Pass one "
            "image at a time."
        )
    return [Frame(size, size) for size in sizes]


class BoxSource(Protocol):
    """Source of the boxes of each image of a batch, in pixels of the input."""

    @property
    def needs_output(self) -> bool:
        """Whether the boxes are computed from the model's output."""

    def __call__(self, frames: Sequence[Frame], output: Any) -> list[Tensor]:
        """Return the boxes of each image, (M_i, 4), given the model's output if it is needed."""


@dataclass(frozen=True)
class Given:
    """Boxes given by the caller, or computed by a function from the model's output.

    Attributes:
        boxes: The boxes, or the function.
        choose: Selects some of the boxes of an image; None selects all.
    """

    boxes: Any
    choose: Callable[[Tensor, Frame], Tensor] | None = None

    @property
    def needs_output(self) -> bool:
        """Whether the boxes are computed from the model's output."""
        return callable(self.boxes)

    def __call__(self, frames: Sequence[Frame], output: Any) -> list[Tensor]:
        """Return the boxes of each image."""
        found = self.boxes(output) if callable(self.boxes) else self.boxes
        if isinstance(found, Tensor) and found.dim() != 3:
            raise InputError(
                f"Expected `boxes` of shape (N, M, 4), or a list with an (M, 4) for each image, but got {tuple(found.shape)}."
            )
        each = [torch.as_tensor(own) for own in found]
        each = [own.reshape(0, 4) if own.numel() == 0 else own for own in each]
        if len(each) != len(frames):
            raise InputError(f"Expected boxes for each of the {len(frames)} images, but got them for {len(each)}.")
        if self.choose is not None:
            each = [self.choose(own, frame) for own, frame in zip(each, frames, strict=True)]
        return each


@dataclass(frozen=True)
class Drawn:
    """Boxes drawn at random.

    Attributes:
        sides: Returns the side of each box of an image, in pixels of its canvas.
        generator: Source of randomness.
    """

    sides: Callable[[Frame], Tensor]
    generator: torch.Generator
    needs_output = False

    def __call__(self, frames: Sequence[Frame], output: Any) -> list[Tensor]:
        """Return the boxes of each image."""
        drawn = (random_boxes(self.sides(frame), frame.size, generator=self.generator) for frame in frames)
        return [frame.unplace(boxes) for frame, boxes in zip(frames, drawn, strict=True)]


def boxes_to_learn(boxes: Any, per_image: int, generator: torch.Generator) -> BoxSource:
    """Return a source of some boxes per image, of all sizes: from `boxes`, or drawn if it is None."""

    def some(found: Tensor, frame: Frame) -> Tensor:
        return found[torch.randperm(len(found), generator=generator)[:per_image]]

    def sides(frame: Frame) -> Tensor:
        most = math.sqrt(math.prod(frame.size))
        least = min(most, max(_LEAST_PIXELS, _SMALLEST * most))
        share = torch.rand(per_image, generator=generator, dtype=torch.float64)
        return torch.exp(math.log(least) + share * math.log(most / least))

    return Drawn(sides, generator) if boxes is None else Given(boxes, some)


def boxes_to_calibrate(
    boxes: Any, edges: Tensor, ranges: Callable[[Tensor], Tensor], generator: torch.Generator
) -> BoxSource:
    """Return a source of one box per image and range of sizes, as boxes of one image depend on each other."""

    def one_of_each(found: Tensor, frame: Frame) -> Tensor:
        order = torch.randperm(len(found), generator=generator)
        known = ranges(box_side(frame.place(found)))[order].tolist()
        return found[order[sorted({index: place for place, index in enumerate(known)}.values())]]

    def sides(frame: Frame) -> Tensor:
        most = math.sqrt(math.prod(frame.size))
        low, high = edges[:-1], edges[1:].clamp_max(most)
        share = torch.rand(len(low), generator=generator, dtype=torch.float64)
        return torch.exp(low.log() + share * (high / low).log())[low < most]

    return Drawn(sides, generator) if boxes is None else Given(boxes, one_of_each)


def region_layers(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return the watched layers that are read inside boxes."""
    return tuple(layers[: math.ceil(DEPTH * len(layers))])


class BoxMeans:
    """Computes the mean of each channel inside each box.

    Args:
        layers: The layers to read.
        frames: Places of the images in the layers' input.
        boxes: Boxes of each image, in pixels of the input.
    """

    def __init__(self, layers: Sequence[Layer], frames: Sequence[Frame], boxes: Sequence[Tensor]) -> None:
        self._layers, self._frames = layers, frames
        self._boxes = [frame.place(own) for frame, own in zip(frames, boxes, strict=True)]
        self._weights: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def side(self) -> Tensor:
        """Side of the square with the area of each box, in pixels of the canvas."""
        return torch.cat([box_side(own) for own in self._boxes])

    def __call__(self, index: int, activation: Tensor) -> Tensor:
        """Return the means of an activation of the layer of this index, float32 (boxes of all images, C)."""
        layer, wide = self._layers[index], activation.detach().float()
        grid = grid_of(wide, layer, self._frames[0].canvas)
        rows = wide.flatten(1, -2) if layer.channels_last else wide.reshape(*wide.shape[:2], -1).transpose(1, 2)
        if grid is None:  # no positions: the same value for all boxes of an image
            whole = rows.mean(dim=1) if rows.dim() == 3 else rows
            parts = [own.expand(len(boxes), -1) for own, boxes in zip(whole, self._boxes, strict=True)]
        else:
            prefix, cells = grid
            weights = self._cell_weights(cells)
            parts = [share.to(own.device) @ own[prefix:] for share, own in zip(weights, rows, strict=True)]
        return torch.cat(parts).cpu()

    def _cell_weights(self, cells: tuple[int, int]) -> list[Tensor]:
        if cells not in self._weights:
            pairs = zip(self._boxes, self._frames, strict=True)
            self._weights[cells] = [cell_weights(own, cells, frame.canvas).float() for own, frame in pairs]
        return self._weights[cells]


def grid_of(activation: Tensor, layer: Layer, canvas: tuple[int, int]) -> tuple[int, tuple[int, int]] | None:
    """Return the number of tokens before the grid of an activation, and its rows and columns; None without a grid."""
    sizes = activation.shape[1:-1] if layer.channels_last else activation.shape[2:]
    if len(sizes) == 2:
        return 0, (sizes[0], sizes[1])
    return patch_grid(sizes[0], canvas) if len(sizes) == 1 and sizes[0] > 1 else None


def read_boxes(
    recorder: Recorder, model: nn.Module, batch: Batch, source: BoxSource
) -> tuple[Any, list[Tensor], RegionRows]:
    """Run a batch, and return the model's output, the boxes of each image, and the channel means inside, image by image."""
    frames, layers = frames_of(recorder, batch, model), region_layers(recorder.layers)
    means, unread = partial(BoxMeans, layers, frames), torch.empty(0)
    with torch.no_grad():
        if source.needs_output:
            # Activations are kept until the boxes are known, as copies, because a later layer may overwrite them.
            found = recorder.keep_activations(batch, lambda index, own: own.clone() if index < len(layers) else unread)
            boxes = source(frames, found.recording.output)
            inside = means(boxes)
            kept = [[inside(index, own) for own in part] for index, part in enumerate(found.kept[: len(layers)])]
        else:
            boxes = source(frames, None)
            inside = means(boxes)
            found = recorder.keep_activations(
                batch, lambda index, own: inside(index, own) if index < len(layers) else unread
            )
            kept = found.kept[: len(layers)]
    rows = torch.cat([torch.stack(part).mean(dim=0) for part in kept], dim=1)
    bad = ~rows.isfinite().all(dim=1)
    if bool(bad.any()):
        raise InputError(
            f"Expected finite activations, but {int(bad.sum())} of {len(rows)} boxes hold NaN or Inf. Check the images for NaN "
            "or Inf, and their scale."
        )
    return found.recording.output, boxes, RegionRows(rows, inside.side)
