"""What an exported graph must show on real images: `make real` prints each figure."""

from __future__ import annotations

import copy

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
def test_graphs_decide_as_the_model_does_on_ten_thousand_images(roots, name, scorer, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    trained = models.load(name, roots[1] / f"{name}-cifar10.safetensors")

    def read(key, first, count):
        with np.load(roots[0] / f"{key}.npz") as file:
            return trained.preprocess(file["images"][first : first + count])

    outliers = read("svhn-train", 0, 500) if scorer == "logistic" else None
    detector = Detector(trained.model, scorer=scorer)
    detector.fit(read("cifar10-train", 0, 2000), outliers, held_out=read("cifar10-test", 0, 1000))
    frozen = copy.deepcopy(detector).freeze(read("cifar10-test", 0, 1))
    to_onnx(detector, tmp_path / "d.onnx", input_shape=(3, 32, 32))
    session = onnxruntime.InferenceSession(tmp_path / "d.onnx")

    def run_frozen(batch):
        decision = frozen(batch)[1]
        return decision.score.numpy(), decision.is_ood.numpy()

    graphs = {
        "onnxruntime": lambda batch: session.run(["score", "is_ood"], {"x": batch.contiguous().numpy()}),
        "frozen": run_frozen,
        "frozen, one by one": lambda batch: map(np.concatenate, zip(*map(run_frozen, batch.split(1)), strict=True)),
    }
    differences, differing = dict.fromkeys(graphs, 0.0), dict.fromkeys(graphs, 0)
    for batch in torch.cat([read("cifar10-test", 1000, 5000), read("svhn-test", 0, 5000)]).split(250):
        decision = detector.predict(batch)
        for graph, run in graphs.items():
            score, is_ood = run(batch)
            differences[graph] = max(differences[graph], float(np.abs(score - decision.score.numpy()).max()))
            differing[graph] += int((is_ood != decision.is_ood.numpy()).sum())
    for graph in graphs:
        show(
            f"{name}, {scorer}, {graph}: largest difference of scores",
            f"{differences[graph]:.2g}, {differing[graph]} decisions differ",
        )
    assert max(differences.values()) <= 1e-4
    assert not any(differing.values())
