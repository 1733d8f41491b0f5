"""Writes an .npz file of corrupted images for `benchmarks.kinds`; needs `imagecorruptions`, and nothing of this library.

`imagecorruptions` 1.1.2 needs scikit-image 0.18 and numpy below 1.24, so run it in an environment of its own:
`python benchmarks/corruptions.py cifar10-test.npz corrupted.npz`.
"""

from __future__ import annotations

import argparse
import importlib

import numpy as np

NAMES = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow", "frost",
    "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
SEVERITIES = (1, 3, 5)


def main() -> None:
    """Corrupt the last images of a seeded order, which `benchmarks.subjects` reads from its other end."""
    corrupt = importlib.import_module("imagecorruptions").corrupt

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--images", type=int, default=400)
    args = parser.parse_args()
    with np.load(args.source) as content:
        order = np.random.default_rng(0).permutation(len(content["images"]))[-args.images :]
        images, labels = content["images"][order], content["labels"][order]
    found = {"clean": images, "labels": labels}
    for name in NAMES:
        for severity in SEVERITIES:
            np.random.seed(0)  # what the package draws from
            changed = [corrupt(image, corruption_name=name, severity=severity) for image in images]
            found[f"{name}-{severity}"] = np.stack(changed).astype(np.uint8)
    np.savez(args.target, **found)


if __name__ == "__main__":
    main()
