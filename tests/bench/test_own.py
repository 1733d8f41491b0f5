"""Methods, models and sets of the user's own take part without editing the package."""

import re
import sys
import textwrap

import numpy as np
import pytest
from PIL import Image

from neuralmean.bench import baselines, data, experiments, titles
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import ArtefactError, InputError

from .test_experiments import NEAR, SETS, write_sets, write_weights


@pytest.fixture
def folders(tmp_path, monkeypatch):
    for name in ("data", "weights"):
        (tmp_path / name).mkdir()
    write_sets(tmp_path / "data", {**SETS, **NEAR})
    write_weights(tmp_path / "weights")
    (tmp_path / "ownmethod.py").write_text(
        textwrap.dedent("""
        from neuralmean.bench.baselines import Method

        class MaxLogit(Method):
            name = "max-logit"
            title = "MaxLogit"
            paper = "Hendrycks et al., 2022"
            reads = frozenset({"logits"})
            uses_inliers = False

            def score(self, examples):
                return -examples.logits.amax(dim=1)

        class Norm:
            def fit(self, inliers, outliers=None):
                self.centre = inliers.mean(dim=0)
                return self

            def score(self, vectors):
                return (vectors - self.centre).norm(dim=1)

        class Other:
            pass
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("ownmethod", None)


def _run(folders, names, **options):
    where = {"data": folders / "data", "weights": folders / "weights", "out": folders / "rows.json"}
    return experiments.run(names, limit=50, **where, **options)


def test_a_method_of_ones_own_has_rows_in_any_experiment(folders):
    rows = _run(folders, ["transfer"], methods=["msp", "ownmethod:MaxLogit"], models=["resnet20"])
    assert {row["method"] for row in rows} == {"msp", "ownmethod:MaxLogit"}
    assert titles.of_method("ownmethod:MaxLogit") == "MaxLogit"
    assert titles.of_method("nowhere:Method") == "nowhere:Method"


def test_a_scorer_of_ones_own_is_a_method_too(folders):
    rows = _run(folders, ["transfer"], methods=["ownmethod:Norm"], models=["resnet20"])
    assert {row["method"] for row in rows} == {"ownmethod:Norm"}
    assert titles.of_method("ownmethod:Norm") == "Norm"
    (folders / "ownmethod.py").write_text((folders / "ownmethod.py").read_text().replace("norm(dim=1)", "amax(dim=1)"))
    sys.modules.pop("ownmethod")
    edited = _run(folders, ["transfer"], methods=["ownmethod:Norm"], models=["resnet20"], again=True)
    assert [row["auroc"] for row in edited] != [row["auroc"] for row in rows]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "ownmethod:Other",
            "to be a subclass of `neuralmean.bench.baselines.Method` or a class with `fit` and `score`",
        ),
        ("ownmethod:Missing", "but it is missing"),
        ("nowhere_at_all:Method", "Expected to import 'nowhere_at_all' for the method"),
    ],
)
def test_what_is_no_method_is_refused(folders, spec, message):
    with pytest.raises(InputError, match=message):
        baselines.make(spec)


def test_a_set_of_ones_own_is_judged_in_the_papers_tables_too(folders):
    pixels = np.random.default_rng(4711).integers(0, 256, (60, 32, 32, 3), np.uint8)
    np.savez(folders / "odd.npz", images=pixels)
    rows = _run(folders, ["transfer"], methods=["msp"], models=["resnet20"], oods={"odd": folders / "odd.npz"})
    assert "odd" in {row["ood"] for row in rows}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a model, as `--model package:build`"),
        ({"models": ["ownmethod:build"]}, "the set that the model was trained on, as `--id NAME`"),
        ({"models": ["ownmethod:build"], "id_set": "scans", "oods": {"x": "x"}}, "data scans, as `--ood scans=DIR`"),
        ({"models": ["ownmethod:build"], "id_set": "cifar10", "oods": {}}, "a set to test on, as `--ood NAME=DIR`"),
    ],
)
def test_the_experiment_own_says_what_it_lacks(folders, options, message, monkeypatch):
    if options.get("id_set") == "cifar10":
        monkeypatch.setattr("neuralmean.bench.experiments.own.ALL_OODS", ())
    if options.get("id_set") == "scans":
        monkeypatch.setattr("neuralmean.bench.experiments.inputs.Inputs.has_set", lambda self, name: False)
    with pytest.raises(InputError, match=re.escape(message)):
        _run(folders, ["own"], **options)


def test_false_alarms_count_the_flags_of_unseen_images(folders):
    rows = _run(folders, ["false-alarms"])
    # 30 held-out images, or 50 to fit on, are too few for a rate of 1 %.
    assert [row["setting"] for row in rows] == ["5 % asked, with held-out images", "5 % asked, without held-out images"]
    for row in rows:
        low, high = row["false_alarms_ci"]
        assert low <= row["false_alarms"] == round(100 * row["flagged"] / row["n_id"], 3) <= high
        assert row["as_asked"] == (low <= 2 * row["rate"] and high >= row["rate"] / 2)


def test_sample_size_averages_over_five_draws(folders, monkeypatch):
    monkeypatch.setattr("neuralmean.bench.experiments.sample_size.COUNTS", (30, 50))
    write_weights(folders / "weights", "convnet4")
    rows = _run(folders, ["sample-size"])
    assert {(row["setting"], row["draws"]) for row in rows} == {("30 images", 5), ("50 images", 5)}
    assert all("auroc_std" in row for row in rows)


def test_readings_vary_one_thing_at_a_time(folders, monkeypatch):
    monkeypatch.setattr("neuralmean.bench.experiments.readings.COUNTS", (40, 2000))
    rows = _run(folders, ["readings"], methods=["ours-lr", "dk"])
    settings = {row["setting"] for row in rows}
    assert {"before the norm, standardised, signed", "after the norm, raw, absolute"} <= settings
    assert {"before the norm, standardised, absolute; 8 x 8 blocks", "DK, bandwidth 0.5 x median distance"} <= settings
    assert {row["ood"] for row in rows} == {"svhn", "cifar100"}
    assert not any("2000" in setting for setting in settings)  # there are only 50
    near = [row for row in rows if row["setting"] == "NMD and NVD, LR, 40 images of each kind"]
    assert [(row["ood"], row["protocol"], row["fit_ood"]) for row in near] == [("cifar100", "full-access", "cifar100")]


def test_a_list_of_openood_names_its_pictures_and_their_labels(tmp_path):
    lists, pictures = tmp_path / "benchmark_imglist/imagenet", tmp_path / "images_largescale"
    lists.mkdir(parents=True)
    for place, name in enumerate(("imagenet_1k/val/a.png", "imagenet_1k/val/b.png", "ninco/c d.png")):
        (pictures / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (50 + place, 60), (place, 0, 0)).save(pictures / name)
    (lists / "test_imagenet.txt").write_text("imagenet_1k/val/b.png 7\nimagenet_1k/val/a.png 3\n")
    (lists / "test_ninco.txt").write_text("ninco/c d.png -1\n")
    rules = Preprocessing((40, 40), (0.5,) * 3, (0.5,) * 3)
    found = data.load("imagenet-1k", "test", tmp_path, rules=rules)
    assert found.images.shape == (2, 40, 40, 3)
    assert found.labels.tolist() == [7, 3]
    assert found.images[:, 0, 0, 0].tolist() == [1, 0]
    assert data.load("ninco", "test", tmp_path, rules=rules).labels is None
    (lists / "test_ninco.txt").write_text("ninco/gone.png -1\n")
    with pytest.raises(ArtefactError, match=r"lines `FILE LABEL` of pictures that exist, but got 'ninco/gone.png -1'"):
        data.load("ninco", "test", tmp_path)


def test_of_very_many_pictures_a_fixed_part_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("neuralmean.bench.data.readers.MOST_PICTURES", 5)
    monkeypatch.setattr("neuralmean.bench.data.readers.MOST_IN_MEMORY", 1)
    for place in range(12):
        (tmp_path / "many" / f"{place % 3}").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (place, 0, 0)).save(tmp_path / "many" / f"{place % 3}" / f"{place:02d}.png")
    first, second = data.read(tmp_path / "many"), data.read(tmp_path / "many")
    assert len(first) == 5
    assert first.digest == second.digest
    assert isinstance(first.images.base, np.ndarray) or isinstance(first.images, np.memmap)
    assert (first.images[:, 0, 0, 0] % 3 == first.labels).all()
