"""Small pictures for the page, as data URIs."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from neuralmean.data.images import Unreadable, read_image
from neuralmean.data.preprocessing import Preprocessing, as_8bit
from neuralmean.errors import InputError
from neuralmean.report.gather import Pictured

SIDE = 96


def thumbnail(picture: Pictured, preprocessing: Preprocessing | None) -> str | None:
    """Return a picture of at most 96 x 96 pixels as a data URI; None if the input is not an image.

    The file is read again if there is one, because it shows more than the model's input; otherwise the model's input
    is shown, with its normalisation undone if `preprocessing` is known.
    """
    image = _from_file(picture.name)
    if image is None and picture.image is not None:
        image = from_tensor(picture.image, preprocessing)
    if image is None:
        return None
    image.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    # Small images are enlarged on the page and must keep every pixel.
    return encode(image, "PNG" if max(image.size) <= 32 else "JPEG")


def _from_file(name: str | None) -> Image.Image | None:
    if name is None or not Path(name).is_file():
        return None
    image = read_image(name)
    try:
        return None if isinstance(image, Unreadable) else as_8bit(image)
    except InputError:
        return None


def from_tensor(tensor: Tensor, preprocessing: Preprocessing | None) -> Image.Image | None:
    """Return the model's input (C, H, W) as a picture, its normalisation undone if known; None if it is not an image."""
    if tensor.dim() != 3 or tensor.shape[0] not in (1, 3) or not tensor.is_floating_point():
        return None
    values = tensor.float()
    if preprocessing is not None and preprocessing.channels == len(values):
        mean, std = (torch.tensor(numbers).view(-1, 1, 1) for numbers in (preprocessing.mean, preprocessing.std))
        values = values * std + mean
    elif values.min() < 0 or values.max() > 1:  # unknown normalisation: at least show the shapes
        values = (values - values.min()) / (values.max() - values.min()).clamp_min(1e-12)
    pixels = (values.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0]) if pixels.shape[2] == 1 else pixels)


def encode(image: Image.Image, kind: str) -> str:
    """Return a picture as a data URI, kind "PNG" or "JPEG"."""
    data = io.BytesIO()
    image.save(data, kind, **({"quality": 82} if kind == "JPEG" else {"optimize": True}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"
