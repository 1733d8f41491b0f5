"""What kind: how flagged corruptions and flagged unseen classes are typed, and how often each corruption is flagged.

`python -m benchmarks.kinds CORRUPTED.npz`, with the file that `benchmarks/corruptions.py` writes: ResNet-56 with CIFAR-100 as
unseen content. With `--photos FOLDER` (of `train/LABEL.webp` and `val/NUMBER_LABEL.webp`) EfficientNet-Lite0 with a fifth of its
classes cut off its last layer and left out of the fit as unseen content. NEURALMEAN_DATA and NEURALMEAN_WEIGHTS name the folders
of images and weights.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import subjects
from neuralmean import Detector
from neuralmean.bench import models
from neuralmean.bench.models.installed import load_installed
from neuralmean.detector.kinds import KINDS

GROUPS = {
    "noise": ("gaussian_noise", "shot_noise", "impulse_noise"),
    "blur": ("defocus_blur", "glass_blur", "motion_blur", "zoom_blur"),
    "weather": ("snow", "frost", "fog", "brightness"),
    "digital": ("contrast", "elastic_transform", "pixelate", "jpeg_compression"),
}
UNSEEN = 200  # of the 1,000 classes of photos


class Subject(NamedTuple):
    """A fitted detector and what it is shown."""

    trained: models.TrainedModel
    detector: Detector
    fresh: Tensor  # of the classes and the camera that it knows
    unseen: Tensor  # of the same camera, but of other classes
    known: Tensor | None  # index of each class among those that the model knows, -1 for others; None if it knows all


def cifar(model: str, fit: int, rate: float) -> Subject:
    """Return a CIFAR-10 model, for which CIFAR-100 is unseen."""
    trained = subjects.load_trained(model)
    data = None if trained is None else subjects.real_images(trained, "cifar10-test", 5000)
    if trained is None or data is None:
        raise SystemExit("NEURALMEAN_DATA and NEURALMEAN_WEIGHTS do not name the folders of images and weights.")
    train, unseen = (
        subjects.real_images(trained, name, n) for name, n in (("cifar10-train", fit), ("cifar100-test", 2000))
    )
    detector = Detector(trained.model).fit(train[0], held_out=data[0][:2000], false_alarm_rate=rate)  # type: ignore[index]
    return Subject(trained, detector, data[0][2000:], unseen[0], None)  # type: ignore[index]


def photos(folder: Path, choice: str, rate: float) -> Subject:
    """Return EfficientNet-Lite0 without some of its classes; photos of these are unseen."""
    trained = load_installed("efficientnet-lite0")
    first = torch.randperm(1000, generator=torch.Generator().manual_seed(0))[:UNSEEN]
    cut = first if choice == "random" else torch.arange(151, 151 + UNSEEN)
    known = torch.full((1000,), -1)
    rest = torch.tensor([label for label in range(1000) if label not in set(cut.tolist())])
    known[rest] = torch.arange(len(rest))
    name, head = [(name, module) for name, module in trained.model.named_modules() if isinstance(module, nn.Linear)][-1]
    smaller = nn.Linear(head.in_features, len(rest)).eval()
    smaller.weight.data, smaller.bias.data = head.weight.data[rest], head.bias.data[rest]
    setattr(trained.model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], smaller)
    (train, labels), (test, test_labels) = (subjects.photos(folder / part) for part in ("train", "val"))
    is_known, half = known[test_labels] >= 0, torch.arange(len(test)) < len(test) // 2
    detector = Detector(trained.model)
    chosen = (is_known & half, is_known & ~half, ~is_known)
    held_out, fresh, unseen = (trained.preprocess(test[rows.numpy()]) for rows in chosen)
    detector.fit(trained.preprocess(train[(known[labels] >= 0).numpy()]), held_out=held_out, false_alarm_rate=rate)
    return Subject(trained, detector, fresh, unseen, known)


def row(name: str, found: Sequence[str]) -> str:
    """Return a row of the confusion table: how many are flagged, and of what kind these are, in percent."""
    counts = Counter(found)
    flagged = len(found) - counts["typical"]
    shares = [f"{100 * counts[kind] / max(flagged, 1):.0f}" for kind in KINDS if kind != "typical"]
    return f"| {name} | {len(found)} | {100 * flagged / len(found):.1f} | " + " | ".join(shares) + " |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corrupted", type=Path)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--fit", type=int, default=5000)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--limit", type=int, default=None, help="Images of each corruption.")
    parser.add_argument("--photos", type=Path, default=None)
    parser.add_argument(
        "--unseen", choices=("random", "mammals"), default="random", help="Classes of photos to cut off."
    )
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    subject = photos(args.photos, args.unseen, args.rate) if args.photos else cifar(args.model, args.fit, args.rate)
    detector = subject.detector
    print("| set | images | flagged | " + " | ".join(kind for kind in KINDS if kind != "typical") + " |")
    print("|---|---|---|" + "---|" * (len(KINDS) - 1))
    print(row("fresh", detector.predict(subject.fresh).kind))
    print(row("unseen classes", detector.predict(subject.unseen).kind), flush=True)
    corrupted: dict[str, list[str]] = {}
    flagged: list[tuple[str, float, float]] = []
    with np.load(args.corrupted) as content:
        labels = torch.from_numpy(content["labels"].astype(np.int64))
        labels = labels if subject.known is None else subject.known[labels]
        clean = _observe(subject, content["clean"][: args.limit], labels)[1]
        for group, names in GROUPS.items():
            for name in (f"{name}-{severity}" for name in names for severity in (1, 3, 5)):
                kinds, right = _observe(subject, content[name][: args.limit], labels)
                corrupted.setdefault(group, []).extend(kinds)
                share = sum(kind != "typical" for kind in kinds) / len(kinds)
                # Some corruptions are made of fewer images: what they cost is measured on the same ones.
                lost = clean[: len(right)].mean() - right.mean()
                flagged.append((name, 100 * lost.item(), 100 * share))
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


def _observe(subject: Subject, images: np.ndarray, labels: Tensor) -> tuple[list[str], Tensor]:
    """Return the kind of each image of a known class, and whether the model classifies it correctly, (N,)."""
    chosen = labels[: len(images)] >= 0
    x, labels = subject.trained.preprocess(images[chosen.numpy()]), labels[: len(images)][chosen]
    kinds: list[str] = []
    outputs = []
    for seen in subject.detector.observe_each(x, batch_size=50):
        kinds.extend(seen.decision.kind if seen.decision is not None else [])
        outputs.append(seen.output)
    return kinds, (torch.cat(outputs).argmax(dim=1) == labels).double()


if __name__ == "__main__":
    main()
