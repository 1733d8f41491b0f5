"""The experiment `imagenet` on a handful of photos and a model of one's own."""

import gzip
import sys
import textwrap

import numpy as np
import pytest
from PIL import Image

from neuralmean.bench import experiments
from neuralmean.bench.data import ImageSet, load
from neuralmean.bench.experiments.imagenet import halves
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.errors import ArtefactError, InputError

METHODS = ["msp", "knn", "mds++", "typicality"]


def _photos(folder, names, seed):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for name in names:
        tile = rng.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(np.kron(tile, np.ones((8, 8, 1), np.uint8))).save(folder / f"{name}.png")


def _idx(path, array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


@pytest.fixture
def folders(tmp_path, monkeypatch):
    photos = tmp_path / "data/imagenet-photos"
    _photos(photos / "train", [f"{label:03d}" for label in range(60)], 0)
    _photos(photos / "val", [f"{number:04d}_{number % 5}" for number in range(110)], 1)
    (tmp_path / "data/mnist").mkdir()
    digits = np.random.default_rng(2).integers(0, 2, (60, 28, 28), np.uint8) * 255
    for part in ("train", "t10k"):
        _idx(tmp_path / f"data/mnist/{part}-images-idx3-ubyte.gz", digits)
        _idx(tmp_path / f"data/mnist/{part}-labels-idx1-ubyte.gz", np.arange(60, dtype=np.uint8) % 10)
    _photos(tmp_path / "odd", [f"{number}" for number in range(70)], 3)
    Image.new("RGB", (90, 70)).save(tmp_path / "odd/wide.png")
    (tmp_path / "weights").mkdir()
    (tmp_path / "ownmodel.py").write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        from neuralmean.data.preprocessing import Preprocessing

        def build():
            torch.manual_seed(0)
            model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                  nn.Linear(6, 60))
            with torch.no_grad():
                model.train()(torch.randn(8, 3, 48, 48))  # as if trained: the batch norm has seen something
            model.preprocessing = Preprocessing((48, 48), (0.5,) * 3, (0.25,) * 3)
            return model
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("ownmodel", None)


def _run(folders, **options):
    where = {"data": folders / "data", "weights": folders / "weights", "out": folders / "rows.json"}
    return experiments.run(["imagenet"], **where, models=["ownmodel:build"], methods=METHODS, **options)


def test_every_method_is_judged_by_sets_of_other_sizes_and_by_altered_photos(folders):
    rows = _run(folders, oods={"odd": folders / "odd"})
    assert {row["ood"] for row in rows} == {"mnist", "odd", "photo-sketch", "photo-blur", "photo-noise"}
    assert {row["method"] for row in rows} == set(METHODS)
    assert {(row["model"], row["id"], row["protocol"]) for row in rows} == {
        ("ownmodel:build", "imagenet-photos", "id-only")
    }
    assert {row["n_id"] for row in rows} == {55}
    assert {row["n_fit_id"] for row in rows if row["method"] == "knn"} == {60}
    assert all(len(row["weights_digest"]) == 16 for row in rows)


def test_rows_are_made_again_only_when_asked(folders, monkeypatch):
    before = _run(folders)
    calls = []
    monkeypatch.setattr("neuralmean.bench.experiments.workbench.run_trial", lambda *a, **k: calls.append(1) or [])
    _run(folders)
    assert not calls
    with pytest.raises(IndexError):  # the trials above return nothing
        _run(folders, again=True)
    assert calls
    assert before


def test_without_photos_the_experiment_says_so(folders):
    (folders / "empty").mkdir()
    with pytest.raises(InputError, match=r"experiment 'imagenet', but these are missing: one of its models"):
        experiments.run(["imagenet"], data=folders / "empty", weights=folders / "weights", out=folders / "r.json")


def test_half_of_the_test_photos_are_held_out():
    labels = np.arange(5)
    images = ImageSet.of(np.zeros((5, 8, 8, 3), np.uint8) + labels[:, None, None, None].astype(np.uint8), labels,
                         name="x", split="test")  # fmt: skip
    held_out, judged = halves(images)
    assert held_out.labels.tolist() == [0, 2, 4]
    assert judged.labels.tolist() == [1, 3]
    assert (held_out.split, judged.split) == ("held-out", "test")


def test_labels_of_photos_are_in_their_names(folders):
    assert load("imagenet-photos", "test", folders / "data").labels[:6].tolist() == [0, 1, 2, 3, 4, 0]
    assert load("imagenet-photos", "train", folders / "data").labels[-1] == 59
    (folders / "data/imagenet-photos/val/photo.png").write_bytes((folders / "odd/0.png").read_bytes())
    with pytest.raises(ArtefactError, match="pictures named LABEL or NUMBER_LABEL"):
        load("imagenet-photos", "test", folders / "data")


def test_photos_that_keep_their_size_must_share_it(folders):
    Image.new("RGB", (10, 10)).save(folders / "data/imagenet-photos/val/9999_1.png")
    with pytest.raises(ArtefactError, match="64 x 64 pixels like the other pictures of its set, but got 10 x 10"):
        load("imagenet-photos", "test", folders / "data")


def test_idx_files_are_read_and_damaged_ones_refused(folders):
    digits = load("mnist", "test", folders / "data")
    assert digits.images.shape == (60, 28, 28, 3)
    assert digits.labels[:3].tolist() == [0, 1, 2]
    path = folders / "data/mnist/t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes())[:-5]))
    with pytest.raises(ArtefactError, match="t10k-images-idx3-ubyte.gz to be readable, but it is damaged"):
        load("mnist", "test", folders / "data")


def test_an_unknown_model_is_an_error_with_a_suggestion(folders):
    with pytest.raises(InputError, match="Did you mean 'resnet56'"):
        Inputs(folders / "data", folders / "weights", chosen=["resnet65"])
