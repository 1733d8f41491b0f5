"""What kind: how flagged corruptions and flagged unseen classes are typed, and how often each corruption is flagged.

`python -m benchmarks.kinds CORRUPTED.npz`, with the file that `benchmarks/corruptions.py` writes. NEURALMEAN_DATA and
NEURALMEAN_WEIGHTS name the folders of images and weights.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks import subjects
from neuralmean import Detector
from neuralmean.detector.kinds import KINDS

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}


def row(name: str, found: Sequence[str]) -> str:
    """Return a row of the confusion table: how many are flagged, and of what kind these are, in percent."""
    counts = Counter(found)
    flagged = len(found) - counts["typical"]
    shares = [f"{100 * counts[kind] / max(flagged, 1):.0f}" for kind in KINDS if kind != "typical"]
    return f"| {name} | {100 * flagged / len(found):.1f} | " + " | ".join(shares) + " |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corrupted", type=Path)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--fit", type=int, default=5000)
    parser.add_argument("--limit", type=int, default=None, help="Images of each corruption and of each set.")
    args = parser.parse_args()
    trained = subjects.load_trained(args.model)
    data = None if trained is None else subjects.real_images(trained, "cifar10-test", 4000)
    if trained is None or data is None:
        raise SystemExit("NEURALMEAN_DATA and NEURALMEAN_WEIGHTS do not name the folders of images and weights.")
    warnings.simplefilter("ignore")
    train, unseen = (subjects.real_images(trained, name, args.fit) for name in ("cifar10-train", "cifar100-test"))
    detector = Detector(trained.model).fit(train[0], held_out=data[0][:2000])  # type: ignore[index]
    print("| set | flagged | " + " | ".join(kind for kind in KINDS if kind != "typical") + " |")
    print("|---|---|" + "---|" * (len(KINDS) - 1))
    print(row("fresh CIFAR-10", detector.predict(data[0][2000:][: args.limit]).kind))
    print(row("CIFAR-100", detector.predict(unseen[0][: args.limit]).kind), flush=True)  # type: ignore[index]
    corrupted: dict[str, list[str]] = {}
    flagged: list[tuple[str, float, float]] = []
    with np.load(args.corrupted) as content:
        labels = torch.from_numpy(content["labels"][: args.limit].astype(np.int64))
        clean = _observe(detector, trained.preprocess(content["clean"][: args.limit]), labels)[1]
        for group, names in GROUPS.items():
            for name in (f"{name}-{severity}" for name in names for severity in (1, 3, 5)):
                kinds, accuracy = _observe(detector, trained.preprocess(content[name][: args.limit]), labels)
                corrupted.setdefault(group, []).extend(kinds)
                share = sum(kind != "typical" for kind in kinds) / len(kinds)
                flagged.append((name, 100 * (clean - accuracy), 100 * share))
    for group, kinds in corrupted.items():
        print(row(group, kinds))
    print(row("all corruptions", [kind for kinds in corrupted.values() for kind in kinds]))
    harmful = [share >= 50 for _, drop, share in flagged if drop >= 10]
    harmless = [share <= 15 for _, drop, share in flagged if drop <= 2]
    print(
        f"corruptions that cost 10 points or more: {sum(harmful)} of {len(harmful)} flagged in at least half of the images"
    )
    print(f"corruptions that cost 2 points or less: {sum(harmless)} of {len(harmless)} flagged in at most 15 %")
    print("| corruption | accuracy lost | flagged |\n|---|---|---|")
    for name, drop, share in flagged:
        print(f"| {name} | {drop:.1f} | {share:.0f} |")


def _observe(detector: Detector, x: torch.Tensor, labels: torch.Tensor) -> tuple[list[str], float]:
    """Return the kind of each image, and how many of them the model classifies correctly."""
    kinds: list[str] = []
    outputs = []
    for seen in detector.observe_each(x, batch_size=200):
        kinds.extend(seen.decision.kind if seen.decision is not None else [])
        outputs.append(seen.output)
    return kinds, (torch.cat(outputs).argmax(dim=1) == labels).double().mean().item()


if __name__ == "__main__":
    main()
