"""Outputs and accuracy of a trained model on a set of images."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from neuralmean.bench.models.trained import TrainedModel
from neuralmean.errors import InputError

BATCH = 20  # images per pass, so that activations fit in a CPU's caches (DenseNet-100: twice as fast as with 100)
# Percent on the test set, as published or measured by the authors of the weights, by (source, architecture, data set).
_PUBLISHED = {
    ("akamaster/pytorch_resnet_cifar10", "resnet20", "CIFAR-10"): 91.73,
    ("akamaster/pytorch_resnet_cifar10", "resnet32", "CIFAR-10"): 92.63,
    ("akamaster/pytorch_resnet_cifar10", "resnet44", "CIFAR-10"): 93.10,
    ("akamaster/pytorch_resnet_cifar10", "resnet56", "CIFAR-10"): 93.39,
    ("deeplearning-wisc/dice", "densenet100", "CIFAR-10"): 94.54,
    ("deeplearning-wisc/dice", "densenet100", "CIFAR-100"): 73.9,
}


def outputs(
    trained: TrainedModel,
    images: npt.NDArray[np.uint8],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Run the model over images, batch by batch.

    Args:
        trained: The model; moved to `device`.
        images: Shape (N, 32, 32, 3).
        device: Where to run it.
        progress: Called with the number of images done.

    Returns:
        Logits, or features if there is no class head, shape (N, K), on the CPU.
    """
    model = trained.model.to(device)
    rows = []
    with torch.inference_mode():
        for start in range(0, len(images), BATCH):
            batch = trained.preprocess(images[start : start + BATCH])
            rows.append(model(batch.to(device)).cpu())
            if progress is not None:
                progress(min(start + BATCH, len(images)))
    return torch.cat(rows)


def accuracy(
    trained: TrainedModel,
    images: npt.NDArray[np.uint8],
    labels: npt.NDArray[np.int64],
    *,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
) -> float:
    """Percentage of images that the model classifies correctly.

    Args:
        trained: A model with a class head.
        images: Shape (N, 32, 32, 3).
        labels: Shape (N,).
        device: Where to run it.
        progress: Called with the number of images done.
    """
    if not trained.num_classes:
        raise InputError(f"Expected a model with a class head, but got {trained.name!r}, which has none.")
    if len(labels) != len(images) or len(images) == 0:
        raise InputError(f"Expected one label per image, but got {len(labels)} for {len(images)} images.")
    predicted = outputs(trained, images, device=device, progress=progress).argmax(dim=1).numpy()
    return 100 * float((predicted == labels).mean())


def expected_accuracy(trained: TrainedModel) -> float | None:
    """The model's published accuracy in percent: from its file, otherwise from its authors, otherwise None.

    For an encoder without classes, the accuracy of a linear probe.
    """
    said = trained.metadata.get("accuracy") or trained.metadata.get("linear_accuracy")
    if said is not None:
        try:
            return 100 * float(said)
        except ValueError:
            return None
    return _PUBLISHED.get((trained.metadata.get("source", ""), trained.name, trained.metadata.get("dataset", "")))
