"""The models and images that the benchmarks run on: the benchmark's architectures, real weights and images if there are."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from neuralmean.bench import models

NAMES = ("resnet34", "densenet100", "resnet56", "vgg19", "vit")
SHAPE = (3, 32, 32)


def build(name: str) -> nn.Module:
    """Return a model in evaluation mode, with real CIFAR-10 weights where NEURALMEAN_WEIGHTS has them."""
    trained = load_trained(name)
    if trained is not None:
        return trained.model.eval()
    torch.manual_seed(0)
    model = models.build(name)
    with torch.no_grad():
        model.train()
        model(images(16))  # running statistics unlike those of a fresh model
    return model.eval()


def load_trained(name: str) -> models.TrainedModel | None:
    """Return the CIFAR-10 model if its weights are there."""
    folder = os.environ.get("NEURALMEAN_WEIGHTS")
    path = Path(folder or ".") / f"{name}-cifar10.safetensors"
    return models.load(name, path) if folder and path.is_file() else None


def load_or_shape(name: str) -> models.TrainedModel | None:
    """Return the CIFAR-10 model, or one of its shape with random weights, whose norm layers have seen CIFAR-10.

    Costs are those of the trained model, and even random features tell far sets apart. None without NEURALMEAN_DATA.
    """
    trained = load_trained(name)
    if trained is not None:
        return trained
    shaped = models.TrainedModel(build(name), name, 10, mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    seen = real_images(shaped, "cifar10-train", 1000)
    if seen is None:
        return None
    for module in shaped.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the mean over all batches
    with torch.no_grad():
        shaped.model.train()
        for batch in torch.split(seen[0], 100):
            shaped.model(batch)
    shaped.model.eval()
    return shaped


def images(n: int, *, seed: int = 0) -> Tensor:
    """Return noise of the shape of CIFAR images: for timing, what is on them does not matter."""
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


def real_images(trained: models.TrainedModel, name: str, n: int) -> tuple[Tensor, Tensor] | None:
    """Return the first of a seeded order of the images in NEURALMEAN_DATA, prepared for a model, and their labels."""
    folder = os.environ.get("NEURALMEAN_DATA")
    if not folder or not (Path(folder) / f"{name}.npz").is_file():
        return None
    images, labels = _read(Path(folder) / f"{name}.npz", n)
    return trained.preprocess(images), torch.from_numpy(labels.astype(np.int64))


def raw_images(name: str, n: int) -> np.ndarray:
    """Return the same images as they are, (N, H, W, 3) uint8."""
    return _read(Path(os.environ.get("NEURALMEAN_DATA", ".")) / f"{name}.npz", n)[0]


def photos(folder: Path, n: int | None = None) -> tuple[np.ndarray, Tensor]:
    """Return the first of a seeded order of the photos of a folder, and their labels, which end their names."""
    files = sorted(folder.iterdir())
    chosen = [files[index] for index in np.random.default_rng(0).permutation(len(files))[:n]]
    images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in chosen])
    return images, torch.tensor([int(file.stem.split("_")[-1]) for file in chosen])


def _read(path: Path, n: int) -> tuple[np.ndarray, np.ndarray]:
    with np.load(path) as content:
        order = np.random.default_rng(0).permutation(len(content["images"]))[:n]
        labels = content["labels"][order] if "labels" in content else np.zeros(len(order))
        return content["images"][order], labels
