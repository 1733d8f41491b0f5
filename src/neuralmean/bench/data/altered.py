"""Photos altered beyond any training data: edge sketches, strong blur, strong noise.

These OOD sets need no download: the experiment `imagenet` makes them from its in-distribution test photos, so that only
the appearance changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from neuralmean.bench.data.imageset import ImageSet

Pixels = npt.NDArray[np.uint8]
BLUR_SHARE = 8 / 224  # radius of the Gaussian, as a share of the image's height
NOISE = (
    0.38  # standard deviation for pixels in [0, 1]: severity 5 of the corruption benchmark of Hendrycks & Dietterich
)


def sketch(image: Pixels, rng: np.random.Generator) -> Pixels:
    """Return the edges of an image (H, W, 3) as dark lines on white paper."""
    grey = Image.fromarray(image).convert("L").filter(ImageFilter.GaussianBlur(1))
    down, right = np.gradient(np.asarray(grey, np.float64))
    strength = np.hypot(down, right)
    scale = max(float(np.quantile(strength, 0.98)), 1e-6)
    lines = 255 * (1 - np.clip(strength / scale, 0, 1))
    return np.repeat(np.rint(lines).astype(np.uint8)[..., None], 3, axis=2)


def blur(image: Pixels, rng: np.random.Generator) -> Pixels:
    """Return an image (H, W, 3) blurred to blobs of colour."""
    radius = BLUR_SHARE * image.shape[0]
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(radius)))


def noise(image: Pixels, rng: np.random.Generator) -> Pixels:
    """Return an image (H, W, 3) with Gaussian noise on every pixel."""
    noisy = image / 255 + rng.normal(0, NOISE, image.shape)
    return np.rint(255 * np.clip(noisy, 0, 1)).astype(np.uint8)


ALTERATIONS: dict[str, Callable[[Pixels, np.random.Generator], Pixels]] = {
    "photo-sketch": sketch,
    "photo-blur": blur,
    "photo-noise": noise,
}


def alter(photos: ImageSet, name: str, *, seed: int = 0) -> ImageSet:
    """Return a set of altered photos.

    Args:
        photos: The photos.
        name: One of `ALTERATIONS`.
        seed: Seed of the noise.
    """
    rng = np.random.default_rng(seed)
    change = ALTERATIONS[name]
    return ImageSet.of(
        np.stack([change(image, rng) for image in photos.images]), None, name=name, split=photos.split
    )  # fmt: skip
