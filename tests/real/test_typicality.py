"""What detection from in-distribution data alone must show on real images: `make real` prints each figure."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
import torch

from neuralmean import Detector
from neuralmean.bench import models
from neuralmean.errors import CalibrationWarning
from neuralmean.stats.calibration import Calibration
from neuralmean.stats.metrics import evaluate
from tests.real.test_core import show

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def fitted(roots):
    """A detector for ResNet-20 that was fitted on training images alone, and a way to score test sets."""
    trained = models.load("resnet20", roots[1] / "resnet20-cifar10.safetensors")

    def read(name, limit):
        with np.load(roots[0] / f"{name}.npz") as file:
            rows = np.random.default_rng(0).permutation(len(file["images"]))[:limit]
            return trained.preprocess(file["images"][rows])

    with pytest.warns(CalibrationWarning, match="slightly rotated"):
        detector = Detector(trained.model).fit(read("cifar10-train", 5000), batch_size=128)
    names = ("cifar10-test", "svhn-test", "cifar100-test", "imagenet-crop", "imagenet-resize")
    scores = {name: detector.score(read(name, 5000), batch_size=128) for name in names}
    return detector, scores


def test_four_sets_are_told_apart(fitted):
    _, scores = fitted
    values = [evaluate(scores["cifar10-test"].numpy(), scores[name].numpy()).auroc for name in list(scores)[1:]]
    show("ResNet-20, svhn / cifar100 / crop / resize", " / ".join(f"{value:.1f}" for value in values))
    assert statistics.mean(values) >= 92.5


def test_false_alarms_are_as_asked_for(fitted):
    scores, rates = fitted[1]["cifar10-test"], []
    for split in range(20):
        order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(split))
        threshold = Calibration.of(scores[order[:2000]], 0.05).threshold
        rates.append((scores[order[2000:]] > threshold).float().mean().item() * 100)
    show(
        "false alarms for 5 % asked, 2,000 held out, 20 splits",
        f"{min(rates):.2f} to {max(rates):.2f}, mean {statistics.mean(rates):.2f}",
    )
    assert 4 <= statistics.mean(rates) <= 6


def test_training_images_alone_give_about_the_rate(fitted):
    detector, scores = fitted
    rate = (scores["cifar10-test"] > detector.threshold).float().mean().item() * 100
    show("false alarms for 5 % asked, training images only", f"{rate:.2f}")
    assert 2.5 <= rate <= 10


def test_examples_of_one_kind_cost_nothing_on_other_kinds(roots, fitted):
    """Fitted with 4,000 images of CIFAR-100, and with 25 of SVHN: at least as good as without, but for noise."""
    trained = models.load("resnet20", roots[1] / "resnet20-cifar10.safetensors")
    plain = {
        name: evaluate(fitted[1]["cifar10-test"].numpy(), fitted[1][name].numpy()).auroc for name in list(fitted[1])[1:]
    }

    def read(name, limit):
        with np.load(roots[0] / f"{name}.npz") as file:
            return trained.preprocess(file["images"][np.random.default_rng(0).permutation(len(file["images"]))[:limit]])

    for kind, count in (("cifar100", 4000), ("svhn", 25)):
        held_out, examples = read("cifar10-test", 500), read(f"{kind}-train", count)
        detector = Detector(trained.model).fit(read("cifar10-train", 4000), examples, held_out=held_out, batch_size=128)
        usual = detector.score(read("cifar10-test", 3000)[500:], batch_size=128).numpy()
        found = {
            name: evaluate(usual, detector.score(read(name, 2000), batch_size=128).numpy()).auroc for name in plain
        }
        show(
            f"ResNet-20, {count:,} images of {kind}",
            " / ".join(f"{found[name]:.1f} ({plain[name]:.1f})" for name in plain),
        )
        assert statistics.mean(found.values()) >= statistics.mean(plain.values()) - 0.2
        assert found[f"{kind}-test"] >= plain[f"{kind}-test"]
