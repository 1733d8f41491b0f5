"""Every experiment runs from images and weights in two folders, goes on after an interruption, says what is missing."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from neuralmean.bench import baselines, experiments, models
from neuralmean.bench.experiments import latency, paper, untrained
from neuralmean.bench.experiments.base import Experiment, cases
from neuralmean.bench.experiments.batch_size import batch_scores
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.jobs import Piece, Settings, run_at_once
from neuralmean.bench.experiments.layers import first_counts
from neuralmean.bench.experiments.remarks import REMARKS
from neuralmean.bench.experiments.workbench import Sizes, Workbench
from neuralmean.bench.features import Store
from neuralmean.bench.protocols import few_shot
from neuralmean.bench.results import COLUMNS, Results
from neuralmean.bench.table import as_text
from neuralmean.errors import InputError, NeuralMeanWarning

SETS = {"cifar10-train": 60, "cifar10-test": 60, "svhn-train": 60, "svhn-test": 60, "imagenet-crop": 150}
NEAR = {"cifar100-train": 60, "cifar100-test": 60}
ON_RESNET20 = [
    "transfer",
    "latency",
    "layers",
    "variance",
    "batch-size",
    "untrained",
    "ablation",
    "readings",
]


def write_sets(folder, sets):
    for seed, (name, count) in enumerate(sets.items()):
        high = 120 if name.startswith("svhn") else 256
        pixels = np.random.default_rng(seed).integers(0, high, (count, 32, 32, 3), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", images=pixels, labels=np.arange(count) % 10)


def write_weights(folder, name="resnet20", inside="CIFAR-10"):
    torch.manual_seed(0)
    model = models.build(name).train()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(16, 3, 32, 32))  # stands for training: the batch norms have seen something
    tensors = {key: value for key, value in model.state_dict().items() if not key.endswith("num_batches_tracked")}
    metadata = {"architecture": name, "dataset": inside, "mean": "0.5,0.5,0.5", "std": "0.25,0.25,0.25"}
    save_file(tensors, folder / f"{name}-{inside.lower().replace('-', '')}.safetensors", metadata)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("bench")
    for name in ("data", "weights"):
        (root / name).mkdir()
    write_sets(root / "data", {**SETS, **NEAR})
    write_weights(root / "weights")
    return root


def run_all(folders):
    methods = ["msp", "energy", "ours-avg", "ours-lr", "ours-lr-nvd"]
    where = {"data": folders / "data", "weights": folders / "weights", "out": folders / "rows.json"}
    return experiments.run(None, limit=50, methods=methods, **where)


@pytest.fixture(scope="module")
def rows(folders):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency, "ENOUGH_SECONDS", 0.0)
        patch.setattr(latency, "FROZEN", {})  # compiling takes half a minute: it has a slow test of its own
        patch.setattr(untrained, "SEEDS", (0,))
        return run_all(folders)


def of(rows, experiment):
    return [row for row in rows if row["experiment"] == experiment]


def test_everything_that_data_and_weights_allow_was_run(rows):
    assert {row["experiment"] for row in rows} == set(ON_RESNET20)


def test_every_row_has_the_columns_of_the_design_in_its_order_and_is_json(rows, folders):
    assert all(tuple(row)[: len(COLUMNS)] == COLUMNS for row in rows)
    assert json.loads((folders / "rows.json").read_text()) == rows


def test_figures_are_percentages_and_counts_are_those_of_the_images(rows):
    for row in of(rows, "transfer"):
        assert 0 <= row["tnr95"] <= 100
        assert 0 <= row["auroc"] <= 100
        assert 50 <= row["accuracy"] <= 100
        assert (row["n_id"], row["n_ood"]) == (50, 50)
        assert row["seconds"] > 0
        low, high = row["auroc_ci"]
        assert low <= row["auroc"] <= high


def test_transfer_learns_from_cifar100_and_is_judged_by_others(rows):
    own = of(rows, "transfer")
    assert {row["ood"] for row in own} == {"svhn", "imagenet-crop"}
    assert {row["fit_ood"] for row in own if row["method"] == "ours-lr"} == {"cifar100"}
    assert {row["protocol"] for row in own} == {"transfer"}


def test_darker_images_are_found_by_what_learnt_from_nothing_but_the_buffers(rows):
    scores = {row["setting"]: row["auroc"] for row in of(rows, "batch-size") if row["ood"] == "svhn"}
    assert set(scores) == {f"batch {size}" for size in (1, 2, 4, 8, 16, 32)}
    assert scores["batch 32"] > 95


def test_the_untrained_network_is_judged_with_both_references(rows):
    assert {row["kind"] for row in of(rows, "untrained")} == {"buffers as born", "reference from data"}


def test_layers_has_the_importance_of_every_layer_in_its_last_row(rows):
    own = [row for row in of(rows, "layers") if row["ood"] == "cifar100"]
    assert [row["layers"] for row in own] == first_counts(19)
    assert list(own[-1]["importance"])[:2] == ["bn1", "layer1.0.bn1"]
    assert len(own[-1]["importance"]) == 19
    assert all("importance" not in row for row in own[:-1])


def test_latency_has_times_beside_the_plain_pass(rows):
    own = of(rows, "latency")
    assert "ours-lr" in {row["method"] for row in own}
    for row in own:
        assert row["latency_ms"] > 0
        assert row["plain_ms"] > 0
        assert row["repeats"] == 10
        assert row["passes_per_image"] >= 1


def test_rows_say_how_many_images_the_fits_used(rows):
    used = {row["method"]: (row["n_fit_id"], row["n_fit_ood"]) for row in of(rows, "latency")}
    assert used == {"msp": (0, 0), "energy": (0, 0), "ours-avg": (0, 0), "ours-lr": (50, 50)}
    (average,) = [row for row in of(rows, "latency") if row["method"] == "ours-avg"]
    assert average["fit_passes"] == 0


def test_a_row_that_does_not_say_its_weights_digest_is_completed(folders, rows, tmp_path):
    path = tmp_path / "rows.json"
    old = [{key: value for key, value in row.items() if key != "weights_digest"} for row in of(rows, "variance")]
    path.write_text(json.dumps(old))
    where = {"data": folders / "data", "weights": folders / "weights", "out": path, "cache": folders / ".rows-cache"}
    found = experiments.run(["variance"], limit=50, methods=["ours-lr", "ours-lr-nvd"], **where)
    assert [row["weights_digest"] for row in found] == [row["weights_digest"] for row in of(rows, "variance")]
    assert [row["seconds"] for row in found] == [row["seconds"] for row in old]  # nothing was measured again


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, while it packs the compiled graph
def test_latency_has_times_of_a_frozen_detector(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(latency, "ENOUGH_SECONDS", 0.0)
    rows = experiments.run(
        ["latency"], data=folders / "data", weights=folders / "weights", out=tmp_path / "rows.json", limit=50,
        methods=["ours-mlp"], models=["resnet20"],
    )  # fmt: skip
    eager, frozen = rows
    assert (eager.get("setting"), frozen["setting"]) == (None, "frozen")
    assert frozen["auroc"] is None
    assert frozen["ratio"] > 0
    assert "Ours-MLP, frozen" in as_text(rows)


def test_latency_times_fits_by_the_clock_of_the_run(folders, tmp_path, monkeypatch):
    read = Store.read

    def read_what_took_long(self, *args, **kwargs):
        return replace(read(self, *args, **kwargs), seconds=1e6)

    monkeypatch.setattr(Store, "read", read_what_took_long)
    monkeypatch.setattr(latency, "ENOUGH_SECONDS", 0.0)
    where = {"data": folders / "data", "weights": folders / "weights", "out": tmp_path / "rows.json"}
    rows = experiments.run(["latency"], limit=50, methods=["knn", "ours-lr"], cache=folders / ".rows-cache", **where)
    assert [row["fit_passes"] for row in rows] == [50, 100]
    assert all(0 < row["fit_seconds"] < 1000 for row in rows)


def test_mini_batches_are_drawn_by_the_seed_of_the_run(rows, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(untrained, "SEEDS", (0,))
    where = {"data": folders / "data", "weights": folders / "weights", "out": tmp_path / "rows.json"}
    names = ["batch-size", "untrained"]
    others = experiments.run(names, limit=50, seed=1, cache=folders / ".rows-cache", **where)
    for name in names:
        scores = [{row["setting"]: row["id_scores"] for row in of(some, name)} for some in (rows, others)]
        assert {row["seed"] for row in of(others, name)} == {1}
        assert all(scores[0][setting] != scores[1][setting] for setting in scores[0])


def test_a_second_run_computes_nothing(rows, folders, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("computed again")

    monkeypatch.setattr(untrained, "SEEDS", (0,))
    monkeypatch.setattr("neuralmean.bench.experiments.workbench.run_trial", refuse)
    monkeypatch.setattr("neuralmean.bench.experiments.latency.fit_method", refuse)
    monkeypatch.setattr(latency, "FROZEN", {})
    monkeypatch.setattr("neuralmean.bench.experiments.batch_size.batch_scores", refuse)
    before = (folders / "rows.json").stat().st_mtime_ns
    again = run_all(folders)
    assert again == rows
    assert (folders / "rows.json").stat().st_mtime_ns == before


def test_an_interrupted_run_goes_on_and_ends_with_the_same_rows(folders, tmp_path, monkeypatch):
    where = {"data": folders / "data", "weights": folders / "weights", "limit": 50, "methods": ["msp", "energy"]}
    whole = experiments.run(["transfer"], out=tmp_path / "whole.json", **where)
    add, count = Results.add, []

    def stop_at_the_second(self, *rows):
        count.append(1)
        if len(count) == 2:
            raise KeyboardInterrupt
        add(self, *rows)

    monkeypatch.setattr(Results, "add", stop_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        experiments.run(["transfer"], out=tmp_path / "rows.json", cache=tmp_path / "cache", **where)
    assert 0 < len(json.loads((tmp_path / "rows.json").read_text())) < len(whole)
    rest = experiments.run(["transfer"], out=tmp_path / "rows.json", cache=tmp_path / "cache", **where)
    figures = ("ood", "method", "auroc", "tnr95", "accuracy", "inputs")
    assert [[row[name] for name in figures] for row in rest] == [[row[name] for name in figures] for row in whole]


def test_lines_of_text_say_what_is_being_done(folders, tmp_path):
    said = []
    experiments.run(
        ["batch-size"],
        data=folders / "data",
        weights=folders / "weights",
        out=tmp_path / "rows.json",
        cache=folders / ".rows-cache",
        limit=50,
        announce=said.append,
    )
    assert said == ["batch-size: ResNet-20 on CIFAR-10 (1 of 1)"]


def test_table_experiments_run_under_their_protocols(folders, tmp_path, monkeypatch):
    names = ["full-access", "zero-shot", "few-shot"]
    for name in names:
        small = cases(["resnet20"], "cifar10", ["svhn", "imagenet-crop"])
        monkeypatch.setattr(experiments.get(name), "cases", small, raising=False)
    rows = experiments.run(
        names,
        data=folders / "data",
        weights=folders / "weights",
        out=tmp_path / "rows.json",
        cache=folders / ".rows-cache",
        limit=50,
        methods=["msp", "energy", "ours-lr"],
    )
    by_name = {(row["experiment"], row["ood"], row["method"]): row for row in rows}
    assert len(by_name) == len(rows) == 2 * 3 + 2 * 3 + 2 * 2  # few-shot has no MSP, as in the paper
    full = by_name["full-access", "imagenet-crop", "ours-lr"]
    assert (full["n_fit_id"], full["n_fit_ood"], full["fit_ood"]) == (50, 30, "imagenet-crop")
    zero = by_name["zero-shot", "svhn", "ours-lr"]
    assert (zero["n_fit_ood"], zero["fit_ood"]) == (50, "cifar10-crafted")
    few = by_name["few-shot", "svhn", "ours-lr"]
    assert (few["n_fit_id"], few["n_fit_ood"], few["draws"]) == (25, 25, 10)
    assert few["auroc_std"] >= 0
    assert by_name["few-shot", "svhn", "energy"]["auroc_std"] == 0
    assert by_name["zero-shot", "svhn", "energy"]["auroc"] == by_name["full-access", "svhn", "energy"]["auroc"]


def test_few_shot_gives_gram_fifty_inliers_as_the_paper_does(folders, tmp_path, monkeypatch):
    fitted = {}

    def look(self, facts, method, draws, inside, outside):
        fitted[method] = {(len(draw.inliers), len(draw.outliers)) for draw in draws}

    monkeypatch.setattr(Workbench, "compare", look)
    small = cases(["resnet20"], "cifar10", ["svhn"])
    monkeypatch.setattr(experiments.get("few-shot"), "cases", small, raising=False)
    where = {"data": folders / "data", "weights": folders / "weights", "out": tmp_path / "rows.json"}
    experiments.run(["few-shot"], methods=["gram", "odin", "ours-lr"], **where)
    assert fitted == {"gram": {(50, 25)}, "odin": {(25, 25)}, "ours-lr": {(25, 25)}}


def without_times(rows):
    times = ("seconds", "score_ms_per_image", "peak_mb", "ratio", "latency_ms", "plain_ms", "repeats")
    kept = [{key: value for key, value in row.items() if not key.endswith(times)} for row in rows]
    return sorted(kept, key=lambda row: [str(row.get(name)) for name in ("experiment", "ood", "method", "setting")])


def test_two_processes_end_with_the_same_rows_as_one(rows, folders, tmp_path):
    said = []
    names, methods = ["transfer", "batch-size"], ["msp", "energy", "ours-avg", "ours-lr", "ours-lr-nvd"]
    where = {"data": folders / "data", "weights": folders / "weights", "out": tmp_path / "rows.json"}
    got = experiments.run(names, limit=50, methods=methods, jobs=2, announce=said.append, **where)
    assert without_times(got) == without_times([row for row in rows if row["experiment"] in names])
    assert len(said) == 3 + 1  # MSP, Energy and Ours-LR each by itself, and the mini-batches
    assert said[-1].endswith("(4 of 4 done)")


class Deadly(Experiment):
    name = "deadly"

    def run(self, bench, case):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_the_system_ends_is_one_clear_error(folders, tmp_path):
    settings = Settings(folders / "data", folders / "weights", tmp_path / "rows.json", tmp_path)
    inputs = Inputs(folders / "data", folders / "weights")
    (case,) = cases(["resnet20"], "cifar10", ["svhn"])
    with pytest.raises(InputError, match="but the system ended one"):
        run_at_once([Piece(Deadly(), case)], settings, inputs, lambda line: None, 2)


def test_every_method_stands_in_one_table_judged_by_the_same_images(folders, tmp_path, monkeypatch):
    methods = experiments.get("methods")
    assert set(baselines.names()) - set(methods.methods) == {name for name in baselines.names() if "nvd" in name}
    small = cases(["resnet20"], "cifar10", ["svhn", "cifar100"], learns_from=["cifar100"])
    monkeypatch.setattr(methods, "cases", small, raising=False)
    monkeypatch.setattr("neuralmean.bench.experiments.workbench.USUAL", Sizes(fit=60, judge=60, heavy=52))
    monkeypatch.setattr("neuralmean.bench.experiments.workbench.SIZES", {})
    rows = experiments.run(
        ["methods"],
        data=folders / "data",
        weights=folders / "weights",
        out=tmp_path / "rows.json",
        methods=["energy", "ours-lr", "good"],
    )
    found = {(row["method"], row["ood"]): (row["protocol"], row["fit_ood"]) for row in rows}
    assert found == {
        ("energy", "svhn"): ("zero-shot", None),
        ("energy", "cifar100"): ("zero-shot", None),
        ("ours-lr", "svhn"): ("transfer", "cifar100"),
        ("ours-lr", "cifar100"): ("full-access", "cifar100"),
        ("good", "svhn"): ("transfer", "cifar100"),
        ("good", "cifar100"): ("full-access", "cifar100"),
    }
    assert {(row["n_id"], row["n_ood"]) for row in rows} == {(52, 52)}


def test_a_heavy_method_gets_fewer_draws_and_images_and_is_left_out_on_a_slow_model(folders, tmp_path):
    bench = Workbench(Inputs(folders / "data", folders / "weights"), Results(tmp_path / "rows.json"), tmp_path)
    judged = [bench.judge_set(name, "resnet20") for name in ("cifar10", "svhn")]
    fits = [bench.fit_set(name, "resnet20", apart_from=judged) for name in ("cifar10", "svhn")]
    draws = few_shot(*fits)
    facts = {"experiment": "few-shot", "model": "resnet20", "id": "cifar10"}
    bench.compare(facts, "good", draws, judged[0], judged[1:])
    bench.compare(facts, "energy", draws, judged[0], judged[1:])
    assert [row["draws"] for row in bench.results] == [3, 10]
    leaves_out = experiments.get("few-shot").leaves_out
    assert leaves_out(baselines.make("odin"), "densenet100")
    assert not leaves_out(baselines.make("odin"), "resnet56")
    assert not leaves_out(baselines.make("energy"), "densenet100")
    assert not experiments.get("full-access").leaves_out(baselines.make("odin"), "densenet100")
    assert experiments.get("full-access").leaves_out(baselines.make("oe"), "densenet100")


def test_what_the_remark_on_all_methods_says_about_full_access_is_so():
    learns = {name for name in experiments.get("methods").methods if baselines.make(name).uses_outliers}
    full = experiments.get("full-access")
    assert learns - set(full.methods) == {"react", "ash", "scale", "nci", "nac"}
    tuned = {name for name in learns & set(full.methods) if full.leaves_out(baselines.make(name), "densenet100")}
    assert tuned == {"oe", "energy-ft", "good"}
    assert all(baselines.make(name).title.split(" ")[0] in REMARKS["methods"] for name in learns)


class TestAvailable:
    def test_it_says_what_can_be_run_and_what_is_missing(self, folders):
        found = {one.name: one for one in experiments.available(folders / "data", folders / "weights")}
        assert list(found) == experiments.names()
        assert found["transfer"].ready == ("ResNet-20 on CIFAR-10",)
        assert found["transfer"].reference == "Table 2"
        assert "weights densenet100-cifar10" in found["transfer"].missing
        assert "data lsun-crop" in found["transfer"].missing
        assert found["statistical"].ready == ()
        assert found["statistical"].missing[0] == "weights convnet4-cifar10"

    def test_every_experiment_of_the_paper_is_there(self):
        assert experiments.names() == [
            "statistical",
            "full-access",
            "zero-shot",
            "few-shot",
            "transfer",
            "more-datasets",
            "latency",
            "layers",
            "variance",
            "batch-size",
            "untrained",
            "methods",
            "ablation",
            "imagenet",
            "sample-size",
            "false-alarms",
            "readings",
            "own",
        ]


class TestErrors:
    def where(self, folders, tmp_path, **changes):
        return {"data": folders / "data", "weights": folders / "weights", "out": tmp_path / "rows.json", **changes}

    def test_a_typo_gets_a_hint(self, folders, tmp_path):
        with pytest.raises(InputError, match=r"name of an experiment, but got 'fewshot'. Did you mean 'few-shot'"):
            experiments.run(["fewshot"], **self.where(folders, tmp_path))

    @pytest.mark.parametrize("which", ["data", "weights"])
    def test_a_missing_folder_is_named(self, folders, tmp_path, which):
        with pytest.raises(InputError, match=rf"Expected the {which} folder '.*nowhere' to exist, but it does not"):
            experiments.run(["transfer"], **self.where(folders, tmp_path, **{which: tmp_path / "nowhere"}))

    def test_an_experiment_asked_for_by_name_without_its_weights_is_an_error(self, folders, tmp_path):
        with pytest.raises(InputError, match=r"'statistical', but these are missing: weights convnet4-cifar10"):
            experiments.run(["statistical"], **self.where(folders, tmp_path))

    def test_an_unknown_method_is_an_error_before_any_work(self, folders, tmp_path):
        with pytest.raises(InputError, match=r"Expected the name of a method, but got 'mspp'"):
            experiments.run(["transfer"], methods=["mspp"], **self.where(folders, tmp_path))
        assert not (tmp_path / "rows.json").exists()

    def test_no_process_at_all_is_an_error(self, folders, tmp_path):
        with pytest.raises(InputError, match="Expected `jobs` to be at least 1, but got 0"):
            experiments.run(["transfer"], jobs=0, **self.where(folders, tmp_path))

    def test_a_limit_too_small_to_draw_from_is_an_error(self, folders, tmp_path):
        with pytest.raises(InputError, match="Expected `limit` to be None or at least 50 images a set, but got 10"):
            experiments.run(["transfer"], limit=10, **self.where(folders, tmp_path))

    def test_a_damaged_weights_file_is_left_out_with_a_message(self, folders, tmp_path):
        write_weights(tmp_path)
        (tmp_path / "broken.safetensors").write_bytes(b"no")
        with pytest.warns(NeuralMeanWarning, match=r"broken.safetensors cannot be read and is skipped"):
            inputs = Inputs(folders / "data", tmp_path)
        assert list(inputs.weights) == [("resnet20", "cifar10")]

    def test_a_model_without_weights_says_how_to_get_them(self, folders):
        with pytest.raises(InputError, match="Train them with `nmd bench train vit --id svhn`"):
            Inputs(folders / "data", folders / "weights").trained("vit", "svhn")


def test_no_test_image_reaches_a_fit_also_where_the_files_share_some(folders, tmp_path):
    bench = Workbench(Inputs(folders / "data", folders / "weights"), Results(tmp_path / "rows.json"), tmp_path)
    judged = [bench.judge_set(name, "resnet20") for name in ("cifar10", "svhn", "imagenet-crop")]
    tested = {image.tobytes() for one in judged for image in one.source.images}
    for name in ("cifar10", "svhn", "imagenet-crop", "cifar100"):
        allowed = bench.fit_set(name, "resnet20", apart_from=judged)
        assert not tested & {image.tobytes() for image in allowed.source.images[allowed.rows]}


def _reference_batch_score(means, reference, batch):
    return sum(abs(sum(means[i][c] for i in batch) / len(batch) - reference[c]) for c in range(len(reference))) / len(
        reference
    )


def test_a_batch_score_is_the_mean_magnitude_of_the_pooled_discrepancy():
    means, reference = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0.5, 0.0, -0.5])
    got = batch_scores(means, reference, size=6, batches=2)
    expected = _reference_batch_score(means.tolist(), reference.tolist(), range(6))
    assert got.tolist() == pytest.approx([expected, expected])


def test_mini_batches_share_no_image_while_there_are_enough():
    means = torch.eye(12)  # the score of a batch of 3 then says how many different images are in it
    scores = batch_scores(means, torch.zeros(12), size=3, batches=4)
    assert scores.tolist() == pytest.approx([1 / 12] * 4)
    assert batch_scores(means, torch.zeros(12), size=12, batches=3).shape == (3,)


class TestPaper:
    def test_a_cell_of_each_table_is_as_printed(self):
        def cell(experiment, model, inside, outside, method):
            return paper.printed_for(
                {"experiment": experiment, "model": model, "id": inside, "ood": outside, "method": method}
            )

        assert cell("statistical", "convnet4", "svhn", "cifar10", "dk").auroc == 21.4
        dense = cell("transfer", "densenet100", "cifar10", "imagenet-crop", "ours-lr")
        assert (dense.tnr95, dense.auroc, dense.accuracy) == (94.3, 98.8, 94.7)
        assert cell("more-datasets", "densenet100", "cifar100", "svhn", "ours-lr").auroc == 93.3
        energy = cell("zero-shot", "resnet34", "cifar10", "svhn", "energy")
        assert (energy.tnr95, energy.auroc, energy.accuracy) == (58.4, 90.6, 85.5)
        assert cell("variance", "resnet34", "cifar10", "cifar100", "ours-mlp-nvd").auroc == 95.3
        assert cell("zero-shot", "resnet34", "cifar10", "svhn", "unheard") is None

    def test_a_smaller_residual_network_stands_in_for_resnet34_only(self):
        row = {"experiment": "zero-shot", "model": "resnet56", "id": "cifar10", "ood": "svhn", "method": "ours-mlp"}
        assert paper.printed_for(row) is None
        assert paper.printed_for_resnet34(row).auroc == 99.6
        assert paper.printed_for_resnet34({**row, "model": "densenet100"}) is None
        assert paper.printed_for_resnet34({**row, "model": "resnet34"}) is None

    def test_times_are_as_printed(self):
        assert paper.timing("ours-mlp").latency_ms == 7.54
        assert paper.timing("good").fit_seconds == 756 * 60
        assert paper.timing("unheard") is None

    def test_counts_of_cells(self):
        by_table = {}
        for cell in paper.PRINTED:
            by_table[cell.where] = by_table.get(cell.where, 0) + 1
        assert by_table == {"Table 1": 8, "Table 2": 40, "Table 3": 36, "Table 6": 30, "Sec. 5.7": 4, "Sec. 3.2": 1}


def test_methods_of_every_experiment_are_unique_and_ours_are_there():
    for name in experiments.names():
        offered = experiments.get(name).methods
        assert len(set(offered)) == len(offered)
        assert any(method in baselines.names() for method in offered)


def test_the_live_reader_gives_what_the_cache_gives(folders):
    from neuralmean.bench.features import compute

    trained = Inputs(folders / "data", folders / "weights").trained("resnet20", "cifar10")
    images = Inputs(folders / "data", folders / "weights").test_part("svhn").take(slice(0, 23))  # more than a batch
    kept = compute(trained, images, variance=True)
    for reads in ({"logits"}, {"feature"}, {"means", "logits"}, {"means", "variances", "feature"}):
        live = latency.LiveReader(trained, frozenset(reads))(images, variance="variances" in reads)
        for name in reads:
            torch.testing.assert_close(getattr(live, name), getattr(kept, name))
