"""The ablation: parts of the scorer for ID data alone are what they say, and stand in one table with the peers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from neuralmean.bench import baselines, experiments, models, plots, protocols, report
from neuralmean.bench.baselines import trial
from neuralmean.bench.baselines.parts import PartOfLayers, third_of
from neuralmean.bench.baselines.trial import run_trial
from neuralmean.bench.experiments import ablation
from neuralmean.bench.experiments.base import cases
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench
from neuralmean.bench.results import Results
from neuralmean.models.layers import Layer
from neuralmean.scorers.typicality import TERMS

SETS = ("cifar10-train", "cifar10-test", "svhn-train", "svhn-test", "imagenet-crop")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("ablation")
    for name in ("data", "weights"):
        (root / name).mkdir()
    for seed, name in enumerate(SETS):
        pixels = np.random.default_rng(seed).integers(0, 120 if seed > 1 else 256, (80, 32, 32, 3), dtype=np.uint8)
        np.savez(root / "data" / f"{name}.npz", images=pixels, labels=np.arange(80) % 10)
    torch.manual_seed(0)
    model = models.build("resnet20").train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 3, 32, 32))
    tensors = {key: value for key, value in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    metadata = {"architecture": "resnet20", "dataset": "CIFAR-10", "mean": "0.5,0.5,0.5", "std": "0.25,0.25,0.25"}
    save_file(tensors, root / "weights" / "resnet20-cifar10.safetensors", metadata)
    return root


@pytest.fixture(scope="module")
def rows(folders):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ablation, "COUNTS", (30, 60))
        patch.setattr(
            experiments.get("ablation"),
            "cases",
            cases(["resnet20"], "cifar10", ["svhn", "imagenet-crop"]),
            raising=False,
        )
        where = {"data": folders / "data", "weights": folders / "weights", "out": folders / "rows.json"}
        return experiments.run(["ablation"], limit=60, methods=["energy", "gen", "typicality"], **where)


def settings(rows):
    return list(dict.fromkeys((row["method"], row.get("setting")) for row in rows))


def test_peers_and_parts_are_rows_of_one_experiment(rows):
    expected = [("energy", None), ("gen", None), ("typicality", None)]
    expected += [("typicality", f"{name} alone") for name in TERMS]
    expected += [("typicality", f"without {name}") for name in TERMS]
    layers = ["all layers", "first third of the layers", "middle third of the layers", "last third of the layers"]
    expected += [("typicality", f"far and angle, {name}") for name in layers]
    expected += [("typicality", "30 ID images")]
    assert settings(rows) == expected
    assert len(rows) == 2 * len(expected)


def test_the_doubt_term_alone_is_the_generalised_entropy(rows):
    for ood in ("svhn", "imagenet-crop"):
        own = {(row["method"], row.get("setting")): row for row in rows if row["ood"] == ood}
        assert own["typicality", "doubt alone"]["auroc"] == pytest.approx(own["gen", None]["auroc"])


def test_fewer_images_are_drawn_several_times(rows):
    few = next(row for row in rows if row.get("setting") == "30 ID images")
    assert (few["n_fit_id"], few["draws"]) == (30, ablation.DRAWS)
    assert "auroc_std" in few
    assert not any(row.get("setting") == "60 ID images" for row in rows)  # these are all, which the scorer itself has


def test_another_seed_shares_no_draw(folders, tmp_path, monkeypatch):
    seeds = []
    monkeypatch.setattr(ablation, "COUNTS", (30,))
    monkeypatch.setattr(ablation._Parts, "measure", lambda self, draws, *_: seeds.append([one.seed for one in draws]))
    monkeypatch.setattr(Workbench, "compare", lambda *_: None)
    (case,) = cases(["resnet20"], "cifar10", ["svhn"])
    for seed in (0, 1):
        inputs, results = Inputs(folders / "data", folders / "weights"), Results(tmp_path / "r.json")
        bench = Workbench(inputs, results, tmp_path, limit=60, seed=seed, methods=["typicality"])
        experiments.get("ablation").run(bench, case)
    several = [draws for draws in seeds if len(draws) > 1]
    assert several == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("out", ["rows.json", "others.json"])
def test_a_second_run_fits_nothing_with_its_rows_or_without(rows, folders, monkeypatch, out):
    def refuse(*args, **kwargs):
        raise AssertionError("fitted again")

    monkeypatch.setattr(trial, "fit_method", refuse)
    monkeypatch.setattr(ablation, "COUNTS", (30, 60))
    small = cases(["resnet20"], "cifar10", ["svhn", "imagenet-crop"])
    monkeypatch.setattr(experiments.get("ablation"), "cases", small, raising=False)
    where = {"data": folders / "data", "weights": folders / "weights", "out": folders / out}
    where["cache"] = folders / ".rows-cache"
    assert experiments.run(["ablation"], limit=60, methods=["energy", "gen", "typicality"], **where) == rows


def test_all_layers_and_all_terms_are_the_scorer_itself(folders, tmp_path):
    bench = Workbench(Inputs(folders / "data", folders / "weights"), Results(tmp_path / "r.json"), tmp_path, limit=60)
    trained = bench.inputs.trained("resnet20", "cifar10")
    judged = [bench.judge_set("svhn", "resnet20")]
    (draw,) = protocols.zero_shot(bench.fit_set("cifar10", "resnet20", apart_from=judged))
    whole, part = (
        run_trial(make, trained, draw, judged, bench.reader(trained))[0].scores
        for make in (lambda: baselines.make("typicality"), lambda: PartOfLayers(None))
    )
    assert part.shape == (len(whole), len(TERMS))
    np.testing.assert_allclose(part.sum(axis=1), whole, rtol=1e-5, atol=1e-5)


def test_thirds_of_the_layers_share_no_column_and_leave_none_out():
    layers = [Layer(f"l{place}", "BatchNorm2d", 2 + place) for place in range(7)]  # 2, 3, 4, 5, 6, 7, 8 channels
    assert [third_of(layers, third) for third in range(3)] == [slice(0, 5), slice(5, 20), slice(20, 35)]


def test_the_report_has_one_table_of_ours_and_peers_and_a_plot(rows):
    (section,) = report.build(rows)
    overview = section.tables[0]
    assert overview.columns == ("method", "SVHN", "imagenet-crop", "mean")
    assert [line[0] for line in overview.rows][:4] == ["Energy", "GEN", "Typicality", "Typicality, far alone"]
    (plot,) = section.plots
    assert plot.name == "ablation-resnet20-cifar10"
    assert "without doubt" in plot.svg
    assert plots.draw("ablation", rows)[0].svg == plot.svg
