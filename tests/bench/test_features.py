"""Features on disk: right, computed once, whole after a kill, and repaired when damaged."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean.bench import features
from neuralmean.bench.data.imageset import ImageSet
from neuralmean.bench.features import Store, _Entry, _key, _observe, compute
from neuralmean.bench.models import TrainedModel
from neuralmean.errors import ArtefactError, NeuralMeanWarning
from neuralmean.models.layers import select_layers
from neuralmean.recording.observer import FIND_HEAD, Observer


class Toy(nn.Module):
    """A convolution, a batch norm and a head, that knows how many images it has seen."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 2)
        self.seen = 0
        self.fail_after = None

    def forward(self, x):
        self.seen += len(x)
        if self.fail_after is not None and self.seen > self.fail_after:
            raise KeyboardInterrupt
        return self.fc(self.bn(self.conv(x)).relu().mean(dim=(2, 3)))


def make_trained(seed=0, mean=(0.5, 0.5, 0.5)):
    return TrainedModel(Toy(seed).eval(), "toy", 2, mean, (0.25, 0.25, 0.25))


def make_images(count=10, seed=0, name="pictures", split="train"):
    pixels = np.random.default_rng(seed).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return ImageSet.of(pixels, np.arange(count), name=name, split=split)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(features, "PART", 4)
    monkeypatch.setattr(features, "BATCH", 2)


def test_features_are_those_of_a_plain_forward_pass(tmp_path):
    trained, images = make_trained(), make_images()
    got = Store(tmp_path).read(trained, images, variance=True)
    with torch.no_grad():
        pixels = torch.from_numpy(images.images).permute(0, 3, 1, 2) / 255.0
        activation = trained.model.conv((pixels - 0.5) / 0.25)
        feature = trained.model.bn(activation).relu().mean(dim=(2, 3))
        torch.testing.assert_close(got.means, activation.mean(dim=(2, 3)))
        torch.testing.assert_close(got.variances, activation.var(dim=(2, 3), correction=0))
        torch.testing.assert_close(got.feature, feature)
        torch.testing.assert_close(got.logits, trained.model.fc(feature))
    assert [layer.name for layer in got.layers] == ["bn"]
    assert got.seconds > 0


def test_computing_without_a_cache_gives_the_same(tmp_path):
    trained, images = make_trained(), make_images()
    kept, direct = Store(tmp_path).read(trained, images), compute(trained, images)
    torch.testing.assert_close(direct.means, kept.means, rtol=0, atol=0)
    torch.testing.assert_close(direct.logits, kept.logits, rtol=0, atol=0)
    assert direct.variances is None


def test_a_second_run_reads_the_disk_and_not_the_model(tmp_path):
    trained, images = make_trained(), make_images()
    first = Store(tmp_path).read(trained, images)
    seen = trained.model.seen
    again = Store(tmp_path).read(trained, images)
    assert trained.model.seen == seen
    torch.testing.assert_close(again.means, first.means, rtol=0, atol=0)
    assert again.seconds == pytest.approx(first.seconds)


def test_writing_to_what_was_read_does_not_change_the_disk(tmp_path):
    trained, images = make_trained(), make_images()
    Store(tmp_path).read(trained, images).means.zero_()
    assert Store(tmp_path).read(trained, images).means.abs().sum() > 0


@pytest.mark.parametrize(
    "other",
    [
        lambda trained, images: (make_trained(seed=1), images),
        lambda trained, images: (replace(trained, mean=(0.4, 0.5, 0.5)), images),
        lambda trained, images: (trained, make_images(seed=1)),
        lambda trained, images: (trained, images.take(np.array([1, 0]))),
    ],
    ids=["weights", "preprocessing", "images", "order"],
)
def test_whatever_the_numbers_depend_on_makes_another_entry(tmp_path, other):
    trained, images = make_trained(), make_images()
    store = Store(tmp_path)
    first = store.read(trained, images)
    changed = other(trained, images)
    assert not store.has(*changed)
    assert store.read(*changed).means.data_ptr() != first.means.data_ptr()
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 2


def test_the_layers_are_part_of_the_key(tmp_path):
    trained, images = make_trained(), make_images()
    store = Store(tmp_path)
    assert store.read(trained, images).means.shape == (10, 4)
    assert store.read(trained, images, layers=["bn", "fc"]).means.shape == (10, 6)


def test_an_entry_with_variances_serves_those_who_need_none(tmp_path):
    trained, images = make_trained(), make_images()
    Store(tmp_path).read(trained, images, variance=True)
    seen = trained.model.seen
    assert Store(tmp_path).read(trained, images).means.shape == (10, 4)
    assert trained.model.seen == seen


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path):
    trained, images = make_trained(), make_images(10)
    trained.model.fail_after = 2 + 8  # 2 images to find the head, then two parts of 4
    with pytest.raises(KeyboardInterrupt):
        Store(tmp_path).read(trained, images)
    trained.model.fail_after, trained.model.seen = None, 0
    got = Store(tmp_path).read(trained, images)
    assert trained.model.seen == 2 + 2
    torch.testing.assert_close(got.means, compute(trained, images).means)


CHILD = """
    import os, signal, sys
    import numpy as np, torch
    sys.path.insert(0, sys.argv[1])
    import test_features as t
    from neuralmean.bench import features
    features.PART, features.BATCH = 4, 2
    trained, images = t.make_trained(), t.make_images(20)
    die_after = int(sys.argv[3])
    plain = trained.model.forward
    def forward(x):
        if die_after and trained.model.seen >= die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(x)
    trained.model.forward = forward
    got = features.Store(sys.argv[2]).read(trained, images)
    print(trained.model.seen, float(got.means.double().sum()))
"""


