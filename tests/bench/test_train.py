"""The trainer: it learns, goes on after a kill to the same numbers, and writes a file that says what it is."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partialmethod

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from neuralmean.bench import models
from neuralmean.bench.data import ImageSet
from neuralmean.bench.train import Recipe, checkpoint_of, default_recipe, train, trainer
from neuralmean.bench.train.loop import Setting, learning_rate, make_optimizer, run
from neuralmean.bench.train.norms import add_norms
from neuralmean.bench.train.supervised import Supervised
from neuralmean.bench.train.trainer import colour_moments
from neuralmean.errors import ArtefactError, InputError

TINY = Recipe(epochs=3, batch_size=8, learning_rate=0.05)


def _images(n=32, classes=2, seed=0):
    """Noise whose mean brightness is the class: easy to learn, impossible to get right by chance."""
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    noise = rng.integers(0, 100, (n, 32, 32, 3))
    return ImageSet.of(
        (noise + 150 * labels[:, None, None, None] // (classes - 1)).astype(np.uint8), labels, name="toy", split="train"
    )


def _tensors(path):
    return load_file(path)


def _same(one, other):
    one, other = _tensors(one), _tensors(other)
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


class _StopError(Exception):
    pass


def _stop_at(step):
    def progress(at):
        if at.step >= step:
            raise _StopError

    return progress


class TestSmoke:
    def test_learns_what_is_easy(self, tmp_path):
        trained = train(
            "resnet20", _images(64), out=tmp_path / "a.safetensors", recipe=TINY, test_set=_images(64, seed=1)
        )
        assert models.accuracy(trained, _images(64, seed=1).images, _images(64, seed=1).labels) == 100.0
        assert trained.metadata["accuracy"] == "1.0000"
        assert models.expected_accuracy(trained) == 100.0

    def test_file_says_what_it_is(self, tmp_path):
        images = _images()
        train("resnet20", images, out=tmp_path / "a.safetensors", recipe=TINY, epochs=1, seed=5)
        with safe_open(tmp_path / "a.safetensors", "pt") as handle:
            metadata = handle.metadata()
        mean, std = colour_moments(images)
        assert metadata["architecture"] == "resnet20"
        assert metadata["dataset"] == "toy"
        assert metadata["mean"] == ",".join(map(str, mean))
        assert metadata["std"] == ",".join(map(str, std))
        assert json.loads(metadata["recipe"])["epochs"] == 1
        assert Recipe.from_mapping(json.loads(metadata["recipe"])) == replace(TINY, epochs=1)
        assert json.loads(metadata["images"]) == {"count": 32, "split": "train", "digest": images.digest}
        assert metadata["seed"] == "5"
        assert "accuracy" not in metadata

    def test_names_the_set_as_other_files_do(self, tmp_path):
        images = replace(_images(), name="cifar10")
        trained = train("resnet20", images, out=tmp_path / "a.safetensors", recipe=TINY, epochs=1, num_classes=10)
        assert trained.metadata["dataset"] == "CIFAR-10"
        assert trained.num_classes == 10

    def test_leaves_nothing_but_the_file(self, tmp_path):
        train("resnet20", _images(), out=tmp_path / "a.safetensors", recipe=TINY, epochs=1)
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]

    def test_reports_progress(self, tmp_path):
        seen = []
        train("resnet20", _images(), out=tmp_path / "a.safetensors", recipe=TINY, progress=seen.append)
        assert [(at.step, at.steps, at.epoch, at.epochs) for at in seen] == [(10, 12, 3, 3), (12, 12, 3, 3)]
        assert all(at.loss > 0 and at.seconds > 0 for at in seen)

    def test_leaves_the_global_random_state_alone(self, tmp_path):
        state = torch.random.get_rng_state()
        train("vgg19", _images(2), out=tmp_path / "a.safetensors", recipe=replace(TINY, epochs=1, batch_size=2))
        assert torch.equal(torch.random.get_rng_state(), state)

    def test_moco_learns_without_labels(self, tmp_path):
        images = ImageSet.of(_images(2).images, None, name="toy", split="train")
        recipe = replace(default_recipe("moco-resnet34"), epochs=1, batch_size=2, queue=16)
        trained = train("moco-resnet34", images, out=tmp_path / "a.safetensors", recipe=recipe)
        assert trained.num_classes == 0
        assert not any("head" in key or key.startswith("1.") for key in _tensors(tmp_path / "a.safetensors"))


KILLED = """
    import os, signal, sys
    import numpy as np
    from neuralmean.bench.data import ImageSet
    from neuralmean.bench.train import Recipe, train

    def progress(at):
        if len(sys.argv) > 2 and at.step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

    rng = np.random.default_rng(0)
    images = ImageSet.of(rng.integers(0, 256, (40, 32, 32, 3), np.uint8), np.arange(40) % 4, name="toy", split="train")
    recipe = Recipe(epochs=3, batch_size=8, learning_rate=0.05, ema=0.9)
    train("resnet20", images, out=sys.argv[1], recipe=recipe, checkpoint_seconds=0, progress=progress, device="cpu")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_run_goes_on_to_the_same_weights(tmp_path):
    def start(name, *kill_at):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / name), *map(str, kill_at)]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode

    assert start("undisturbed.safetensors") == 0
    assert start("killed.safetensors", 10) == -signal.SIGKILL
    assert checkpoint_of(tmp_path / "killed.safetensors").exists()
    assert not (tmp_path / "killed.safetensors").exists()
    assert start("killed.safetensors") == 0
    assert _same(tmp_path / "undisturbed.safetensors", tmp_path / "killed.safetensors")


