"""What the benchmark must show on real images and weights (NEURALMEAN_DATA, NEURALMEAN_WEIGHTS)."""

from __future__ import annotations

import os

import pytest

from neuralmean.bench import experiments

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def where(tmp_path_factory):
    folders = {name: os.environ.get(f"NEURALMEAN_{name.upper()}") for name in ("data", "weights")}
    for name, folder in folders.items():
        if not folder:
            pytest.skip(f"NEURALMEAN_{name.upper()} does not say where the {name} are")
    return {**folders, "cache": tmp_path_factory.mktemp("cache")}


def ready(where, experiment, case):
    found = {one.name: one for one in experiments.available(where["data"], where["weights"])}
    if case not in found[experiment].ready:
        pytest.skip(f"{experiment}: no data or weights for {case}")


def test_msp_and_energy_on_densenet_are_what_others_measured(where, tmp_path):
    ready(where, "transfer", "DenseNet-100 on CIFAR-10")
    rows = experiments.run(["transfer"], out=tmp_path / "rows.json", methods=["msp", "energy"], **where)
    auroc = {(row["model"], row["ood"], row["method"]): row["auroc"] for row in rows}
    assert auroc["densenet100", "svhn", "msp"] == pytest.approx(93.3, abs=0.7)
    assert auroc["densenet100", "svhn", "energy"] == pytest.approx(94.0, abs=0.7)


def test_mini_batches_are_told_apart_by_the_trained_network_and_not_by_the_untrained_one(where, tmp_path):
    ready(where, "batch-size", "ResNet-56 on CIFAR-10")
    rows = experiments.run(["batch-size", "untrained"], out=tmp_path / "rows.json", limit=1000, **where)
    far = [row for row in rows if row["ood"] == "svhn" and row["batch_size"] == 8]
    trained = [row["auroc"] for row in far if row["experiment"] == "batch-size"]
    born = [row["auroc"] for row in far if row.get("kind") == "buffers as born"]
    assert min(trained) > 99
    assert max(born) < 75
