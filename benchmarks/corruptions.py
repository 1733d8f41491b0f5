"""Writes an .npz file of corrupted images for `benchmarks.kinds`; needs `imagecorruptions`, and nothing of this library.

`imagecorruptions` 1.1.2 needs scikit-image below 0.20 and numpy below 1.24, so run it in an environment of its own:
`python benchmarks/corruptions.py cifar10-test.npz corrupted.npz`, or with a folder of photos named NUMBER_LABEL.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NAMES = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "frost",
    "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEVERITIES = (1, 3, 5)


def read(source: Path, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last images of a seeded order, which `benchmarks.subjects` reads from its other end, and their labels."""
    if source.is_dir():
        files = sorted(source.iterdir())
        chosen = [files[index] for index in np.random.default_rng(0).permutation(len(files))[-count:]]
        images = np.stack([np.asarray(Image.open(file).convert("RGB")) for file in chosen])
        return images, np.array([int(file.stem.split("_")[-1]) for file in chosen])
    with np.load(source) as content:
        order = np.random.default_rng(0).permutation(len(content["images"]))[-count:]
        return content["images"][order], content["labels"][order]


def main() -> None:
    """Corrupt images in each way and severity."""
    corrupt = importlib.import_module("imagecorruptions").corrupt

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target")
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument(
        "--glass", type=int, default=None, help="Images of glass_blur, which takes seconds for a photo."
    )
    args = parser.parse_args()
    images, labels = read(args.source, args.images)
    found: dict[str, Any] = {"clean": images, "labels": labels}
    for name in NAMES:
        for severity in SEVERITIES:
            np.random.seed(0)  # what the package draws from
            own = images[: args.glass] if name == "glass_blur" else images
            changed = [corrupt(image, corruption_name=name, severity=severity) for image in own]
            found[f"{name}-{severity}"] = np.stack(changed).astype(np.uint8)
    np.savez(args.target, **found)


if __name__ == "__main__":
    main()