RESUMED = {
    "sgd": TINY,
    "smoothing_and_ema": replace(TINY, ema=0.9, label_smoothing=0.1, nesterov=False),
    "adamw_and_mixup": replace(TINY, optimizer="adamw", learning_rate=1e-3, mixup=0.8, ema=0.5, max_norm=1.0),
}


def _toy_task(recipe):
    """A classifier with everything that keeps a state or draws at random: batch norm and dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=4), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(), nn.Flatten(), nn.Linear(256, 2)
    )
    return Supervised(model, recipe=recipe, mean=(0.5,) * 3, std=(0.5,) * 3, num_classes=2)


@pytest.mark.parametrize("case", RESUMED)
@pytest.mark.parametrize("every", [0.0, 60.0], ids=["every_step", "at_the_end"])
def test_an_interrupted_run_goes_on_to_the_same_weights(case, every, tmp_path):
    recipe, images = RESUMED[case], _images(40)
    data = torch.from_numpy(images.images).permute(0, 3, 1, 2), torch.from_numpy(images.labels)
    setting = Setting(checkpoint=tmp_path / "a", identity={}, seed=7, checkpoint_seconds=every)
    undisturbed = _toy_task(recipe)
    run(undisturbed, *data, recipe, setting)
    stopped = replace(setting, checkpoint=tmp_path / "b", progress=_stop_at(10))
    with pytest.raises(_StopError):
        run(_toy_task(recipe), *data, recipe, stopped)
    assert stopped.checkpoint.exists() == (every == 0)
    resumed = _toy_task(recipe)
    run(resumed, *data, recipe, replace(stopped, progress=None))
    assert undisturbed.state().keys() == resumed.state().keys()
    assert all(torch.equal(value, resumed.state()[key]) for key, value in undisturbed.state().items())
    if recipe.ema:
        kept, average = resumed.result.state_dict(), resumed.average.state_dict()
        assert all(torch.equal(value, average[key]) for key, value in kept.items())


def test_norms_of_the_training_are_folded_into_the_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 2))
    names = list(model.state_dict())
    task = Supervised(model, recipe=replace(TINY, norms=True), mean=(0.5,) * 3, std=(0.5,) * 3, num_classes=2)
    images, labels = torch.rand(8, 3, 32, 32), torch.arange(8) % 2
    for step in range(20):
        task.loss(images, labels, torch.Generator().manual_seed(step))  # moves the running means
    task.model[0][1].weight.data.uniform_(0.5, 2)
    kept = task.result
    assert list(kept.state_dict()) == names
    expected = task.model.eval()(images)
    torch.testing.assert_close(kept(images), expected, rtol=1e-5, atol=1e-5)


def test_networks_with_norms_get_no_others():
    model = models.build("vit")
    before = len(list(model.modules()))
    add_norms(model)
    assert len(list(model.modules())) == before


def test_a_compiled_run_learns(tmp_path, monkeypatch):
    # Captured as for a compiler, but not compiled, which would take a minute.
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    trained = train("resnet20", _images(40), out=tmp_path / "a.safetensors", recipe=TINY, compiled=True)
    assert models.accuracy(trained, _images(40).images, _images(40).labels) > 90


def test_dropout_is_on_while_training():
    task = _toy_task(TINY)
    images, labels = torch.rand(8, 3, 32, 32), torch.zeros(8, dtype=torch.int64)
    losses = set()
    for seed in (1, 2):
        torch.manual_seed(seed)
        losses.add(task.loss(images, labels, torch.Generator().manual_seed(0)).item())
    assert len(losses) == 2


def test_ctrl_c_keeps_the_work_and_goes_on_to_the_same_weights(tmp_path):
    def interrupt(at):
        raise KeyboardInterrupt

    images = _images(40)
    train("resnet20", images, out=tmp_path / "a.safetensors", recipe=TINY)
    with pytest.raises(KeyboardInterrupt):
        train("resnet20", images, out=tmp_path / "b.safetensors", recipe=TINY, progress=interrupt)
    with safe_open(checkpoint_of(tmp_path / "b.safetensors"), "pt") as handle:
        assert json.loads(handle.metadata()["at"])["step"] == 10
    train("resnet20", images, out=tmp_path / "b.safetensors", recipe=TINY)
    assert _same(tmp_path / "a.safetensors", tmp_path / "b.safetensors")


class TestSeeds:
    def test_same_seed_same_weights_other_seed_others(self, tmp_path):
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            train("resnet20", _images(), out=tmp_path / f"{name}.safetensors", recipe=TINY, epochs=1, seed=seed)
        assert _same(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
        assert not _same(tmp_path / "a.safetensors", tmp_path / "c.safetensors")


class TestCheckpoint:
    @pytest.fixture
    def stopped(self, tmp_path):
        with pytest.raises(_StopError):
            train(
                "resnet20",
                _images(40),
                out=tmp_path / "a.safetensors",
                recipe=TINY,
                checkpoint_seconds=0,
                progress=_stop_at(10),
            )
        return tmp_path / "a.safetensors"

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"seed": 1}, "seed"),
            ({"recipe": replace(TINY, learning_rate=0.1)}, "recipe"),
            ({"num_classes": 5}, "num_classes"),
        ],
        ids=["seed", "recipe", "classes"],
    )
    def test_of_another_run_is_refused(self, stopped, change, named):
        message = f"to be a checkpoint of this run, but it is of another one: {named} differ"
        with pytest.raises(ArtefactError, match=message):
            train("resnet20", _images(40), out=stopped, **({"recipe": TINY} | change))
        assert checkpoint_of(stopped).exists()

    def test_of_other_images_is_refused(self, stopped):
        with pytest.raises(ArtefactError, match="of another one: images differ"):
            train("resnet20", _images(40, seed=1), out=stopped, recipe=TINY)

    def test_that_is_damaged_says_so(self, stopped):
        path = checkpoint_of(stopped)
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(ArtefactError, match="to be a checkpoint, but it is damaged"):
            train("resnet20", _images(40), out=stopped, recipe=TINY)

    def test_may_be_passed_over(self, stopped, tmp_path):
        other = tmp_path / "b.safetensors"
        train("resnet20", _images(40), out=stopped, recipe=TINY, seed=1, resume=False)
        train("resnet20", _images(40), out=other, recipe=TINY, seed=1)
        assert _same(stopped, other)

    def test_leftovers_of_a_kill_while_writing_are_removed(self, stopped):
        leftover = stopped.with_name(f".{checkpoint_of(stopped).name}.0123456789ab.nmd-tmp")
        leftover.write_bytes(b"part")
        train("resnet20", _images(40), out=stopped, recipe=TINY)
        assert [entry.name for entry in stopped.parent.iterdir()] == ["a.safetensors"]


class TestRefusing:
    def test_images_without_labels(self, tmp_path):
        images = ImageSet.of(_images().images, None, name="toy", split="train")
        with pytest.raises(InputError, match="Expected 'toy' to have labels to train 'resnet20' on, but it has none"):
            train("resnet20", images, out=tmp_path / "a.safetensors")

    def test_unknown_name(self, tmp_path):
        with pytest.raises(InputError, match="Expected the name of a model, but got 'resnet21'"):
            train("resnet21", _images(), out=tmp_path / "a.safetensors")

    def test_file_that_is_there(self, tmp_path):
        (tmp_path / "a.safetensors").write_bytes(b"precious")
        with pytest.raises(InputError, match=r"Expected no file at .*, but there is one. Pass `overwrite=True`"):
            train("resnet20", _images(), out=tmp_path / "a.safetensors", recipe=TINY)
        assert (tmp_path / "a.safetensors").read_bytes() == b"precious"
        train("resnet20", _images(), out=tmp_path / "a.safetensors", recipe=TINY, epochs=1, overwrite=True)
        assert models.load_weights(tmp_path / "a.safetensors").name == "resnet20"

    def test_bfloat16_on_a_cpu_without_it(self, tmp_path, monkeypatch):
        monkeypatch.setattr(trainer, "bfloat16_gain", lambda: None)
        with pytest.raises(InputError, match="Expected a CPU that computes in bfloat16, but a trial step of it failed"):
            train("resnet20", _images(), out=tmp_path / "a.safetensors", device="cpu", precision="bfloat16")

    def test_other_suffix(self, tmp_path):
        with pytest.raises(InputError, match=r"Expected `out` to end in \.safetensors, but got '.*a\.pt'"):
            train("resnet20", _images(), out=tmp_path / "a.pt")

    def test_missing_folder(self, tmp_path):
        with pytest.raises(InputError, match=r"Expected the folder '.*none' to exist, but it does not"):
            train("resnet20", _images(), out=tmp_path / "none" / "a.safetensors")

    def test_fewer_images_than_a_batch(self, tmp_path):
        with pytest.raises(InputError, match="Expected at least 128 images, one batch, but got 32"):
            train("resnet20", _images(), out=tmp_path / "a.safetensors")

    def test_labels_beyond_the_classes(self, tmp_path):
        with pytest.raises(InputError, match="Expected labels from 0 to 2, but got 0 to 3"):
            train("resnet20", _images(classes=4), out=tmp_path / "a.safetensors", num_classes=3)

    def test_images_of_one_colour(self):
        grey = ImageSet.of(np.full((2, 32, 32, 3), 7, np.uint8), None, name="toy", split="train")
        with pytest.raises(InputError, match="Expected images whose colours vary"):
            colour_moments(grey)

    def test_loss_that_runs_away(self, tmp_path):
        with pytest.raises(InputError, match=r"Expected the loss to be finite, but got (nan|inf) at step 10"):
            train("resnet20", _images(40), out=tmp_path / "a.safetensors", recipe=replace(TINY, learning_rate=1e30))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"epochs": 0}, "Expected `epochs` of a recipe to be a whole number above 0, but got 0"),
            ({"batch_size": 1.5}, "Expected `batch_size` of a recipe to be a whole number above 0, but got 1.5"),
            (
                {"learning_rate": 0.0},
                "Expected `learning_rate` and `temperature` of a recipe to be above 0, but got 0.0",
            ),
            ({"warmup": 1.0}, "Expected `warmup` of a recipe to be in [0, 1), but got 1.0"),
            ({"optimizer": "adam"}, "Expected `optimizer` of a recipe to be 'sgd' or 'adamw', but got 'adam'"),
        ],
        ids=["epochs", "batch_size", "learning_rate", "warmup", "optimizer"],
    )
    def test_recipes_that_make_no_sense(self, change, message):
        with pytest.raises(InputError, match=re.escape(message)):
            replace(TINY, **change)

    def test_unknown_keys_of_a_recipe(self):
        with pytest.raises(InputError, match=r"in a recipe, but got \['epoch'\]"):
            Recipe.from_mapping({"epoch": 3})


class TestRecipes:
    @pytest.mark.parametrize("name", models.names())
    def test_every_model_has_one(self, name):
        assert default_recipe(name).epochs > 0

    def test_digits_are_not_mirrored(self):
        assert default_recipe("convnet4").flip
        assert not default_recipe("convnet4", dataset="svhn").flip

    def test_rate_rises_then_falls_to_zero(self):
        recipe = Recipe(epochs=1, learning_rate=2.0, warmup=0.25)
        rates = [learning_rate(recipe, step, 12) for step in range(12)]
        assert rates[:4] == pytest.approx([2 / 3, 4 / 3, 2, 2])
        # A third of the way down the cosine of the nine steps that are left: 1 + cos 60 degrees.
        assert rates[6] == pytest.approx(1.5)
        assert rates[-1] == pytest.approx(1 + np.cos(np.pi * 8 / 9))

    def test_only_matrices_and_convolutions_decay(self):
        model = models.build("resnet20")
        optimizer = make_optimizer(list(model.parameters()), Recipe(epochs=1, weight_decay=0.1))
        decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
        names = {name for name, parameter in model.named_parameters() if id(parameter) in decayed}
        assert names == {name for name, _ in model.named_parameters() if "conv" in name or name == "linear.weight"}


class _Probe:
    """A task that remembers which images it saw."""

    def __init__(self):
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = []

    def parameters(self):
        return [self.weight]

    def loss(self, images, labels, generator):
        self.seen.append(labels.tolist())
        return (self.weight - 1).square().sum()

    def after_step(self):
        pass

    def state(self):
        return {"weight": self.weight}

    def load_state(self, state):
        self.weight.data.copy_(state["weight"])


def test_every_epoch_shows_every_image_once_in_another_order(tmp_path):
    probe = _Probe()
    images = torch.zeros(12, 3, 32, 32, dtype=torch.uint8)
    run(
        probe,
        images,
        torch.arange(12),
        replace(TINY, epochs=2, batch_size=4),
        Setting(checkpoint=tmp_path / "c", identity={}),
    )
    first, second = ([label for batch in part for label in batch] for part in (probe.seen[:3], probe.seen[3:]))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_colour_moments_are_those_of_numpy():
    images = _images()
    mean, std = colour_moments(images)
    scaled = images.images.reshape(-1, 3) / 255
    assert mean == pytest.approx(scaled.mean(0), abs=5e-5)
    assert std == pytest.approx(scaled.std(0), abs=5e-5)


class TestAccuracy:
    def test_counts_right_answers(self):
        class Red(nn.Module):
            def forward(self, x):
                return torch.stack([-x[:, 0, 0, 0], x[:, 0, 0, 0]], dim=1)

        trained = models.TrainedModel(Red(), "resnet20", 2, (0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
        images = np.zeros((4, 32, 32, 3), np.uint8)
        images[:2, ..., 0] = 255
        assert models.accuracy(trained, images, np.array([1, 0, 0, 0])) == 75.0

    def test_wants_a_class_head_and_labels(self):
        trained = models.untrained("resnet20", mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0))
        with pytest.raises(InputError, match="Expected one label per image, but got 1 for 2 images"):
            models.accuracy(trained, np.zeros((2, 32, 32, 3), np.uint8), np.zeros(1, np.int64))
        with pytest.raises(InputError, match="Expected a model with a class head, but got 'moco-resnet34'"):
            models.accuracy(
                replace(trained, name="moco-resnet34", num_classes=0), np.zeros((2, 32, 32, 3), np.uint8), [0, 0]
            )

    def test_expected_is_what_the_file_or_its_makers_say(self):
        trained = models.untrained("resnet20", mean=(0.5, 0.5, 0.5), std=(1.0, 1.0, 1.0))
        assert models.expected_accuracy(trained) is None
        assert models.expected_accuracy(replace(trained, metadata={"accuracy": "0.785"})) == pytest.approx(78.5)
        assert models.expected_accuracy(replace(trained, metadata={"accuracy": "good"})) is None
        known = {"source": "akamaster/pytorch_resnet_cifar10", "dataset": "CIFAR-10"}
        assert models.expected_accuracy(replace(trained, metadata=known)) == 91.73
