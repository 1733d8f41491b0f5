"""The main task on data of scikit-learn: train a small model, attach a detector, detect.

A batch-norm network learns the digits 0 to 7. Digits 8 and 9 are near the training data, patches of photographs are far from it.
Nothing is downloaded, and everything takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.errors import MissingExtraError
from neuralmean.files.atomic import write_atomically
from neuralmean.models.spec import DEMO
from neuralmean.stats.metrics import evaluate

KNOWN_DIGITS = 8
_IMAGES = 4  # images of each kind that are written next to the detector, for scoring


class DigitNet(nn.Module):
    """Three convolutions with batch norm and a linear head, for 8 x 8 grey images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32)
        self.conv3, self.bn3 = nn.Conv2d(32, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, KNOWN_DIGITS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, shape (N, 8)."""
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.bn2(self.conv2(x))), 2)
        x = F.relu(self.bn3(self.conv3(x)))
        return self.fc(x.mean((2, 3)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DemoData:
    """Images of shape (N, 1, 8, 8) in [0, 1]: known digits in three parts, unknown digits, photo patches."""

    train: Tensor
    train_labels: Tensor
    held_out: Tensor
    test: Tensor
    test_labels: Tensor
    near: Tensor
    far: Tensor

    @property
    def strangers(self) -> dict[str, Tensor]:
        """The unknown images that no detector has learnt from: the second half of each kind."""
        return {
            "digits 8 and 9": self.near[len(self.near) // 2 :],
            "photo patches": self.far[len(self.far) // 2 :],
        }


@dataclass(frozen=True)
class DemoRow:
    """Result of one detector on one kind of unknown input, in percent."""

    method: str
    needs: str
    ood: str
    auroc: float
    caught: float
    false_alarms: float


@dataclass(frozen=True)
class Demo:
    """A trained model, its detector, and the results."""

    data: DemoData
    model: DigitNet
    accuracy: float
    detector: Detector
    rows: list[DemoRow]


def load_data(seed: int = 0) -> DemoData:
    """Read scikit-learn's digits and cut patches out of its two photographs."""
    from sklearn.datasets import load_digits, load_sample_images

    digits = load_digits()
    images = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    known = (labels < KNOWN_DIGITS).nonzero().squeeze(1)
    known = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
    train, held_out, test = known[:800], known[800:1100], known[1100:]
    photos = [np.asarray(photo, dtype=np.float32).mean(axis=2) / 255 for photo in load_sample_images().images]
    return DemoData(
        train=images[train],
        train_labels=labels[train],
        held_out=images[held_out],
        test=images[test],
        test_labels=labels[test],
        near=images[labels >= KNOWN_DIGITS],
        far=_cut_patches(photos, 400, np.random.default_rng(seed)),
    )


def train_model(data: DemoData, *, epochs: int = 12, seed: int = 0) -> DigitNet:
    """Train the network on the known digits, deterministically for a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DigitNet().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(epochs):
            for batch in torch.split(torch.randperm(len(data.train), generator=generator), 64):
                shift = torch.randint(-1, 2, (2,), generator=generator).tolist()
                loss = F.cross_entropy(model(data.train[batch].roll(shift, dims=(2, 3))), data.train_labels[batch])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
    return model.eval()


def run(seed: int = 0) -> Demo:
    """Train, attach every kind of detector, and measure each on near and far unknown images."""
    data = load_data(seed)
    model = train_model(data, seed=seed)
    with torch.no_grad():
        accuracy = (model(data.test).argmax(1) == data.test_labels).float().mean().item() * 100
    examples = torch.cat([data.near[: len(data.near) // 2], data.far[: len(data.far) // 2]])
    strangers = data.strangers
    ways: list[tuple[str, str, Detector, Tensor | None]] = [
        ("default", "ID examples", Detector(model), None),
        ("average", "nothing", Detector(model, scorer="average"), None),
        ("logistic, zero-shot", "ID examples", Detector(model, scorer="logistic"), None),
        ("logistic", "ID and OOD examples", Detector(model, scorer="logistic"), examples),
    ]
    rows = []
    for method, needs, detector, ood in ways:
        detector.fit(data.train, ood, held_out=data.held_out)
        rows += [_measure(method, needs, detector, data.test, name, images) for name, images in strangers.items()]
    return Demo(data, model, accuracy, ways[0][2], rows)


def save_picture(demo: Demo, path: Path) -> None:
    """Draw the scores of the default detector with its threshold, and a few images of each kind."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("Drawing needs matplotlib. Install it with `pip install neuralmean[report]`.") from None
    kinds = {"known digits": demo.data.test, "digits 8 and 9": demo.data.near, "photo patches": demo.data.far}
    colours = ["#2a7de1", "#e8833a", "#c2334d"]
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 10, width_ratios=[1] * 4 + [2] * 6)
    for row, (name, images) in enumerate(kinds.items()):
        for column in range(4):
            axes = figure.add_subplot(grid[row, column])
            axes.imshow(images[column * 7, 0], cmap="gray_r" if row < 2 else "gray", interpolation="nearest")
            axes.set_axis_off()
            if column == 0:
                axes.set_title(name, loc="left", fontsize=9, color=colours[row])
    axes = figure.add_subplot(grid[:, 4:])
    scores = {name: demo.detector.score(images) for name, images in kinds.items()}
    low, high = min(s.min().item() for s in scores.values()), max(s.quantile(0.98).item() for s in scores.values())
    bins = np.linspace(low, high, 45).tolist()
    for (name, values), colour in zip(scores.items(), colours, strict=True):
        axes.hist(values.clamp(max=high).numpy(), bins=bins, density=True, alpha=0.6, label=name, color=colour)
    rate = demo.detector.predict(demo.data.test[:1]).false_alarm_rate
    axes.axvline(demo.detector.threshold, color="black", linestyle="--", label=f"threshold for {rate:.0%} false alarms")
    axes.set(xlabel="score (higher = less like the training data)", yticks=[])
    axes.spines[["left", "right", "top"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9)
    with write_atomically(path) as file:
        figure.savefig(file, format="png", dpi=140)


def _measure(method: str, needs: str, detector: Detector, known: Tensor, name: str, strangers: Tensor) -> DemoRow:
    ours, theirs = detector.predict(known), detector.predict(strangers)
    return DemoRow(
        method=method,
        needs=needs,
        ood=name,
        auroc=evaluate(ours.score.numpy(), theirs.score.numpy()).auroc,
        caught=theirs.is_ood.float().mean().item() * 100,
        false_alarms=ours.is_ood.float().mean().item() * 100,
    )


def _cut_patches(photos: list[np.ndarray], count: int, random: np.random.Generator) -> Tensor:
    """Cut 32 x 32 squares out of the photographs and shrink each to 8 x 8."""
    patches = []
    for index in range(count):
        photo = photos[index % len(photos)]
        top, left = random.integers(photo.shape[0] - 32), random.integers(photo.shape[1] - 32)
        patches.append(photo[top : top + 32, left : left + 32].reshape(8, 4, 8, 4).mean(axis=(1, 3)))
    return torch.tensor(np.stack(patches), dtype=torch.float32).unsqueeze(1)


def save_detector(demo: Demo, folder: Path) -> Path:
    """Write the default detector, its weights and a few images of each kind, and return the path of the detector."""
    from PIL import Image
    from safetensors.torch import save

    weights, path = folder / "digits.safetensors", folder / "digits.nmd"
    with write_atomically(weights) as file:
        file.write(save(demo.model.state_dict()))
    how = Preprocessing((8, 8), mean=(0.0,), std=(1.0,), channels=1)
    demo.detector.save(path, info={"model": DEMO, "weights": str(weights.resolve()), "preprocessing": how.to_json()})
    (folder / "images").mkdir(exist_ok=True)
    for name, images in {"known": demo.data.test, "eight-or-nine": demo.data.near, "photo": demo.data.far}.items():
        for number, image in enumerate(images[:_IMAGES, 0]):
            pixels = (image * 255).round().to(torch.uint8).numpy()
            with write_atomically(folder / "images" / f"{name}-{number}.png") as file:
                Image.fromarray(pixels).save(file, format="PNG")
    return path


def write_demo_report(demo: Demo, path: Path) -> Path:
    """Write the HTML report of the default detector on both kinds of unknown images, and return its path."""
    from neuralmean.report import write_report

    title = "A network that learnt the digits 0 to 7 meets something else"
    return write_report(
        demo.detector, demo.data.test, demo.data.strangers, path, title=title, info={"id_name": "known digits"}
    )
