"""A set of images in memory: pixels, labels, name, split and digest.

Also resizes images to 32 x 32. All sets are resized here, so that ID and OOD images differ only in content. Resizing to
a model's input size and normalisation happen in `models.trained`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError

SIZE = 32
Fit = Literal["resize", "crop", "keep"]


@dataclass(frozen=True, eq=False)
class ImageSet:
    """Images (N, H, W, 3) uint8 with optional labels (N,) int64.

    `digest` covers pixels and labels: two sets with the same digest hold the same images in the same order. Compare
        digests, as `==` compares identity.
    """

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64] | None
    name: str
    split: str
    digest: str

    @classmethod
    def of(
        cls, images: npt.NDArray[np.uint8], labels: npt.NDArray[np.integer] | None, *, name: str, split: str
    ) -> ImageSet:
        """Check the arrays and compute their digest."""
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
            raise InputError(
                f"Expected {name!r} to be uint8 images of shape (N, H, W, 3), but got {images.dtype} {images.shape}."
            )
        if labels is not None and (labels.shape != (len(images),) or labels.dtype.kind not in "iu"):
            raise InputError(
                f"Expected one whole number per image as labels of {name!r}, but got {labels.dtype} {labels.shape}."
            )
        images = np.ascontiguousarray(images)
        whole = None if labels is None else labels.astype(np.int64)
        return cls(images, whole, name, split, _digest(images, whole))

    def __len__(self) -> int:
        return len(self.images)

    def take(self, rows: npt.NDArray[np.integer] | slice) -> ImageSet:
        """Return some rows as a set, in the given order."""
        labels = None if self.labels is None else self.labels[rows]
        return ImageSet.of(self.images[rows], labels, name=self.name, split=self.split)

    def limit(self, n: int, *, seed: int = 0) -> ImageSet:
        """Return `n` images drawn without replacement, in their original order, or all of them if there are no more.

        Not the first ones, as some copies of the sets are ordered by class.
        """
        if n < 1:
            raise InputError(f"Expected `n` to be at least 1, but got {n!r}.")
        if n >= len(self):
            return self
        return self.take(np.sort(np.random.default_rng(seed).permutation(len(self))[:n]))


def _digest(images: npt.NDArray[np.uint8], labels: npt.NDArray[np.int64] | None) -> str:
    digest = hashlib.sha256(repr(images.shape).encode())
    digest.update(images.data)
    if labels is not None:
        digest.update(labels.astype("<i8").tobytes())
    return digest.hexdigest()


def fit_image(image: Image.Image, fit: Fit | Preprocessing) -> npt.NDArray[np.uint8]:
    """Convert one picture to RGB (32, 32, 3), scaled or centre-cropped.

    Args:
        image: Any picture.
        fit: `"resize"` scales the shorter side to 32 (bilinear, like torchvision's `Resize`) and crops the centre;
            `"crop"` crops the centre of the unscaled picture, and scales only smaller ones; `"keep"` keeps the size,
            which `Preprocessing` changes to what a model expects.
    """
    if isinstance(fit, Preprocessing):
        return fit.pixels(image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    width, height = image.size
    if fit != "keep" and (width, height) != (SIZE, SIZE):
        shorter = min(width, height)
        if fit == "resize" or shorter < SIZE:
            # Rounded down, but at least 32, as in torchvision.
            width, height = (max(SIZE, SIZE * side // shorter) for side in (width, height))
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
        image = image.crop((left, top, left + SIZE, top + SIZE))
    return np.asarray(image, dtype=np.uint8)


def fit_images(images: npt.NDArray[np.uint8], fit: Fit | Preprocessing) -> npt.NDArray[np.uint8]:
    """Convert images (N, H, W, 3) to (N, 32, 32, 3), unless `fit` says to keep their size."""
    if fit == "keep" or isinstance(fit, Preprocessing) or images.shape[1:3] == (SIZE, SIZE):
        return images
    return np.stack([fit_image(Image.fromarray(image), fit) for image in images])
