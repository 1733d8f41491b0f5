"""Where: how often the largest value of a map lies in a patch that does not belong, its cost, and whether the parts add up.

`python -m benchmarks.locate` pastes digits (SVHN), textures and noise over a sixteenth to a quarter of in-distribution images and
compares `Detector.locate` with Grad-CAM, occlusion and the centre of the image: ResNet-56 on CIFAR-10, or with `--photos FOLDER`
(of `train` and `val`) EfficientNet-Lite0. `--textures FOLDER` has pictures of textures; the table was made with brick, grass and
gravel of scikit-image 0.19. NEURALMEAN_DATA and NEURALMEAN_WEIGHTS name the folders of images and weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import subjects
from neuralmean import Detector
from neuralmean.bench.models.installed import load_installed

SHARES = (1 / 4, 3 / 8, 1 / 2)  # of the side of an image
SOURCES = ("digit", "texture", "noise")
Method = Callable[[Tensor], Tensor]


def patches(name: str, count: int, side: int, textures: Path | None) -> np.ndarray:
    """Return square patches (N, side, side, 3): whole digits, crops of textures, or noise."""
    random = np.random.default_rng(0)
    if name == "noise":
        return random.integers(0, 256, (count, side, side, 3)).astype(np.uint8)
    if name == "digit":
        digits = subjects.raw_images("svhn-test", count)
        return np.stack([np.asarray(Image.fromarray(image).resize((side, side))) for image in digits])
    if textures is None:
        raise SystemExit("Expected --textures to name a folder of pictures of textures.")
    pictures = [np.asarray(Image.open(file).convert("RGB")) for file in sorted(textures.iterdir())]
    found = []
    for number in range(count):
        picture = pictures[number % len(pictures)]
        row, column = (int(random.integers(0, length - side)) for length in picture.shape[:2])
        found.append(picture[row : row + side, column : column + side])
    return np.stack(found)


def paste(images: np.ndarray, found: np.ndarray) -> tuple[np.ndarray, Tensor]:
    """Return images with a square patch each, and the first row and column of the patches, (N, 2)."""
    side = found.shape[1]
    corners = np.random.default_rng(1).integers(0, images.shape[1] - side + 1, (len(images), 2))
    pasted = images.copy()
    for image, patch, (row, column) in zip(pasted, found, corners, strict=True):
        image[row : row + side, column : column + side] = patch
    return pasted, torch.from_numpy(corners)


def hits(maps: Tensor, corners: Tensor, side: int) -> float:
    """Return the share of the maps (N, H, W) whose largest value lies in the patch."""
    best = maps.flatten(1).argmax(dim=1)
    places = torch.stack([best // maps.shape[2], best % maps.shape[2]], dim=1)
    return ((places >= corners) & (places < corners + side)).all(dim=1).double().mean().item()


def centre(x: Tensor) -> Tensor:
    """Return maps that point at the centre of every image: large patches often cover it."""
    maps = torch.zeros(len(x), *x.shape[2:])
    maps[:, x.shape[2] // 2, x.shape[3] // 2] = 1.0
    return maps


def grad_cam(model: nn.Module, layer: str) -> Method:
    """Return Grad-CAM (Selvaraju et al., 2017) of the predicted class, negated: the places that the class does not rest on."""

    def explain(x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = model.get_submodule(layer).register_forward_hook(lambda *args: kept.append(args[2]))
        try:
            with torch.enable_grad():
                logits = model(x)
                (slope,) = torch.autograd.grad(logits.amax(dim=1).sum(), kept[0])
        finally:
            handle.remove()
        maps = (slope.mean((2, 3), keepdim=True) * kept[0]).sum(1, keepdim=True)
        return -functional.interpolate(maps.detach(), size=x.shape[2:], mode="bilinear")[:, 0]

    return explain


def occlusion(detector: Detector, window: int, step: int) -> Method:
    """Return by how much the score falls when a window is replaced by the mean colour, spread over the window."""

    def explain(x: Tensor) -> Tensor:
        base = detector.score(x)
        total, count = torch.zeros(len(x), *x.shape[2:]), torch.zeros(x.shape[2:])
        for row in range(0, x.shape[2] - window + 1, step):
            for column in range(0, x.shape[3] - window + 1, step):
                hidden = x.clone()
                hidden[:, :, row : row + window, column : column + window] = 0.0
                fall = base - detector.score(hidden)
                total[:, row : row + window, column : column + window] += fall[:, None, None]
                count[row : row + window, column : column + window] += 1
        return total / count.clamp_min(1)

    return explain


def cost(detector: Detector, x: Tensor, rounds: int) -> float:
    """Return the time of `locate` as a multiple of that of `predict`, interleaved."""
    times: dict[str, list[float]] = {"locate": [], "predict": []}
    for _ in range(rounds):
        for name, found in times.items():
            start = time.process_time()
            getattr(detector, name)(x)
            found.append(time.process_time() - start)
    return statistics.median(times["locate"]) / statistics.median(times["predict"])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--photos", type=Path, default=None)
    parser.add_argument("--textures", type=Path, default=None)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--fit", type=int, default=2000)
    parser.add_argument("--cost-only", action="store_true")
    parser.add_argument("--locate-only", action="store_true", help="Leave out Grad-CAM and occlusion, which take long.")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.photos is None:
        trained = subjects.load_trained(args.model)
        if trained is None:
            raise SystemExit("NEURALMEAN_WEIGHTS does not name the folder of weights.")
        train, test = (
            subjects.raw_images(name, n) for name, n in (("cifar10-train", args.fit), ("cifar10-test", 2000))
        )
    else:
        trained = load_installed("efficientnet-lite0")
        train, test = (subjects.photos(args.photos / name, args.fit)[0] for name in ("train", "val"))
    half, images = test[: len(test) // 2], test[-args.images :]
    detector = Detector(trained.model).fit(trained.preprocess(train), held_out=trained.preprocess(half))
    x = trained.preprocess(images)
    error = (detector.locate(x[:16], by_layer=True).sum((2, 3)) - detector.explain(x[:16]).by_layer).abs().max().item()
    print(f"largest difference between the sum of a layer's map and its contribution: {error:.1e}")
    for size in (1, 16):
        print(f"cost of locate for {size} inputs, in passes: {cost(detector, x[:size], 9):.2f}", flush=True)
    if args.cost_only:
        return
    window = images.shape[1] // 4
    methods: dict[str, Method] = {"locate": detector.locate, "centre": centre}
    if not args.locate_only:
        methods["grad-cam"] = grad_cam(trained.model, detector.layers[-1])
        methods["occlusion"] = occlusion(detector, window, window // 2)
    print("| patch | side | chance | " + " | ".join(methods) + " |")
    print("|---|---|---|" + "---|" * len(methods))
    means: dict[str, list[float]] = {name: [] for name in methods}
    for name in SOURCES:
        for share in SHARES:
            side = round(share * images.shape[1])
            pasted, corners = paste(images, patches(name, len(images), side, args.textures))
            strange = trained.preprocess(pasted)
            found = {key: 100 * hits(method(strange), corners, side) for key, method in methods.items()}
            for key, value in found.items():
                means[key].append(value)
            shares = " | ".join(f"{value:.0f}" for value in found.values())
            print(f"| {name} | {side} | {100 * share**2:.0f} | {shares} |", flush=True)
    print("| mean | | | " + " | ".join(f"{statistics.mean(values):.0f}" for values in means.values()) + " |")


if __name__ == "__main__":
    main()
