"""The paper's four protocols, which say what a method may learn from, and the separation of fit and test images.

A method's `fit` takes `FitSet`s only, and a `FitSet` cannot be made from test images: a set whose split is `"test"` is
rejected, and images that also occur in a test set (CIFAR has a few) are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from neuralmean.bench.data.imageset import ImageSet
from neuralmean.data.augmentation import permute_blocks
from neuralmean.errors import InputError

Protocol = Literal["full-access", "few-shot", "zero-shot", "transfer", "id-only"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)

SHOTS = 25  # of each kind, the paper's few-shot protocol
DRAWS = 10
FIT_SHARE = 0.2  # of a set without a train split
_SHARED_AT_MOST = 0.1

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class FitSet:
    """Images that a method may learn from: rows of a set, none of them a test image.

    Create one with `FitSet.of`. `source` is the whole set, whose features are computed once; `rows` are the rows in
    use.
    """

    source: ImageSet
    rows: Indices

    def __post_init__(self) -> None:
        if self.source.split == "test":
            raise InputError(
                f"Expected images to fit on, but got the test split of {self.source.name!r}. "
                "Test images must not be fitted on. Pass the train split, or `split_off` a part of a set without one."
            )

    @classmethod
    def of(cls, images: ImageSet, *, apart_from: Iterable[EvalSet]) -> FitSet:
        """Return the images of a train set that occur in none of the test sets.

        Args:
            images: The set.
            apart_from: Every test set.

        Raises:
            InputError: The set is a test set, or shares more than a tenth of its images with one.
        """
        judged: set[bytes] = set()
        for other in apart_from:
            judged |= set(other.image_digests())
        kept = np.array([i for i, digest in enumerate(_image_digests(images)) if digest not in judged], np.int64)
        shared = len(images) - len(kept)
        if shared > _SHARED_AT_MOST * len(images):
            raise InputError(
                f"Expected {images.name!r} ({images.split}) to be apart from the test images, but {shared} of its "
                f"{len(images)} images are test images too. Check that train and test files are not the same."
            )
        return cls(images, kept)

    @property
    def name(self) -> str:
        """Name of the set."""
        return self.source.name

    def __len__(self) -> int:
        return len(self.rows)

    def draw(self, count: int, *, seed: int) -> FitSet:
        """Return `count` of the images, drawn without replacement."""
        if not 1 <= count <= len(self):
            raise InputError(f"Expected to draw between 1 and {len(self)} images of {self.name!r}, but got {count!r}.")
        chosen = np.random.default_rng(seed).permutation(len(self))[:count]
        return FitSet(self.source, self.rows[np.sort(chosen)])

    def crafted(self, *, seed: int = 0, blocks: int = 4) -> FitSet:
        """Return the same images with their `blocks` x `blocks` tiles permuted: the paper's substitute for OOD examples."""
        return FitSet(_craft(self.source, seed, blocks), self.rows)

    def digest(self) -> str:
        """Digest of the images in use."""
        return hashlib.sha256(self.source.digest.encode() + self.rows.tobytes()).hexdigest()


@dataclass(frozen=True)
class EvalSet:
    """Test images."""

    source: ImageSet

    @property
    def name(self) -> str:
        """Name of the set."""
        return self.source.name

    def __len__(self) -> int:
        return len(self.source)

    def digest(self) -> str:
        """Digest of the images."""
        return self.source.digest

    def image_digests(self) -> list[bytes]:
        """Digest of each image."""
        return _image_digests(self.source)


@dataclass(frozen=True)
class Draw:
    """The data of one fit: in-distribution images and, if the protocol provides them, OOD images."""

    protocol: Protocol
    inliers: FitSet
    outliers: FitSet | None
    seed: int


def split_off(images: ImageSet, *, share: float = FIT_SHARE, seed: int = 0) -> tuple[ImageSet, ImageSet]:
    """Split a set without a train split in two: a part to fit on (`split` "fit") and the rest to test on.

    The ODIN sets (LSUN, iSUN, ImageNet) and Textures have a single split. A random 20 % of it, the same for every run,
    serves as the train set; the rest is the test set of every protocol, so that figures are comparable.
    """
    count = round(share * len(images))
    if not 1 <= count < len(images):
        raise InputError(
            f"Expected at least {round(1 / share)} images to split, but {images.name!r} has {len(images)}."
        )
    order = np.random.default_rng(seed).permutation(len(images))
    fit, rest = (images.take(np.sort(part)) for part in (order[:count], order[count:]))
    return replace(fit, split="fit"), replace(rest, split="test")


def full_access(inliers: FitSet, outliers: FitSet, *, seed: int = 0) -> list[Draw]:
    """Fit on the OOD set's own train images too."""
    return [Draw("full-access", inliers, outliers, seed)]


def few_shot(inliers: FitSet, outliers: FitSet, *, shots: int = SHOTS, draws: int = DRAWS, seed: int = 0) -> list[Draw]:
    """Fit on `shots` ID and `shots` OOD images, in several draws.

    Different seeds share no draw.
    """
    if draws < 1:
        raise InputError(f"Expected `draws` to be at least 1, but got {draws!r}.")
    seeds = range(seed * draws, (seed + 1) * draws)
    return [Draw("few-shot", inliers.draw(shots, seed=s), outliers.draw(shots, seed=s), s) for s in seeds]


def with_inliers(draws: Sequence[Draw], inliers: FitSet, count: int) -> list[Draw]:
    """Return the same draws extended to `count` ID images each, or to all images if there are fewer."""
    count = min(count, len(inliers))
    return [replace(draw, inliers=inliers.draw(count, seed=draw.seed)) for draw in draws]


def zero_shot(inliers: FitSet, *, seed: int = 0) -> list[Draw]:
    """Fit on ID images only; methods that need OOD images get ID images with their blocks permuted."""
    return [Draw("zero-shot", inliers, inliers.crafted(seed=seed), seed)]


def id_only(inliers: FitSet, *, seed: int = 0) -> list[Draw]:
    """Fit on ID images only, without crafted ones; methods tuned on OOD images use their authors' default values."""
    return [Draw("id-only", inliers, None, seed)]


def transfer(inliers: FitSet, outliers: FitSet, *, tested_on: Sequence[str], seed: int = 0) -> list[Draw]:
    """Fit on images of one OOD set and test on others."""
    if outliers.name in tested_on:
        raise InputError(
            f"Expected to test on sets that the fit has not seen, but got {outliers.name!r} for both sides. "
            "Leave it out, or use the full-access protocol."
        )
    return [Draw("transfer", inliers, outliers, seed)]


def _craft(images: ImageSet, seed: int, blocks: int) -> ImageSet:
    pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2)
    shuffled = permute_blocks(pixels, blocks=blocks, seed=seed).permute(0, 2, 3, 1).contiguous().numpy()
    return ImageSet.of(shuffled, images.labels, name=f"{images.name}-crafted", split=images.split)


def _image_digests(images: ImageSet) -> list[bytes]:
    flat = images.images.reshape(len(images), -1)
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in flat]
