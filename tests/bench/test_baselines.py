"""The one interface of methods: what a method may see, what it costs, and the first methods behind it."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean.bench import baselines, protocols
from neuralmean.bench.baselines.base import Method, View
from neuralmean.bench.baselines.first_layers import FirstLayers
from neuralmean.bench.baselines.measure import Meter, metered
from neuralmean.bench.baselines.ours import NeuralMean
from neuralmean.bench.baselines.parts import PartOfLayers
from neuralmean.bench.baselines.trial import fit_method, run_trial, score_set, sources
from neuralmean.bench.data.imageset import ImageSet
from neuralmean.bench.features import Features, compute
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.protocols import EvalSet, FitSet
from neuralmean.errors import InputError, NeuralMeanWarning, NotFittedError
from neuralmean.models import allocator


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 5, stride=3)
        self.bn = nn.BatchNorm2d(4)
        self.bn.running_mean = torch.tensor([0.1, 0.2, 0.3, 0.4])
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return self.fc(self.bn(self.conv(x)).relu().mean(dim=(2, 3)))


@pytest.fixture
def trained():
    return TrainedModel(Toy().eval(), "toy", 3, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))


def make_images(count, *, seed, name, split, low=0, high=256):
    pixels = np.random.default_rng(seed).integers(low, high, (count, 32, 32, 3), dtype=np.uint8)
    return ImageSet.of(pixels, np.arange(count) % 3, name=name, split=split)


@pytest.fixture
def draw():
    inside = FitSet.of(make_images(30, seed=0, name="cifar10", split="train"), apart_from=[])
    outside = FitSet.of(make_images(30, seed=1, name="svhn", split="train", high=90), apart_from=[])
    return protocols.full_access(inside, outside)[0]


@pytest.fixture
def judged():
    inside = make_images(20, seed=2, name="cifar10", split="test")
    outside = make_images(20, seed=3, name="svhn", split="test", high=90)
    return [EvalSet(inside), EvalSet(outside)]


def reader_of(trained):
    def read(images, *, variance):
        return compute(trained, images, variance=variance)

    return read


def logits_reader(logits):
    def read(images, *, variance):
        return Features((), torch.zeros(len(logits), 0), None, logits, None, 0.0)

    return read


def view_of(trained, images, reads, reader=None):
    return View(trained, images, None, reads=frozenset(reads), reader=reader or reader_of(trained), meter=Meter())


def score_logits(name, trained, rows):
    logits = torch.tensor(rows)
    images = make_images(len(rows), seed=0, name="x", split="test")
    return baselines.make(name).score(view_of(trained, images, {"logits"}, logits_reader(logits)))


def test_msp_is_minus_the_largest_probability(trained):
    scores = score_logits("msp", trained, [[0.0, 0.0], [math.log(3.0), 0.0]])
    torch.testing.assert_close(scores, torch.tensor([-0.5, -0.75]).double())


def test_msp_tells_very_confident_images_apart(trained):
    scores = score_logits("msp", trained, [[20.0, 0.0], [25.0, 0.0]])
    assert scores[0] > scores[1]


def test_energy_is_minus_logsumexp(trained):
    scores = score_logits("energy", trained, [[0.0, 0.0], [math.log(3.0), 0.0]])
    torch.testing.assert_close(scores, torch.tensor([-math.log(2.0), -math.log(4.0)]).double())


class TestRegistry:
    def test_names_are_those_of_the_methods(self):
        assert baselines.names()[:2] == ["msp", "energy"]
        assert all(baselines.make(name).name == name for name in baselines.names())

    def test_a_typo_gets_a_hint(self):
        with pytest.raises(InputError, match=r"Expected the name of a method, but got 'enrgy'. Did you mean 'energy'?"):
            baselines.make("enrgy")

    def test_an_experiment_gets_the_methods_that_are_there_in_its_order(self):
        assert baselines.resolve(None, ["energy", "not-there-yet", "msp"]) == ["energy", "msp"]
        assert baselines.resolve(["msp"], ["energy", "msp"]) == ["msp"]
        assert baselines.resolve(["quick"], ["energy", "msp"]) == ["energy", "msp"]

    def test_a_typo_among_the_methods_asked_for_is_an_error(self):
        with pytest.raises(InputError, match=r"Did you mean 'msp'"):
            baselines.resolve(["mspp"], ["energy", "msp"])


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("msp", (0, 0)),
        ("odin", (100, 100)),
        ("mahalanobis", (6000, 100)),
        ("gram", (6000, 0)),
        ("cntk", (100, 0)),
        ("scntk", (100, 0)),
        ("oe", (1024, 1024)),
        ("acet", (1024, 0)),
        ("g-odin", (1024, 0)),
        ("1d", (2000, 0)),
        ("good", (4096, 4096)),
        ("dk", (5000, 0)),
        ("ours-mlp", (6000, 5998)),
    ],
)
def test_a_method_says_how_many_of_the_images_it_uses(name, used, trained):
    assert baselines.make(name).n_used(trained, 6000, 5998) == used


@pytest.mark.parametrize("name", baselines.names())
class TestEveryMethod:
    def test_it_says_what_it_is(self, name):
        method = baselines.make(name)
        assert method.title
        assert method.paper

    def test_it_scores_one_number_per_image_and_leaves_the_model_alone(self, name, trained, draw, judged):
        before = {key: value.clone() for key, value in trained.model.state_dict().items()}
        method, read = baselines.make(name), reader_of(trained)
        fit_method(method, trained, draw, read)
        scores, cost = score_set(method, trained, judged[1], read)
        assert scores.shape == (20,)
        assert np.isfinite(scores).all()
        assert cost.passes >= (0 if name in ("cntk", "scntk") else 20)  # kernels of an architecture: no model runs
        for key, value in trained.model.state_dict().items():
            torch.testing.assert_close(value, before[key], rtol=0, atol=0)
        assert not any(module._forward_pre_hooks for module in trained.model.modules())
        assert not trained.model.training

    def test_the_same_seed_gives_the_same_scores(self, name, trained, draw, judged):
        scores = [
            run_trial(lambda: baselines.make(name), trained, draw, judged[:1], reader_of(trained)) for _ in range(2)
        ]
        np.testing.assert_array_equal(scores[0][0].scores, scores[1][0].scores)

    def test_an_image_scores_the_same_alone(self, name, trained, draw, judged):
        method, read = baselines.make(name), reader_of(trained)
        fit_method(method, trained, draw, read)
        together, _ = score_set(method, trained, judged[0], read)
        alone, _ = score_set(method, trained, EvalSet(judged[0].source.take(slice(3, 4))), read)
        np.testing.assert_allclose(alone, together[3:4], rtol=1e-4, atol=1e-5)


class TestOurs:
    def test_the_average_is_the_mean_magnitude_of_the_discrepancy(self, trained, draw, judged):
        method, read = baselines.make("ours-avg"), reader_of(trained)
        fit_method(method, trained, draw, read)
        scores, _ = score_set(method, trained, judged[0], read)
        pixels = trained.preprocess(judged[0].source.images)
        with torch.no_grad():
            means = trained.model.conv(pixels).mean(dim=(2, 3))
        expected = (means - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().mean(dim=1)
        np.testing.assert_allclose(scores, expected.numpy(), rtol=1e-5)

    def test_without_batch_norms_the_reference_is_the_mean_of_the_fit(self, draw, judged):
        model = nn.Sequential(nn.Conv2d(3, 2, 5), nn.Flatten(), nn.LazyLinear(3))
        model(torch.zeros(1, 3, 32, 32))
        bare = TrainedModel(model.eval(), "bare", 3, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
        method, read = baselines.make("ours-avg"), reader_of(bare)
        fit_method(method, bare, draw, read)
        scores, _ = score_set(method, bare, judged[0], read)
        with torch.no_grad():
            fit, test = (
                model[0](bare.preprocess(one.source.images)).mean(dim=(2, 3)) for one in (draw.inliers, judged[0])
            )
        np.testing.assert_allclose(scores, (test - fit.mean(dim=0)).abs().mean(dim=1).numpy(), rtol=1e-4)

        assert method.n_used(bare, 30, 30) == (30, 0)

    def test_with_buffers_and_nothing_to_learn_no_image_is_read(self, trained, draw):
        def refuse(images, *, variance):
            raise AssertionError("nothing is learnt from images")

        method = baselines.make("ours-avg")
        cost = fit_method(method, trained, draw, refuse)
        assert cost.passes == 0
        assert method.n_used(trained, 30, 30) == (0, 0)
        assert NeuralMean("average", statistic="both").n_used(trained, 30, 30) == (30, 0)
        assert baselines.make("ours-lr").n_used(trained, 30, 20) == (30, 20)

    def test_both_statistics_are_standardised_on_the_inliers(self, trained, draw):
        method = NeuralMean("average", statistic="both")
        fit_method(method, trained, draw, reader_of(trained))
        view = View(trained, draw.inliers.source, None, reads=method.reads, reader=reader_of(trained), meter=Meter())
        vector = method._observe(view).vector
        assert vector.shape == (30, 8)
        torch.testing.assert_close(vector.mean(dim=0), torch.zeros(8), atol=1e-4, rtol=0)
        torch.testing.assert_close(vector.std(dim=0, correction=0), torch.ones(8), atol=1e-3, rtol=0)

    def test_scoring_before_fitting_is_an_error(self, trained, judged):
        with pytest.raises(NotFittedError, match=r"The method 'ours-avg' is not fitted yet. Call `fit` before `score`"):
            score_set(baselines.make("ours-avg"), trained, judged[0], reader_of(trained))

    def test_the_seed_of_the_draw_reaches_a_scorer_that_has_one(self, trained, draw, judged):
        from dataclasses import replace

        fits = [replace(draw, seed=seed) for seed in (0, 0, 1)]
        made = lambda: baselines.make("ours-mlp")  # noqa: E731
        one, same, other = (run_trial(made, trained, fit, judged[:1], reader_of(trained))[0].scores for fit in fits)
        assert (one == same).all()
        assert (one != other).any()

    def test_logistic_tells_dark_images_from_others(self, trained, draw, judged):
        inside, outside = run_trial(lambda: baselines.make("ours-lr"), trained, draw, judged, reader_of(trained))
        assert inside.scores.max() < outside.scores.min()


class TestView:
    def test_a_method_gets_only_what_it_said_it_reads(self, trained):
        images = make_images(5, seed=0, name="x", split="test")
        view = view_of(trained, images, {"logits"})
        assert view.logits.shape == (5, 3)
        for name in ("means", "variances", "feature", "labels", "pixels", "layers"):
            with pytest.raises(InputError, match=r"Expected a method to read only what it declares"):
                getattr(view, name)

    def test_rows_are_those_of_the_fit_set(self, trained):
        images = make_images(9, seed=0, name="x", split="train")
        rows = np.array([1, 4, 7])
        view = View(
            trained,
            images,
            rows,
            reads=frozenset({"labels", "images", "feature"}),
            reader=reader_of(trained),
            meter=Meter(),
        )
        assert view.labels.tolist() == [1, 1, 1]
        np.testing.assert_array_equal(view.pixels, images.images[rows])
        torch.testing.assert_close(view.feature, compute(trained, images).feature[torch.from_numpy(rows)])
        torch.testing.assert_close(torch.cat(list(view.batches(2))), trained.preprocess(images.images[rows]))
        assert len(view) == 3

    def test_a_part_of_a_view_is_its_rows_in_the_order_asked_for(self, trained):
        images = make_images(9, seed=0, name="x", split="train")
        view = View(
            trained,
            images,
            np.array([1, 4, 7]),
            reads=frozenset({"images", "feature"}),
            reader=reader_of(trained),
            meter=Meter(),
        )
        part = view.take(np.array([2, 0]))
        assert len(part) == 2
        np.testing.assert_array_equal(part.pixels, images.images[[7, 1]])
        torch.testing.assert_close(part.feature, compute(trained, images).feature[[7, 1]])

    def test_a_set_without_labels_says_so(self, trained):
        images = ImageSet.of(np.zeros((2, 32, 32, 3), np.uint8), None, name="textures", split="test")
        with pytest.raises(InputError, match=r"Expected the set 'textures' to have labels, but it has none"):
            _ = view_of(trained, images, {"labels"}).labels

    def test_a_model_without_a_head_says_so(self, trained):
        images = make_images(2, seed=0, name="x", split="test")
        with pytest.raises(InputError, match=r"Expected 'toy' to have a class head, but it has none, and so no logits"):
            _ = view_of(trained, images, {"logits"}, headless).logits


def headless(images, *, variance):
    return Features((), torch.zeros(len(images), 0), None, None, None, 0.0)


class Perturbing(Method):
    """Needs gradients: two passes an image to score, one to fit."""

    name, title, paper = "perturbing", "Perturbing", "none"
    reads = frozenset({"images"})

    def fit(self, context):
        self.model = context.model
        for batch in context.inliers.batches(8):
            self.model(batch)

    def score(self, examples):
        found = []
        for batch in examples.batches(8):
            batch.requires_grad_()
            (gradient,) = torch.autograd.grad(self.model(batch).sum(), batch)
            found.append(self.model(batch.detach() - 0.01 * gradient).amax(dim=1).detach())
        return torch.cat(found)


class TestCost:
    def test_passes_of_the_model_are_counted(self, trained, draw, judged):
        (scored,) = run_trial(Perturbing, trained, draw, judged[:1], reader_of(trained))
        assert scored.fit.passes == 30
        assert scored.score.passes == 40
        assert scored.score.seconds > 0

    def test_a_cached_pass_counts_as_if_it_had_run(self, trained, draw, judged):
        def read(images, *, variance):
            return Features((), torch.zeros(len(images), 0), None, torch.zeros(len(images), 3), None, seconds=50.0)

        (scored,) = run_trial(lambda: baselines.make("msp"), trained, draw, judged[:1], read)
        assert scored.score.passes == 20
        assert 50.0 <= scored.score.seconds < 51.0
        assert scored.fit.passes == 0

    def test_a_part_of_a_set_costs_its_part(self, trained):
        def read(images, *, variance):
            return Features((), torch.zeros(10, 0), None, torch.zeros(10, 3), None, seconds=50.0)

        with metered(trained.model) as watch:
            images = make_images(10, seed=0, name="x", split="train")
            view = View(trained, images, np.arange(2), reads=frozenset({"logits"}), reader=read, meter=watch.meter)
            _ = view.logits, view.logits
        assert watch.cost.passes == 2
        assert 10.0 <= watch.cost.seconds < 11.0

    def test_a_part_of_a_view_costs_its_part_and_nothing_once_the_whole_was_read(self, trained):
        images, costs = make_images(10, seed=0, name="x", split="train"), []
        for whole_first in (False, True):
            with metered(trained.model) as watch:
                view = View(
                    trained, images, None, reads=frozenset({"logits"}), reader=reader_of(trained), meter=watch.meter
                )
                _ = view.logits if whole_first else None
                _ = view.take(np.arange(3)).logits
            costs.append(watch.cost.passes)
        assert costs == [3, 10]

    def test_passes_run_to_fill_the_cache_are_not_counted_twice(self, trained, judged, draw):
        _, cost = score_set(baselines.make("msp"), trained, judged[0], reader_of(trained))
        assert cost.passes == 20

    def test_copies_of_the_model_count_too(self, trained):
        import copy

        with metered(trained.model) as watch:
            copy.deepcopy(trained.model)(torch.zeros(6, 3, 32, 32))
        assert watch.cost.passes == 6

    def test_the_model_leaves_as_it_came_also_after_an_error(self, trained):
        with pytest.raises(ZeroDivisionError), metered(trained.model):
            raise ZeroDivisionError
        assert not trained.model._forward_pre_hooks

    @pytest.mark.parametrize("kept", [False, True], ids=["given back", "kept by the allocator"])
    def test_the_peak_is_that_of_the_block(self, trained, kept):
        if kept:
            allocator.keep_freed()
            torch.ones(60_000_000)
        with metered(trained.model) as large:
            block = torch.ones(50_000_000)
            del block
        with metered(trained.model) as small:
            pass
        if large.cost.peak_mb is None:
            pytest.skip("this system does not report the peak")
        assert large.cost.peak_mb > 150
        assert small.cost.peak_mb < 50


class Counting(Method):
    name, title, paper = "counting", "Counting", "none"
    reads = frozenset({"logits"})
    fits = 0

    def fit(self, context):
        type(self).fits += 1

    def score(self, examples):
        return examples.logits[:, 0]


class TestTrial:
    def test_kept_scores_are_not_computed_again(self, tmp_path, trained, draw, judged):
        Counting.fits = 0
        runs = [run_trial(Counting, trained, draw, judged, reader_of(trained), cache=tmp_path) for _ in range(2)]
        assert Counting.fits == 1
        for first, again in zip(*runs, strict=True):
            np.testing.assert_array_equal(first.scores, again.scores)
            assert first.fit == again.fit
            assert first.score == again.score

    def test_a_new_set_is_scored_and_the_old_one_is_not(self, tmp_path, trained, draw, judged):
        run_trial(Counting, trained, draw, judged[:1], reader_of(trained), cache=tmp_path)
        asked = []

        def read(images, *, variance):
            asked.append(images.name)
            return compute(trained, images)

        run_trial(Counting, trained, draw, judged, read, cache=tmp_path)
        assert asked == ["svhn"]

    def test_another_draw_is_another_fit(self, tmp_path, trained, draw, judged):
        Counting.fits = 0
        for one in (draw, protocols.few_shot(draw.inliers, draw.outliers, draws=1)[0]):
            run_trial(Counting, trained, one, judged, reader_of(trained), cache=tmp_path)
        assert Counting.fits == 2

    def test_damaged_scores_are_computed_again_with_a_message(self, tmp_path, trained, draw, judged):
        first = run_trial(Counting, trained, draw, judged[:1], reader_of(trained), cache=tmp_path)
        (path,) = tmp_path.glob("*.npz")
        content = bytearray(path.read_bytes())
        content[80] ^= 0xFF  # inside the first array
        path.write_bytes(content)
        with pytest.warns(NeuralMeanWarning, match=r"The scores cached in .* are damaged .* They are computed again"):
            again = run_trial(Counting, trained, draw, judged[:1], reader_of(trained), cache=tmp_path)
        np.testing.assert_array_equal(first[0].scores, again[0].scores)

    def test_scores_of_another_shape_are_an_error(self, trained, judged):
        class Wrong(Counting):
            def score(self, examples):
                return examples.logits

        with pytest.raises(
            InputError, match=r"Expected 'counting' to return a tensor of shape \(20,\), but got \(20, 3\)"
        ):
            score_set(Wrong(), trained, judged[0], reader_of(trained))

    def test_outliers_are_there_only_for_methods_that_use_them(self, trained, draw, judged):
        seen = []

        class Looking(Counting):
            def fit(self, context):
                seen.append(context.outliers is None)

        run_trial(Looking, trained, draw, judged[:1], reader_of(trained))
        Looking.uses_outliers = True
        run_trial(Looking, trained, draw, judged[:1], reader_of(trained))
        assert seen == [True, False]

    def test_kept_scores_belong_to_all_the_code_that_a_method_can_reach(self):
        code = (
            "import sys, neuralmean.bench.baselines.trial, neuralmean.bench.baselines.parts\n"
            "for name, module in list(sys.modules.items()):\n"
            "    if name.split('.')[0] == 'neuralmean': print(module.__file__)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        loaded = {Path(line) for line in done.stdout.split()}
        assert any(path.match("bench/train/loop.py") for path in loaded)
        assert loaded <= set(sources())
        kinds = [type(baselines.make(name)) for name in baselines.names()]
        assert {Path(inspect.getfile(kind)) for kind in (*kinds, FirstLayers, PartOfLayers)} <= set(sources())
        assert not any("experiments" in path.parts for path in sources())

    def test_methods_that_need_logits_do_not_suit_a_model_without_classes(self, trained):
        from dataclasses import replace

        headless = replace(trained, num_classes=0)
        assert not baselines.make("msp").suits(headless)
        assert baselines.make("ours-avg").suits(headless)
