"""Where: how often the largest value of a map lies in a patch that does not belong, its cost, and whether the parts add up.

`python -m benchmarks.locate` pastes digits (SVHN), textures and noise over a sixteenth to a quarter of in-distribution images and
compares `Detector.locate` with Grad-CAM and occlusion. NEURALMEAN_DATA and NEURALMEAN_WEIGHTS name the folders of images and
weights.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import subjects
from neuralmean import Detector

SIDES = (8, 12, 16)
SOURCES = {"digit": "svhn-test", "texture": "imagenet-crop", "noise": None}
Method = Callable[[Tensor], Tensor]


def paste(images: Tensor, patches: Tensor, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return images with a square patch each, and the first row and column of the patches, (N, 2)."""
    size = images.shape[-1]
    corners = torch.randint(0, size - side + 1, (len(images), 2), generator=generator)
    pasted = images.clone()
    for image, patch, (row, column) in zip(pasted, patches, corners.tolist(), strict=True):
        start = (patch.shape[-1] - side) // 2
        image[:, row : row + side, column : column + side] = patch[:, start : start + side, start : start + side]
    return pasted, corners


def hits(maps: Tensor, corners: Tensor, side: int) -> float:
    """Return the share of the maps (N, H, W) whose largest value lies in the patch."""
    best = maps.flatten(1).argmax(dim=1)
    places = torch.stack([best // maps.shape[2], best % maps.shape[2]], dim=1)
    return ((places >= corners) & (places < corners + side)).all(dim=1).double().mean().item()


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
    parser.add_argument("--layer", default="layer3", help="The layer of Grad-CAM.")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--step", type=int, default=4, help="Of the windows of occlusion.")
    parser.add_argument("--fit", type=int, default=2000)
    args = parser.parse_args()
    trained = subjects.load_trained(args.model)
    data = None if trained is None else subjects.real_images(trained, "cifar10-test", 1000 + args.images)
    if trained is None or data is None:
        raise SystemExit("NEURALMEAN_DATA and NEURALMEAN_WEIGHTS do not name the folders of images and weights.")
    warnings.simplefilter("ignore")
    images = data[0]
    train = subjects.real_images(trained, "cifar10-train", args.fit)
    detector = Detector(trained.model).fit(train[0], held_out=images[:1000])  # type: ignore[index]
    x = images[1000:]
    error = (detector.locate(x[:16], by_layer=True).sum((2, 3)) - detector.explain(x[:16]).by_layer).abs().max().item()
    print(f"largest difference between the sum of a layer's map and its contribution: {error:.1e}")
    for size in (1, 16):
        print(f"cost of locate for {size} inputs, in passes: {cost(detector, x[:size], 9):.2f}")
    methods: dict[str, Method] = {
        "locate": detector.locate,
        "grad-cam": grad_cam(trained.model, args.layer),
        "occlusion": occlusion(detector, 8, args.step),
    }
    generator = torch.Generator().manual_seed(0)
    print("| patch | side | chance | " + " | ".join(methods) + " |")
    print("|---|---|---|" + "---|" * len(methods))
    for name, source in SOURCES.items():
        patches = torch.randn(x.shape, generator=generator) * 1.5
        if source is not None:
            found = subjects.real_images(trained, source, args.images)
            patches = found[0] if found is not None else patches
        for side in SIDES:
            pasted, corners = paste(x, patches, side, generator)
            shares = [f"{100 * hits(method(pasted), corners, side):.0f}" for method in methods.values()]
            print(f"| {name} | {side} | {100 * side**2 / 1024:.0f} | " + " | ".join(shares) + " |", flush=True)


if __name__ == "__main__":
    main()
