"""The interface of methods, which learn from the data of a protocol and then score sets of images; higher = more OOD.

A method declares what it reads. It gets sets as `View`s, which raise on anything else, so the declaration cannot be
wrong. Channel means, logits and features come from one cached forward pass per image; a method that needs gradients or
other passes gets the model and the pixels. Methods neither measure nor cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from neuralmean.bench.baselines.measure import Meter
from neuralmean.bench.data.imageset import ImageSet
from neuralmean.bench.features import Features
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.models.evaluate import BATCH
from neuralmean.errors import InputError
from neuralmean.models.layers import Layer

Read = Literal["means", "variances", "logits", "feature", "labels", "images"]


class Reader(Protocol):
    """Source of a view's features: the cache, or a forward pass."""

    def __call__(self, images: ImageSet, *, variance: bool) -> Features:
        """Return the features of all of `images`."""


class View:
    """A method's view of a set of images, limited to what the method declares in `reads`.

    Args:
        trained: The model.
        images: The set that the images belong to.
        rows: The images in use; None for all.
        reads: What the method declares to read.
        reader: The source of the features.
        meter: Counts the forward passes.
    """

    def __init__(
        self,
        trained: TrainedModel,
        images: ImageSet,
        rows: npt.NDArray[np.int64] | None,
        *,
        reads: frozenset[Read],
        reader: Reader,
        meter: Meter,
    ) -> None:
        self._trained, self._images, self._rows = trained, images, rows
        self._reads, self._reader, self._meter = reads, reader, meter
        self._features: Features | None = None

    def __len__(self) -> int:
        return len(self._images) if self._rows is None else len(self._rows)

    @property
    def means(self) -> Tensor:
        """Channel means, shape (N, D)."""
        self._check("means")
        return self._pick(self._read().means)

    @property
    def variances(self) -> Tensor:
        """Channel variances, shape (N, D)."""
        self._check("variances")
        return self._pick(self._there(self._read().variances, "variances"))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers that the columns of `means` and `variances` belong to."""
        self._check("means")
        return self._read().layers

    @property
    def logits(self) -> Tensor:
        """The model's logits, shape (N, K)."""
        self._check("logits")
        return self._pick(self._there(self._read().logits, "logits"))

    @property
    def feature(self) -> Tensor:
        """The input of the model's last linear layer, shape (N, F)."""
        self._check("feature")
        return self._pick(self._there(self._read().feature, "feature"))

    @property
    def labels(self) -> Tensor:
        """Class of each image, shape (N,)."""
        self._check("labels")
        if self._images.labels is None:
            raise InputError(f"Expected the set {self._images.name!r} to have labels, but it has none.")
        return self._pick(torch.from_numpy(self._images.labels))

    @property
    def pixels(self) -> npt.NDArray[np.uint8]:
        """The images as they are, uint8, shape (N, H, W, 3)."""
        self._check("images")
        return self._images.images if self._rows is None else self._images.images[self._rows]

    def take(self, rows: npt.NDArray[np.int64]) -> View:
        """Return a view of some of the images, in the given order; reading it costs no more than these images."""
        chosen = rows if self._rows is None else self._rows[rows]
        part = View(self._trained, self._images, chosen, reads=self._reads, reader=self._reader, meter=self._meter)
        part._features = self._features  # so that passes are counted once
        return part

    def batches(self, size: int = BATCH) -> Iterator[Tensor]:
        """Yield the images as the model expects them, shape (size, 3, H, W), on the model's device."""
        pixels = self.pixels
        device = next((parameter.device for parameter in self._trained.model.parameters()), torch.device("cpu"))
        for start in range(0, len(pixels), size):
            yield self._trained.preprocess(pixels[start : start + size]).to(device)

    def _read(self) -> Features:
        if self._features is None:
            with self._meter.reading():
                self._features = self._reader(self._images, variance="variances" in self._reads)
            self._meter.count_cached(len(self), self._features.seconds * len(self) / len(self._features))
        return self._features

    def _pick(self, values: Tensor) -> Tensor:
        return values if self._rows is None else values[torch.from_numpy(self._rows)]

    def _check(self, what: Read) -> None:
        if what not in self._reads:
            raise InputError(
                f"Expected a method to read only what it declares ({sorted(self._reads)}), but it reads {what!r}. "
                f"Add {what!r} to its `reads`."
            )

    def _there(self, values: Tensor | None, what: str) -> Tensor:
        if values is None:
            raise InputError(
                f"Expected {self._trained.name!r} to have a class head, but it has none, and so no {what}. "
                "Use a method that needs none."
            )
        return values


