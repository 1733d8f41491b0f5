"""What an exported graph must show on real images: `make real` prints each figure."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neuralmean import Detector
from neuralmean.bench import models
from neuralmean.export import to_onnx
from tests.real.test_core import show

pytestmark = pytest.mark.real


@pytest.mark.parametrize("scorer", ["typicality", "logistic"])
@pytest.mark.parametrize("name", ["resnet56", "densenet100"])
def test_onnxruntime_decides_as_torch_does_on_ten_thousand_images(roots, name, scorer, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    trained = models.load(name, roots[1] / f"{name}-cifar10.safetensors")

    def read(key, first, count):
        with np.load(roots[0] / f"{key}.npz") as file:
            return trained.preprocess(file["images"][first : first + count])

    outliers = read("svhn-train", 0, 500) if scorer == "logistic" else None
    detector = Detector(trained.model, scorer=scorer)
    detector.fit(read("cifar10-train", 0, 2000), outliers, held_out=read("cifar10-test", 0, 1000))
    to_onnx(detector, tmp_path / "d.onnx", input_shape=(3, 32, 32))
    session = onnxruntime.InferenceSession(tmp_path / "d.onnx")
    differences, differing = [], 0
    for batch in torch.cat([read("cifar10-test", 1000, 5000), read("svhn-test", 0, 5000)]).split(250):
        decision = detector.predict(batch)
        score, is_ood = session.run(["score", "is_ood"], {"x": batch.contiguous().numpy()})
        differences.append(np.abs(score - decision.score.numpy()).max())
        differing += int((is_ood != decision.is_ood.numpy()).sum())
    show(f"{name}, {scorer}: largest difference of scores", f"{max(differences):.2g}, {differing} decisions differ")
    assert max(differences) <= 1e-4
    assert differing == 0
