"""Training within a budget: the plan, the sizes, what is kept over a kill, weights to start from, the probe."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from neuralmean.bench import models
from neuralmean.bench.data import ImageSet
from neuralmean.bench.train import Recipe, checkpoint_of, train, trainer
from neuralmean.bench.train.loop import Setting, resize, run
from neuralmean.bench.train.plan import plan, usable_sizes
from neuralmean.bench.train.precision import bfloat16_gain
from neuralmean.cli.training import parse_duration
from neuralmean.errors import InputError

SECONDS = {16: 60.0, 20: 90.0, 24: 130.0, 32: 230.0}
TINY = Recipe(epochs=2, batch_size=8, learning_rate=0.05)


def _images(n=32):
    rng = np.random.default_rng(0)
    return ImageSet.of(rng.integers(0, 256, (n, 32, 32, 3), np.uint8), np.arange(n) % 2, name="toy", split="train")


class TestPlan:
    @pytest.mark.parametrize("budget", [300, 700, 1050, 5000, 20_000])
    def test_fits_and_ends_at_the_largest_size(self, budget):
        found = plan(Recipe(epochs=200), SECONDS, budget)
        assert sum(SECONDS[size] * epochs for size, epochs in found.stages) <= budget
        assert sum(epochs for _, epochs in found.stages) == found.epochs
        sizes = [size for size, _ in found.stages]
        assert sizes == sorted(sizes)
        assert sizes[-1] == 32

    def test_more_time_never_means_fewer_epochs(self):
        epochs = [plan(Recipe(epochs=200), SECONDS, budget).epochs for budget in range(300, 6000, 50)]
        assert epochs == sorted(epochs)

    def test_the_whole_recipe_where_there_is_time(self):
        recipe = Recipe(epochs=3)
        assert plan(recipe, SECONDS, 10_000) is recipe

    def test_trained_weights_go_on_at_the_largest_size_and_half_the_rate(self):
        found = plan(Recipe(epochs=200), {32: 230.0}, 800, started=True)
        assert (found.stages, found.learning_rate, found.warmup) == (((32, 3),), 0.05, 0.0)

    def test_too_little_time_says_how_much_it_takes(self):
        with pytest.raises(InputError, match="at least one epoch, about 4 min, but got 60 s"):
            plan(Recipe(epochs=200), SECONDS, 60)

    @pytest.mark.parametrize(
        ("name", "sizes"),
        [("resnet34", (16, 20, 24, 32)), ("convnet4", (32,)), ("vit", (32,)), ("vgg19", (32,))],
    )
    def test_only_sizes_that_the_network_takes(self, name, sizes):
        assert usable_sizes(name) == sizes


def test_each_epoch_has_the_size_of_its_stage(tmp_path):
    class Probe:
        def __init__(self):
            self.weight, self.seen = torch.nn.Parameter(torch.zeros(1)), []

        def parameters(self):
            return [self.weight]

        def loss(self, images, labels, generator):
            self.seen.append(images.shape[-1])
            return self.weight.square().sum()

        def after_step(self):
            pass

        def state(self):
            return {"weight": self.weight}

    probe, left = Probe(), []
    setting = Setting(checkpoint=tmp_path / "c", identity={}, progress=lambda at: left.append(at.left))
    recipe = replace(TINY, epochs=3, batch_size=1, stages=((16, 2), (32, 1)))
    run(probe, torch.zeros(10, 3, 32, 32, dtype=torch.uint8), None, recipe, setting)
    assert probe.seen == [16] * 20 + [32] * 10
    assert len(left) == 3
    assert left[-1] == 0 < left[0]


def test_resizing_keeps_the_mean():
    images = torch.rand(2, 3, 32, 32)
    assert torch.allclose(resize(images, 16).mean((2, 3)), images.mean((2, 3)), atol=0.02)
    assert resize(images, 32) is images


KILLED = """
    import os, signal, sys
    import numpy as np
    from neuralmean.bench.data import ImageSet
    from neuralmean.bench.train import Recipe, train, trainer

    def progress(at):
        if len(sys.argv) > 2 and at.step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

    def measure(step, sizes):
        if len(sys.argv) == 2:
            sys.exit("measured again")
        return {size: size / 32 for size in sizes}

    trainer.measure = measure
    trainer.full_recipe = lambda name, dataset: Recipe(epochs=200, batch_size=8)
    rng = np.random.default_rng(0)
    images = ImageSet.of(rng.integers(0, 256, (40, 32, 32, 3), np.uint8), np.arange(40) % 4, name="toy", split="train")
    train("resnet20", images, out=sys.argv[1], budget=20.0, checkpoint_seconds=0, progress=progress, device="cpu")
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL here")
def test_a_killed_run_keeps_its_plan(tmp_path):
    def start(name, *kill_at):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path / name), *map(str, kill_at)]
        return subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode

    assert start("a.safetensors", 10) == -signal.SIGKILL
    assert checkpoint_of(tmp_path / "a.safetensors").exists()
    assert start("a.safetensors") == 0
    assert start("b.safetensors", -1) == 0
    one, other = (models.load_weights(tmp_path / f"{name}.safetensors") for name in "ab")
    assert json.loads(one.metadata["recipe"])["stages"] == json.loads(other.metadata["recipe"])["stages"] != []
    pairs = zip(one.model.state_dict().values(), other.model.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


class TestInit:
    def test_starts_from_the_weights_and_keeps_their_normalisation(self, tmp_path):
        first = train("resnet20", _images(), out=tmp_path / "a.safetensors", recipe=TINY)
        still = replace(TINY, epochs=1, learning_rate=1e-12, weight_decay=0.0)
        second = train(
            "resnet20", _images(24), out=tmp_path / "b.safetensors", recipe=still, init=tmp_path / "a.safetensors"
        )
        assert torch.allclose(first.model.linear.weight, second.model.linear.weight, atol=1e-6)
        assert (second.mean, second.std) == (first.mean, first.std)
        with safe_open(tmp_path / "b.safetensors", "pt") as handle:
            assert json.loads(handle.metadata()["init"])["weights"] == "a.safetensors"

    def test_of_another_architecture_is_refused(self, tmp_path):
        train("resnet20", _images(), out=tmp_path / "a.safetensors", recipe=TINY, epochs=1)
        with pytest.raises(InputError, match="Expected `init` to hold 'resnet32' with 2 classes"):
            train("resnet32", _images(), out=tmp_path / "b.safetensors", recipe=TINY, init=tmp_path / "a.safetensors")


class TestPrecision:
    @pytest.mark.skipif(not hasattr(signal, "SIGILL"), reason="no SIGILL here")
    def test_an_illegal_instruction_ends_the_probe_alone(self):
        assert bfloat16_gain("import os, signal; os.kill(os.getpid(), signal.SIGILL)") is None

    @pytest.mark.parametrize(("printed", "gain"), [("2.0 1.0", 2.0), ("1.0", None), ("nonsense here", None)])
    def test_reads_what_the_probe_prints(self, printed, gain):
        assert bfloat16_gain(f"print({printed!r})") == gain

    @pytest.mark.parametrize(("gain", "chosen"), [(None, "float32"), (1.05, "float32"), (1.9, "bfloat16")])
    def test_auto_takes_what_is_faster(self, gain, chosen, monkeypatch):
        monkeypatch.setattr(trainer, "bfloat16_gain", lambda: gain)
        assert trainer._choose_precision("auto", torch.device("cpu"), {}) == chosen

    def test_a_run_that_has_begun_keeps_its_own(self, monkeypatch):
        monkeypatch.setattr(trainer, "bfloat16_gain", lambda: 1.0)
        assert trainer._choose_precision("auto", torch.device("cpu"), {"precision": "bfloat16"}) == "bfloat16"


def test_a_budget_and_epochs_exclude_each_other(tmp_path):
    with pytest.raises(InputError, match="Expected either a `budget` or `epochs` and `recipe`, but got both"):
        train("resnet20", _images(), out=tmp_path / "a.safetensors", budget=60, epochs=1)


@pytest.mark.parametrize("text", ["", "3", "h", "3 h", "-1h", "0h", "1d"])
def test_times_that_make_no_sense(text):
    with pytest.raises(InputError, match="Expected a time such as 90s, 45m, 3h or 1h30m"):
        parse_duration(text)