@dataclass(frozen=True)
class Context:
    """The data that a method learns from.

    Attributes:
        trained: The model with its preprocessing; a method that changes weights works on a copy.
        inliers: In-distribution images.
        outliers: OOD images of the protocol: real ones, or crafted ones in the zero-shot protocol; None for a method
            that uses none.
        seed: Seed of all randomness.
        scratch: A folder for the method's checkpoints during long fits; None without a cache.
    """

    trained: TrainedModel
    inliers: View
    outliers: View | None
    seed: int
    scratch: Path | None = None

    @property
    def model(self) -> nn.Module:
        """The model, in eval mode."""
        return self.trained.model


class Method:
    """Base of all methods. A subclass sets the attributes and implements `score` and, if it learns, `fit`.

    Attributes:
        name: Name in rows and on the command line.
        title: Name in tables.
        paper: The publication.
        reads: What the method reads.
        uses_inliers: Whether `fit` learns from in-distribution images.
        uses_outliers: Whether `fit` learns from, or tunes on, OOD images.
        most_inliers: Maximum number of in-distribution images that `fit` uses; None for all.
        most_outliers: Maximum number of OOD images that `fit` uses; None for all.
        few_shot_inliers: Number of in-distribution images in the few-shot protocol; None for as many as OOD images.
        uses_gradients: Whether scoring takes gradients.
        fine_tunes: Whether `fit` trains a copy of the model.
        heavy: Whether a fit takes minutes rather than seconds.
        n_terms: If not 0, `score` returns this many terms per image, (N, n_terms), instead of their sum.
        version: Increase it when scores or their cost change, so that cached ones are not used.
        defined_by: The user's class that the method runs; None if the method is that class itself.
    """

    name: str
    title: str
    paper: str
    reads: frozenset[Read] = frozenset()
    uses_inliers: bool = True
    uses_outliers: bool = False
    most_inliers: int | None = None
    most_outliers: int | None = None
    few_shot_inliers: int | None = None
    uses_gradients: bool = False
    fine_tunes: bool = False
    heavy: bool = False
    n_terms: int = 0
    version: int = 1
    defined_by: type | None = None

    def fit(self, context: Context) -> None:
        """Learn from the data of the protocol; does nothing by default."""

    def score(self, examples: View) -> Tensor:
        """Score each image, shape (N,); higher = more OOD."""
        raise NotImplementedError

    def suits(self, trained: TrainedModel) -> bool:
        """Whether the method supports the model; by default, if the model has what the method reads."""
        return trained.num_classes > 0 or not {"logits", "feature"} & self.reads

    def learns_from_inliers(self, trained: TrainedModel) -> bool:
        """Whether `fit` uses in-distribution images for this model."""
        return self.uses_inliers

    def n_used(self, trained: TrainedModel, inliers: int, outliers: int) -> tuple[int, int]:
        """Return how many of a protocol's in-distribution and OOD images `fit` uses."""
        n_id = inliers if self.most_inliers is None else min(inliers, self.most_inliers)
        n_ood = outliers if self.most_outliers is None else min(outliers, self.most_outliers)
        return n_id if self.learns_from_inliers(trained) else 0, n_ood if self.uses_outliers else 0