def spawn(tmp_path, folder, die_after=0):
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(CHILD))
    arguments = [sys.executable, str(script), __file__.rpartition("/")[0], str(folder), str(die_after)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_a_run_killed_by_the_system_loses_at_most_one_part(tmp_path):
    child = spawn(tmp_path, tmp_path / "cache", die_after=2 + 10)
    child.communicate()
    assert child.returncode == -9
    trained, images = make_trained(), make_images(20)
    got = Store(tmp_path / "cache").read(trained, images)
    assert trained.model.seen == 2 + 20 - 8
    torch.testing.assert_close(got.means, compute(trained, images).means)


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_two_runs_at_once_share_the_work_and_agree(tmp_path):
    children = [spawn(tmp_path, tmp_path / "cache") for _ in range(2)]
    lines = [child.communicate()[0].split() for child in children]
    seen = [int(line[0]) for line in lines]
    assert sum(seen) == 20 + 2 * sum(count > 0 for count in seen)  # no image twice; who works looks at two first
    assert lines[0][1] == lines[1][1]


def test_a_part_that_one_run_works_on_is_left_to_it_by_another(tmp_path):
    trained, images = make_trained(), make_images(12)
    layers = select_layers(trained.model)
    observer = Observer(trained.model, layers, variance=False, head=FIND_HEAD)
    key = _key(trained, images, layers, False)
    one, other = (_Entry(tmp_path, key, len(images)) for _ in range(2))
    mine, theirs = one.claims(), other.claims()
    assert (next(mine), next(theirs)) == (0, 1)
    for entry, part in ((other, 1), (one, 0)):
        with entry.turn():
            entry.write(part, _observe(observer, trained, images, *entry.span(part)), 0.0)
    assert next(mine) == 2  # after its own part 0 it sees that part 1 is done
    mine.close()  # as if that run had died
    assert next(theirs) == 2
    with other.turn():
        other.write(2, _observe(observer, trained, images, *other.span(2)), 0.0)
    assert list(theirs) == []
    torch.testing.assert_close(other.open(layers).means, compute(trained, images).means)


def entry_of(root):
    return next(path for path in root.iterdir() if path.is_dir())


def test_a_changed_byte_is_noticed_and_only_its_part_is_computed_again(tmp_path):
    trained, images = make_trained(), make_images(10)
    whole = Store(tmp_path).read(trained, images).means.clone()
    path = entry_of(tmp_path) / "means.npy"
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)
    trained.model.seen = 0
    with pytest.warns(NeuralMeanWarning, match=r"are damaged \(1 of 3 parts have another digest\). The damaged parts"):
        got = Store(tmp_path).read(trained, images)
    assert trained.model.seen == 2 + 2  # the last part has two images
    torch.testing.assert_close(got.means, whole, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["means.npy", "logits.npy"])
def test_a_truncated_array_is_computed_again(tmp_path, name):
    trained, images = make_trained(), make_images(10)
    whole = Store(tmp_path).read(trained, images).means.clone()
    path = entry_of(tmp_path) / name
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.warns(NeuralMeanWarning, match=r"are damaged"):
        got = Store(tmp_path).read(trained, images)
    torch.testing.assert_close(got.means, whole, rtol=0, atol=0)


def test_an_array_of_another_shape_is_computed_again(tmp_path):
    trained, images = make_trained(), make_images(10)
    whole = Store(tmp_path).read(trained, images).means.clone()
    np.save(entry_of(tmp_path) / "means.npy", np.zeros((10, 3), np.float32))
    with pytest.warns(NeuralMeanWarning, match=r"means.npy holds float32 \(10, 3\)"):
        got = Store(tmp_path).read(trained, images)
    torch.testing.assert_close(got.means, whole, rtol=0, atol=0)


@pytest.mark.parametrize(
    "content", ["{", "[]", json.dumps({"widths": {}, "parts": [], "key": {}})], ids=["cut", "list", "other"]
)
def test_an_index_that_cannot_be_read_is_made_anew(tmp_path, content):
    trained, images = make_trained(), make_images(10)
    whole = Store(tmp_path).read(trained, images).means.clone()
    (entry_of(tmp_path) / "entry.json").write_text(content)
    with pytest.warns(NeuralMeanWarning, match=r"its index cannot be read"):
        got = Store(tmp_path).read(trained, images)
    torch.testing.assert_close(got.means, whole, rtol=0, atol=0)


def test_a_cache_that_is_a_file_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtefactError, match=r"Expected to cache features in .* Choose another cache folder"):
        Store(tmp_path / "file").read(make_trained(), make_images())


def test_a_full_disk_is_one_clear_error_and_what_is_done_stays(tmp_path, monkeypatch):
    trained, images = make_trained(), make_images(10)
    write_index, calls = features._Entry._write_index, []

    def fail_on_the_second(self):
        calls.append(1)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_index(self)

    monkeypatch.setattr(features._Entry, "_write_index", fail_on_the_second)
    with pytest.raises(ArtefactError, match=r"the disk is full. Choose another cache folder; finished parts stay"):
        Store(tmp_path).read(trained, images)
    trained.model.seen = 0
    Store(tmp_path).read(trained, images)
    assert trained.model.seen == 2 + 6


def test_a_model_without_a_head_has_no_logits(tmp_path):
    trained = make_trained()
    trained.model.fc = nn.Identity()
    got = Store(tmp_path).read(trained, make_images())
    assert got.logits is None
    assert got.feature is None
