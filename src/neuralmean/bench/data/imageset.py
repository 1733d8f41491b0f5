"""What a set of images is, once read: pixels, labels, name, split, and a digest of it all.

Also how images of other sizes become 32 x 32. Every set goes through this file, so ID and OOD images differ in nothing but
what they show. Resizing to a model's own input size and normalisation happen in `models.trained`.
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
    """Images (N, H, W, 3) uint8 with their labels (N,) int64, where there are any.

    `digest` covers pixels and labels: two sets with the same digest hold the same images in the same order. Compare it;
    the sets themselves are equal only to themselves.
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
        """Check the arrays and take their digest."""
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
        """Return the set of some of the rows, in the given order."""
        labels = None if self.labels is None else self.labels[rows]
        return ImageSet.of(self.images[rows], labels, name=self.name, split=self.split)

    def limit(self, n: int, *, seed: int = 0) -> ImageSet:
        """Return `n` images drawn without replacement, in their old order; all of them where there are no more.

        Drawn, not the first ones: some copies of the sets are ordered by class.
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
    """Turn one picture into (32, 32, 3): RGB, scaled or cropped to the centre.

    Args:
        image: Any picture.
        fit: `"resize"` scales the shorter side to 32 (bilinear, as torchvision's `Resize` on pictures does) and cuts
            out the centre; `"crop"` cuts the centre out of the unscaled picture, and scales only one that is smaller;
            `"keep"` leaves the size alone. `Preprocessing` makes it what a model expects.
    """
    if isinstance(fit, Preprocessing):
        return fit.pixels(image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    width, height = image.size
    if fit != "keep" and (width, height) != (SIZE, SIZE):
        shorter = min(width, height)
        if fit == "resize" or shorter < SIZE:
            # Whole numbers, rounded down, never below 32: as torchvision rounds.
            width, height = (max(SIZE, SIZE * side // shorter) for side in (width, height))
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
        image = image.crop((left, top, left + SIZE, top + SIZE))
    return np.asarray(image, dtype=np.uint8)


def fit_images(images: npt.NDArray[np.uint8], fit: Fit | Preprocessing) -> npt.NDArray[np.uint8]:
    """Turn images (N, H, W, 3) into (N, 32, 32, 3); arrays for larger models, or to be kept, stay as they are."""
    if fit == "keep" or isinstance(fit, Preprocessing) or images.shape[1:3] == (SIZE, SIZE):
        return images
    return np.stack([fit_image(Image.fromarray(image), fit) for image in images])
