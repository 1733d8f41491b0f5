"""Preprocessing of an image: 8 bits, the model's size, normalised.

`Preprocessing` is a small frozen value that is saved with a detector, so that new photos are treated as at `fit`. It
matches the evaluation transforms of timm and torchvision, with Pillow and numpy: `pixels` (any image to uint8) can run
in a worker process, `normalise` (uint8 to float tensor) in the process that holds the model. Torch is imported only
where a tensor is made, because decoding workers must start fast and stay small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from neuralmean.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Preprocessing", "as_8bit"]

Pixels = NDArray[np.uint8]
Interpolation = Literal["bilinear", "bicubic"]
Crop = Literal["center", "squash", "border"]

MAX_SIDE = 16_384
MAX_RESIZED_PIXELS = 100_000_000
_RESAMPLING = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
_WHITE = (255, 255, 255, 255)


@dataclass(frozen=True)
class Preprocessing:
    """How images become the model's input.

    Attributes:
        size: Height and width of the model's input; None keeps the size of each image.
        mean: Mean of each channel, on a scale of 0 to 1, subtracted from the pixels.
        std: Standard deviation of each channel, by which the pixels are divided.
        interpolation: How pixels are resampled.
        crop_fraction: Share of the resized image's side that the crop keeps; above 1 adds a black border.
        channels: 3 for RGB, 1 for greyscale.
        crop: `"center"` resizes the short side to size / crop_fraction and crops the centre; `"squash"` resizes both
            sides, changing the aspect ratio; `"border"` resizes the long side and pads with the mean colour.

    Example:
        >>> preprocessing = Preprocessing((2, 2), mean=(0.5,) * 3, std=(0.5,) * 3)
        >>> preprocessing(Image.new("L", (4, 6), 255)).shape
        torch.Size([3, 2, 2])
    """

    size: tuple[int, int] | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: Interpolation = "bilinear"
    crop_fraction: float = 1.0
    channels: int = 3
    crop: Crop = "center"

    def __post_init__(self) -> None:
        if self.channels not in (1, 3) or isinstance(self.channels, bool):
            raise InputError(f"Expected `channels` to be 1 (greyscale) or 3 (RGB), but got {self.channels!r}.")
        # JSON and the command line give lists of ints; equal settings must compare equal.
        object.__setattr__(self, "size", _checked_size(self.size))
        object.__setattr__(self, "mean", _checked_numbers("mean", self.mean, self.channels))
        object.__setattr__(self, "std", _checked_numbers("std", self.std, self.channels))
        if min(self.std) <= 0:
            raise InputError(f"Expected every `std` to be above 0, but got {list(self.std)}.")
        if not _is_number(self.crop_fraction) or not 0.05 <= self.crop_fraction <= 2:
            raise InputError(f"Expected `crop_fraction` to be between 0.05 and 2, but got {self.crop_fraction!r}.")
        for name, value, choices in (
            ("interpolation", self.interpolation, get_args(Interpolation)),
            ("crop", self.crop, get_args(Crop)),
        ):
            if value not in choices:
                raise InputError(f"Expected `{name}` to be one of {list(choices)}, but got {value!r}.")

    def example(self) -> Tensor | None:
        """Return an arbitrary input of the model's shape, (1, C, H, W); None if its size is unknown."""
        import torch

        if self.size is None:
            return None
        # Not zeros, as a model may divide by the deviation of its input.
        return torch.rand(1, self.channels, *self.size, generator=torch.Generator().manual_seed(0))

    def __call__(self, image: Image.Image) -> Tensor:
        """The model's input for one image of any mode and size, shape (C, H, W)."""
        return self.normalise(self.pixels(image)[None])[0]

    def apply_array(self, images: Pixels) -> Tensor:
        """The model's input for uint8 images (N, H, W, C) with 1, 3 or 4 channels, shape (N, C, H', W')."""
        return self.normalise(self.array_pixels(images))

    def pixels(self, image: Image.Image) -> Pixels:
        """One image of any mode and size as uint8 (H, W, C), resized and cropped if `size` is set."""
        image = as_8bit(image, self.channels)
        if self.size is not None:
            image = self._fit(image, self.size)
        array = np.asarray(image)
        return array[:, :, None] if self.channels == 1 else array

    def array_pixels(self, images: Pixels) -> Pixels:
        """Images (N, H, W, C) as uint8 (N, H', W', channels): `pixels` of each image, fast if nothing changes."""
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3, 4):
            raise InputError(
                "Expected images as uint8 with shape (N, H, W, C) and 1, 3 or 4 channels, "
                f"but got {images.dtype} with shape {images.shape}."
            )
        height, width, channels = images.shape[1:]
        if self.keeps((height, width, channels)):
            return images
        if len(images) == 0:
            return np.empty((0, *(self.size or (height, width)), self.channels), np.uint8)
        rows = (np.ascontiguousarray(row[:, :, 0] if channels == 1 else row) for row in images)
        return np.stack([self.pixels(Image.fromarray(row)) for row in rows])

    def keeps(self, shape: tuple[int, int, int]) -> bool:
        """Whether images of this height, width and number of channels need no resizing or cropping."""
        height, width, channels = shape
        size = self.size or (height, width)
        return channels == self.channels and self._resized((height, width)) == (height, width) == size

    def normalise(self, pixels: Pixels) -> Tensor:
        """Pixels (N, H, W, C) as float32 (N, C, H, W): (pixel / 255 - mean) / std, in this order, as torchvision does."""
        import torch

        # Torch warns about read-only memory, such as a memory-mapped file.
        batch = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy())
        # Contiguous, as convolutions choose their algorithm, and so their rounding, by the memory layout.
        tensor = batch.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format).div_(255.0)
        mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.std))
        return tensor.sub_(mean).div_(std)

    def place_boxes(self, boxes: Tensor, shape: tuple[int, int]) -> Tensor:
        """Return where boxes (M, 4) of x0, y0, x1, y1 in an image of this height and width lie in the model's input.

        Example:
            >>> import torch
            >>> preprocessing = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)
            >>> preprocessing.place_boxes(torch.tensor([[8.0, 0.0, 16.0, 16.0]]), (16, 24)).tolist()
            [[2.0, 0.0, 6.0, 8.0]]
        """
        if self.size is None:
            return boxes
        resized = self._resized(shape)
        starts = []
        for old, new, side in zip(shape, resized, self.size, strict=True):
            canvas = max(new, side)
            # As in `_fit`: first placed on the canvas, then cropped.
            starts.append(((canvas - new) // 2 - round((canvas - side) / 2), new / old))
        (top, high), (left, wide) = starts
        return boxes * boxes.new_tensor([wide, high, wide, high]) + boxes.new_tensor([left, top, left, top])

    def to_json(self) -> dict[str, Any]:
        """Every setting as JSON values, for `from_json`."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Preprocessing:
        """Create from the result of `to_json`, rejecting unknown keys and values out of range."""
        allowed = [field.name for field in fields(cls)]
        if not isinstance(raw, Mapping) or not {"size", "mean", "std"} <= set(raw) <= set(allowed):
            got = sorted(map(str, raw)) if isinstance(raw, Mapping) else raw
            raise InputError(
                f"Expected preprocessing to have size, mean, std and only the keys {allowed}, but got {got}."
            )
        return cls(**raw)

    @classmethod
    def for_timm(cls, model: nn.Module | str) -> Preprocessing:
        """Return timm's evaluation preprocessing of a model or model name; nothing is downloaded."""
        config = timm_config(model) if isinstance(model, str) else getattr(model, "pretrained_cfg", None)
        if config is None:
            name = repr(model) if isinstance(model, str) else type(model).__name__
            raise InputError(f"Expected a timm model with a `pretrained_cfg`, but got {name}. Give mean, std and size.")
        config = config if isinstance(config, Mapping) else vars(config)
        channels, height, width = config["input_size"]
        return cls(
            size=(height, width),
            mean=_per_channel(config["mean"], channels),
            std=_per_channel(config["std"], channels),
            interpolation=config.get("interpolation") or "bicubic",
            crop_fraction=config.get("crop_pct") or 0.875,
            channels=channels,
            crop=config.get("crop_mode") or "center",
        )

    @classmethod
    def for_torchvision(cls, name: str) -> Preprocessing:
        """Return torchvision's evaluation preprocessing of the default weights of `name`; nothing is downloaded."""
        models = import_quietly("torchvision.models", "torchvision")
        try:
            weights = models.get_model_weights(name).DEFAULT
        except (ValueError, AttributeError):
            raise InputError(
                f"Expected the name of a torchvision model with published weights, but got {name!r}. Give mean, std and size."
            ) from None
        transform = weights.transforms()
        # Detection, segmentation and video models have other presets, some with fields of the same names.
        if type(transform).__name__ != "ImageClassification":
            raise InputError(
                f"Expected a torchvision model that classifies images, but got {name!r}. Give mean, std and size."
            )
        crop, resize = transform.crop_size[0], transform.resize_size[0]
        interpolation = transform.interpolation.value
        return cls(
            (crop, crop), tuple(transform.mean), tuple(transform.std), interpolation, crop_fraction=crop / resize
        )

    def _resized(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Height and width to resize an image of this height and width to, before the crop."""
        if self.size is None:
            return shape
        # The small number corrects the rounding of crop / resize: 224 / (224 / 232) must be 232.
        target = tuple(math.floor(side / self.crop_fraction + 1e-6) for side in self.size)
        height, width = shape
        if self.crop == "squash":
            return target[0], target[1]
        if self.crop == "center" and target[0] == target[1]:
            short = min(shape)
            return (
                (target[0], int(target[0] * width / short))
                if height <= width
                else (int(target[0] * height / short), target[0])
            )
        ratios = (height / target[0], width / target[1])
        ratio = min(ratios) if self.crop == "center" else max(ratios)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def _fit(self, image: Image.Image, size: tuple[int, int]) -> Image.Image:
        shape = (image.height, image.width)
        resized = self._resized(shape)
        if resized[0] * resized[1] > MAX_RESIZED_PIXELS:
            raise InputError(f"Expected an image that is not all edge, but got {image.width} x {image.height} pixels.")
        if resized != shape:
            image = image.resize((resized[1], resized[0]), _RESAMPLING[self.interpolation])
        if resized == size:
            return image
        if resized[0] < size[0] or resized[1] < size[1]:
            fill = [round(255 * value) if self.crop == "border" else 0 for value in self.mean]
            sides = max(size[1], resized[1]), max(size[0], resized[0])
            canvas = Image.new(image.mode, sides, tuple(fill) if self.channels == 3 else fill[0])
            canvas.paste(image, ((canvas.width - image.width) // 2, (canvas.height - image.height) // 2))
            image = canvas
        top, left = round((image.height - size[0]) / 2), round((image.width - size[1]) / 2)
        return image.crop((left, top, left + size[1], top + size[0]))


def as_8bit(image: Image.Image, channels: int = 3) -> Image.Image:
    """Convert any image to 8-bit RGB, or greyscale if `channels` is 1.

    Transparent parts become white. 16-bit values are scaled by 1 / 257 and rounded, floats are expected in [0, 1];
    values outside these ranges are rejected, as they have no agreed meaning.
    """
    target = "RGB" if channels == 3 else "L"
    if image.mode.startswith("I"):
        image = _from_integers(image)
    elif image.mode == "F":
        image = _from_floats(image)
    if image.has_transparency_data:
        paper = Image.new("RGBA", image.size, _WHITE)
        paper.alpha_composite(image.convert("RGBA"))
        image = paper
    if image.mode == target:
        return image
    try:
        return image.convert(target)
    except ValueError as error:
        raise InputError(f"Expected an image that can be shown as {target}, but got mode {image.mode!r}.") from error


def _from_integers(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65_535:
        raise InputError(
            "Expected integer pixels between 0 and 65535 (16 bits), "
            f"but got values from {values.min()} to {values.max()}. Convert the image to 8 or 16 bits."
        )
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _from_floats(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
        raise InputError(
            "Expected floating-point pixels between 0 and 1, but got others. Convert the image to 8 or 16 bits."
        )
    return Image.fromarray(np.rint(values * 255).astype(np.uint8))


def timm_config(name: str) -> Any:
    """Return timm's pretrained configuration of a model, or None if there is none."""
    return import_quietly("timm", "timm").get_pretrained_cfg(name)


def import_quietly(module: str, package: str) -> Any:
    """Import an optional package, without the warnings about codecs that torchvision emits at import."""
    import importlib
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            # A timm without requests must not be reported as a missing timm.
            missing = (error.name or module).partition(".")[0]
            reason = "it is not" if missing == package else f"it needs {missing!r}, which is not"
            raise MissingExtraError(
                f"Expected {package!r} to be installed, but {reason}. Install it with `pip install {missing}`."
            ) from error
        except ImportError as error:
            raise MissingExtraError(
                f"Expected {package!r} to be installed, but it cannot be imported: {error}. "
                f"Install it with `pip install {package}`."
            ) from error


def _checked_size(size: Any) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = tuple(size) if isinstance(size, Sequence) else ()
    if len(pair) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_SIDE for n in pair):
        raise InputError(f"Expected `size` to be None or a height and a width from 1 to {MAX_SIDE}, but got {size!r}.")
    return pair[0], pair[1]


def _checked_numbers(name: str, values: Any, channels: int) -> tuple[float, ...]:
    numbers = tuple(values) if isinstance(values, Sequence) and not isinstance(values, str) else ()
    if len(numbers) != channels or not all(_is_number(n) and abs(n) <= 1000 for n in numbers):
        raise InputError(
            f"Expected `{name}` to be {channels} finite number(s), one for each channel, but got {values!r}."
        )
    return tuple(map(float, numbers))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
