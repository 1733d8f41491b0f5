"""A map of where a score comes from, laid over the image in the colours of cividis, more opaque where it contributes more.

Cividis runs from blue to yellow with steadily increasing lightness, so that it reads the same with and without colour vision
deficiency (Nunez, Anderton and Renslow, 2018).
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn.functional import avg_pool2d

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError
from neuralmean.files.atomic import write_atomically
from neuralmean.report.thumbnails import encode, from_tensor

# Nine of the 256 colours of cividis, evenly spaced.
CIVIDIS = np.array(
    [
        (0, 34, 78), (26, 56, 111), (67, 78, 108), (97, 101, 111), (125, 124, 120),
        (155, 148, 118), (188, 174, 108), (222, 201, 88), (254, 232, 56),
    ],
    dtype=np.float64,
)  # fmt: skip
_OPACITY = 0.8  # opacity of the places that contribute most
_WINDOW = 1 / 12  # share of the longer side over which a map is averaged: single pixels are hard to see
_TOP = 0.99  # share of the values below the end of the scale, which a single pixel must not set
_LEAST_SIDE = 256  # small images are enlarged, dot by dot


def overlay(image: Image.Image, map_: Tensor) -> Image.Image:
    """Return the image with a map (H, W) laid over it: transparent where a place contributes its usual share, yellow where most.

    The map is slightly smoothed; the scale runs from its median to its 99th percentile.
    """
    strength = _strength(_smooth(map_.detach().cpu().double()).numpy())
    colours = _colours(strength)
    scale = max(1, -(-_LEAST_SIDE // max(strength.shape)))
    size = (strength.shape[1] * scale, strength.shape[0] * scale)
    plain = image.convert("RGB").resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
    over = Image.fromarray(colours).resize(size, Image.Resampling.BILINEAR)
    mask = Image.fromarray((strength * _OPACITY * 255).round().astype(np.uint8)).resize(size, Image.Resampling.BILINEAR)
    return Image.composite(over, plain, mask)


def overlay_png(x: Tensor, map_: Tensor, preprocessing: Preprocessing | None) -> bytes | None:
    """Return a PNG file of the model's input (C, H, W) under its map (H, W); None if the input is not an image."""
    image = from_tensor(x.detach().cpu(), preprocessing)
    if image is None or map_.dim() != 2:
        return None
    data = io.BytesIO()
    overlay(image, map_).save(data, "PNG", optimize=True)
    return data.getvalue()


def overlay_uri(x: Tensor, map_: Tensor, preprocessing: Preprocessing | None, side: int) -> str | None:
    """Return the model's input (C, H, W) under its map (H, W) as a small JPEG data URI; None if it is not an image."""
    content = overlay_png(x, map_, preprocessing)
    if content is None:
        return None
    image = Image.open(io.BytesIO(content))
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return encode(image, "JPEG")


def write_overlay(path: Path, x: Tensor, map_: Tensor, preprocessing: Preprocessing | None) -> None:
    """Write the model's input (C, H, W) under its map (H, W) to a PNG file, whole or not at all."""
    content = overlay_png(x, map_, preprocessing)
    if content is None:
        raise InputError(f"Expected an image to draw a map over, but got an input of shape {tuple(x.shape)}.")
    with write_atomically(path) as file:
        file.write(content)


def _smooth(map_: Tensor) -> Tensor:
    """Return a map (H, W) averaged over small windows, twice."""
    side = 2 * round(_WINDOW * max(map_.shape) / 2) + 1
    for _ in range(2):
        map_ = avg_pool2d(map_[None, None], side, stride=1, padding=side // 2, count_include_pad=False)[0, 0]
    return map_


def _strength(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return values between 0, the median, and 1, the end of the scale."""
    low, high = float(np.median(values)), float(np.quantile(values, _TOP))
    high = high if high > low else float(values.max())
    strength: NDArray[np.float64] = np.clip((values - low) / max(high - low, 1e-30), 0.0, 1.0)
    return strength


def _colours(strength: NDArray[np.float64]) -> NDArray[np.uint8]:
    places = np.linspace(0, 1, len(CIVIDIS))
    return (
        np.stack([np.interp(strength, places, CIVIDIS[:, band]) for band in range(3)], axis=-1).round().astype(np.uint8)
    )
