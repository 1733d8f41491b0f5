"""Methods that need images, gradients or training: each against an independent version of itself."""

from __future__ import annotations

import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from neuralmean.bench import baselines, protocols
from neuralmean.bench.baselines import (
    acet,
    cntk,
    energy_ft,
    finetune,
    godin,
    good,
    gram,
    mahalanobis,
    odin,
    oe,
    one_d,
    scntk,
)
from neuralmean.bench.baselines.activations import OUTPUT, capturing, convolutions, pooled, stages
from neuralmean.bench.baselines.base import View
from neuralmean.bench.baselines.finetune import Budget, Tuner, counted_copy, replace_head
from neuralmean.bench.baselines.gaussians import Gaussians
from neuralmean.bench.baselines.measure import Meter, metered
from neuralmean.bench.baselines.perturbation import hold_out, quality, signs
from neuralmean.bench.baselines.trial import fit_method, score_set
from neuralmean.bench.data.imageset import ImageSet
from neuralmean.bench.models import TrainedModel, build
from neuralmean.bench.protocols import EvalSet, FitSet
from neuralmean.errors import InputError, LayerNotFiredError, NeuralMeanWarning, NotFittedError
from neuralmean.models.fingerprint import fingerprint

STD = (0.2, 0.25, 0.5)


@pytest.fixture(scope="module")
def _pytorch_ood():
    """Import pytorch-ood or skip; its torchvision may warn about codecs that nothing here uses."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("pytorch_ood.detector", reason="pytorch-ood is not installed", exc_type=ImportError)


class Net(nn.Module):
    """Two stages and a head; smooth, so that gradients are never zero."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 5, stride=3)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.Softplus()
        self.conv = nn.Conv2d(4, 6, 3, stride=2)
        self.fc = nn.Linear(6, 3)

    def forward(self, x):
        x = self.act(self.bn(self.stem(x)))
        return self.fc(self.act(self.conv(x)).mean(dim=(2, 3)))


@pytest.fixture
def trained():
    return TrainedModel(Net().eval(), "toy", 3, (0.5, 0.5, 0.5), STD)


def make_images(count, *, seed, name, split, high=256):
    pixels = np.random.default_rng(seed).integers(0, high, (count, 32, 32, 3), dtype=np.uint8)
    return ImageSet.of(pixels, np.arange(count) % 3, name=name, split=split)


@pytest.fixture
def draw():
    inside = FitSet.of(make_images(30, seed=0, name="cifar10", split="train"), apart_from=[])
    outside = FitSet.of(make_images(30, seed=1, name="svhn", split="train", high=90), apart_from=[])
    return protocols.full_access(inside, outside)[0]


@pytest.fixture
def batch(trained):
    return trained.preprocess(make_images(8, seed=5, name="x", split="test").images)


def no_features(images, *, variance):
    raise AssertionError("this method reads images only")


def fitted(name, trained, draw):
    from neuralmean.bench.features import compute

    method = baselines.make(name)
    fit_method(method, trained, draw, lambda images, *, variance: compute(trained, images, variance=variance))
    return method


def score(method, trained, images):
    from neuralmean.bench.features import compute

    return score_set(
        method, trained, EvalSet(images), lambda images, *, variance: compute(trained, images, variance=variance)
    )[0]


class TestActivations:
    def test_stages_are_the_first_layer_and_the_last_output_at_each_resolution(self, batch):
        for name, expected in {
            "resnet20": [("conv1", 0), ("layer1.2", 0), ("layer2.2", 0), ("layer3.2", 0)],
            "densenet100": [("conv1", 0), ("block1", 0), ("block2", 0), ("relu", 0)],
            "convnet4": [("conv1", 0), ("relu", 0), ("relu", 1), ("relu", 2), ("relu", 3), ("pool", 0)],
        }.items():
            assert stages(build(name), batch[:1]) == expected, name

    def test_a_model_of_one_resolution_gives_four_layers(self, batch):
        assert len(stages(build("vit"), batch[:1])) >= 4

    def test_a_module_that_runs_twice_is_told_apart_by_its_calls(self, trained, batch):
        with torch.no_grad(), capturing(trained.model, [("act", 1), ("act", 0), OUTPUT]) as run:
            second, first, output = run(batch)
            torch.testing.assert_close(first, F.softplus(trained.model.bn(trained.model.stem(batch))))
            torch.testing.assert_close(second, F.softplus(trained.model.conv(first)))
            torch.testing.assert_close(output, trained.model.fc(pooled(second)))

    def test_a_pass_ends_where_nothing_more_is_wanted(self, trained, batch):
        seen = []
        trained.model.fc.register_forward_hook(lambda *_: seen.append(1))
        with capturing(trained.model, [("stem", 0)], stop=True) as run:
            run(batch)
        assert not seen

    def test_every_convolution_is_found_in_the_order_of_the_pass(self, trained, batch):
        assert convolutions(trained.model, batch) == [("stem", 0), ("conv", 0)]

    def test_tokens_are_averaged_over_tokens(self):
        torch.testing.assert_close(pooled(torch.arange(6.0).view(1, 3, 2)), torch.tensor([[2.0, 3.0]]))

    def test_no_hook_stays_also_after_an_error(self, trained, batch):
        with pytest.raises(ZeroDivisionError), capturing(trained.model, [("stem", 0)]):
            raise ZeroDivisionError
        assert not any(module._forward_hooks for module in trained.model.modules())

    def test_a_layer_that_takes_no_part_is_an_error(self, trained, batch):
        with (
            capturing(trained.model, [("stem", 1)]) as run,
            pytest.raises(LayerNotFiredError, match=r"Expected 'stem' to take part in the pass, but it did not"),
        ):
            run(batch)

    def test_a_model_without_positions_is_an_error(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
        with pytest.raises(InputError, match=r"Expected Sequential to have layers with positions"):
            stages(model, torch.zeros(1, 3, 2, 2))


class TestPerturbation:
    def test_a_step_goes_against_the_gradient_in_units_of_the_image(self):
        images = torch.tensor([1.0, -2.0, 3.0]).view(1, 3, 1, 1)
        found = signs(images, lambda x: (x**2).sum(dim=(1, 2, 3)), STD)
        torch.testing.assert_close(found.flatten(), torch.tensor([5.0, -4.0, 2.0]))

    def test_the_validation_part_and_the_rest_are_apart_and_depend_on_the_seed(self):
        parts, again, other = (hold_out(100, seed=seed, share=0.2) for seed in (0, 0, 1))
        assert sorted([*parts.validation, *parts.rest]) == list(range(100))
        assert len(parts.validation) == 20
        np.testing.assert_array_equal(parts.validation, again.validation)
        assert (parts.validation != other.validation).any()
        assert len(hold_out(1000, seed=0).validation) == 100

    def test_images_that_a_copy_is_trained_on_are_among_those_held_out(self, trained, draw):
        view = View(trained, draw.inliers.source, None, reads=frozenset({"images"}), reader=no_features, meter=Meter())
        _, rows = finetune._pixels(view, Budget(images=5), seed=3)
        assert set(rows.tolist()) < set(hold_out(30, seed=3, share=1.0, most=9).validation.tolist())

    def test_quality_is_tnr95_then_auroc(self):
        assert quality(torch.tensor([0.0, 1.0]), torch.tensor([0.5, 2.0])) == (50.0, 75.0)


class TestOdin:
    @pytest.mark.parametrize(("temperature", "step"), [(1.0, 0.0), (10.0, 0.002), (1000.0, 0.0014)])
    @pytest.mark.usefixtures("_pytorch_ood")
    def test_it_agrees_with_pytorch_ood(self, trained, batch, temperature, step):
        from pytorch_ood.detector import ODIN

        peer = ODIN(trained.model, eps=step, temperature=temperature, norm_std=list(STD))
        found = odin.odin(trained.model, batch, temperature, step, STD)
        np.testing.assert_allclose(found.numpy(), peer.predict(batch).detach().numpy(), rtol=1e-5)

    def test_the_grid_holds_every_pair_in_order(self, trained, batch):
        grid = odin._grid(trained, iter([batch[:5], batch[5:]]))
        assert grid.shape == (len(odin.TEMPERATURES) * len(odin.STEPS), 8)
        expected = odin.odin(trained.model, batch, odin.TEMPERATURES[1], odin.STEPS[3], STD)
        torch.testing.assert_close(grid[len(odin.STEPS) + 3], expected)

    def test_the_best_pair_on_the_validation_part_is_chosen(self, trained, draw):
        method = fitted("odin", trained, draw)
        tuned = quality(*(_odin_scores(trained, one, method.temperature, method.step) for one in _sets(draw)))
        pairs = [(t, e) for t in odin.TEMPERATURES for e in odin.STEPS]
        others = [quality(*(_odin_scores(trained, one, *pair) for one in _sets(draw))) for pair in pairs]
        assert tuned == max(others)

    def test_without_outliers_the_authors_values_stay(self, trained, draw):
        from dataclasses import replace

        from neuralmean.bench.baselines.base import Context

        method = baselines.make("odin")
        view = View(trained, draw.inliers.source, None, reads=method.reads, reader=no_features, meter=Meter())
        context = Context(trained, view, view, 0)
        method.fit(replace(context, outliers=None))
        assert (method.temperature, method.step) == (1000.0, 0.0014)


def _sets(draw):
    return draw.inliers.source, draw.outliers.source


def _odin_scores(trained, images, temperature, step):
    return odin.odin(trained.model, trained.preprocess(images.images), temperature, step, STD)


class TestGaussians:
    def test_distances_agree_with_a_loop_over_sklearn(self):
        from sklearn.covariance import EmpiricalCovariance

        features, labels, test = torch.randn(60, 5), torch.arange(60) % 3, torch.randn(7, 5)
        means = [features[labels == c].double().mean(dim=0) for c in range(3)]
        centred = torch.stack([features[i].double() - means[labels[i]] for i in range(60)])
        peer = EmpiricalCovariance(assume_centered=True).fit(centred.numpy())
        expected = [min(float(peer.mahalanobis((x.double() - m).numpy()[None])[0]) for m in means) for x in test]
        found = Gaussians.of(features, labels).distances(test)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-8)

    @pytest.mark.usefixtures("_pytorch_ood")
    def test_distances_agree_with_pytorch_ood(self):
        from pytorch_ood.detector import Mahalanobis

        features, labels, test = torch.randn(60, 5), torch.arange(60) % 3, torch.randn(7, 5)
        peer = Mahalanobis(None).fit_features(features, labels)  # half the distance, covariance not divided by N
        found = Gaussians.of(features, labels).distances(test)
        np.testing.assert_allclose(found.numpy(), peer.predict_features(test).numpy() * 2 * 60, rtol=1e-4)

    def test_a_channel_that_never_changes_and_a_class_without_images_are_no_obstacle(self):
        features = torch.cat([torch.randn(20, 2), torch.ones(20, 1)], dim=1)
        found = Gaussians.of(features, torch.arange(20) % 2 * 5)
        assert found.means.shape == (2, 3)
        assert found.whitening.shape == (3, 2)
        assert found.distances(features).isfinite().all()


class TestMahalanobis:
    def test_it_is_the_logistic_of_the_distances_after_each_layers_own_step(self, trained, draw):
        method = fitted("mahalanobis", trained, draw)
        method.step = 0.0014
        images = make_images(6, seed=9, name="x", split="test")
        expected = _reference_mahalanobis(method, trained.model, trained.preprocess(images.images))
        np.testing.assert_allclose(score(method, trained, images), expected, rtol=1e-4, atol=1e-6)

    def test_the_gaussians_do_not_see_the_validation_part(self, trained, draw):
        method = fitted("mahalanobis", trained, draw)
        parts = hold_out(30, seed=draw.seed, share=0.2)
        pixels = trained.preprocess(draw.inliers.source.images[parts.rest])
        with torch.no_grad():
            features = trained.model.stem(pixels).mean(dim=(2, 3))
        labels = torch.from_numpy(draw.inliers.source.labels[parts.rest])
        torch.testing.assert_close(method._gaussians[0].means, Gaussians.of(features, labels).means)

    def test_dark_images_are_told_apart(self, trained, draw):
        method = fitted("mahalanobis", trained, draw)
        inside, outside = (make_images(20, seed=8, name="x", split="test", high=high) for high in (256, 90))
        assert score(method, trained, inside).max() < score(method, trained, outside).min()

    def test_the_logistic_agrees_with_sklearn_on_standardised_distances(self):
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        near, far = torch.randn(30, 3).double() + 5, torch.randn(40, 3).double() * 2 + 7
        weights, offset = mahalanobis.logistic(near, far)
        rows, target = torch.cat([near, far]), [0] * 30 + [1] * 40
        peer = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
        expected = peer.fit(rows.numpy(), target).decision_function(rows.numpy())
        np.testing.assert_allclose((rows @ weights + offset).numpy(), expected, rtol=1e-6)

    def test_it_needs_outliers(self, trained, draw):
        from neuralmean.bench.baselines.base import Context

        method = baselines.make("mahalanobis")
        view = View(trained, draw.inliers.source, None, reads=method.reads, reader=no_features, meter=Meter())
        with pytest.raises(InputError, match=r"Expected OOD images to tune 'mahalanobis' on, but got none"):
            method.fit(Context(trained, view, None, 0))

    def test_without_outliers_it_is_the_mean_of_standardised_distances(self, trained, draw):
        method = fitted("mahalanobis-id", trained, draw)
        parts = hold_out(30, seed=draw.seed, share=0.2, most=30)
        with torch.no_grad():
            features = trained.model.stem(trained.preprocess(draw.inliers.source.images)).mean(dim=(2, 3))
        labels = torch.from_numpy(draw.inliers.source.labels)
        distances = Gaussians.of(features[parts.rest], labels[parts.rest]).distances(features)
        held = distances[torch.from_numpy(parts.validation)]
        expected = (distances - held.mean()) / held.std(correction=0)  # one batch norm: one layer
        np.testing.assert_allclose(score(method, trained, draw.inliers.source), expected.numpy(), rtol=1e-3, atol=1e-4)


def _reference_mahalanobis(method, model, batch):
    """Lee et al. 2018, Algorithm 1, image by image and layer by layer."""
    layers = [
        lambda x: model.stem(x),
        lambda x: model.bn(model.stem(x)),
        lambda x: F.softplus(model.bn(model.stem(x))),
        lambda x: model.conv(F.softplus(model.bn(model.stem(x)))),
        lambda x: F.softplus(model.conv(F.softplus(model.bn(model.stem(x))))),
    ]
    assert method._places == [("stem", 0), ("bn", 0), ("act", 0), ("conv", 0), ("act", 1)]
    scale = torch.tensor(STD).view(1, 3, 1, 1)
    found = []
    for image in batch:
        total = method._offset
        for layer, gauss, weight in zip(layers, method._gaussians, method._weights, strict=True):

            def confidence(x, layer=layer, gauss=gauss):
                feature = layer(x).mean(dim=(2, 3))[0].double()
                return max(-(feature - mean) @ gauss.precision @ (feature - mean) for mean in gauss.means)

            x = image[None].clone().requires_grad_()
            (gradient,) = torch.autograd.grad(confidence(x), x)
            moved = x.detach() + method.step * gradient.sign() / scale
            total = total - float(weight) * float(confidence(moved).detach())
        found.append(total)
    return np.array(found)


class TestGram:
    def test_row_sums_agree_with_the_matrices(self):
        activation = torch.randn(3, 4, 5, 5)
        found = gram.gram_rows(activation, powers=3).view(3, 3, 4)
        for n in range(3):
            for p in (1, 2, 3):
                maps = activation[n].reshape(4, 25).double() ** p
                rows = (maps @ maps.T).sum(dim=1)
                expected = rows.sign() * rows.abs() ** (1 / p)
                torch.testing.assert_close(found[n, p - 1].double(), expected, rtol=1e-4, atol=1e-4)

    def test_large_activations_do_not_overflow(self):
        assert gram.gram_rows(torch.full((1, 2, 3, 3), 1e4)).isfinite().all()

    def test_deviations_are_relative_to_the_end_of_the_range(self):
        low, high = torch.tensor([[2.0, 2.0, 2.0]]), torch.tensor([[4.0, 4.0, 4.0]])
        found = gram.deviation(torch.tensor([[1.0, 3.0, 6.0]]), low, high)
        torch.testing.assert_close(found, torch.tensor([0.5 + 0.5]), rtol=1e-5, atol=0)

    @pytest.mark.usefixtures("_pytorch_ood")
    def test_scores_agree_with_pytorch_ood(self, trained, draw):
        """The peer's scoring on our ranges and expectations; its own ranges are by label, ours by prediction."""
        from pytorch_ood.detector import Gram

        method = fitted("gram", trained, draw)
        peer = Gram(head=nn.Identity(), feature_layers=[], num_classes=3, num_poles_list=list(range(1, 11)))
        peer.num_layer = len(method._places)
        split = [[one.view(3, 10, -1)[:, p] for p in range(10)] for one in method._low]
        peer.feature_min = split
        peer.feature_max = [[one.view(3, 10, -1)[:, p] for p in range(10)] for one in method._high]
        peer.layer_norm = method._expected.float()
        images = make_images(6, seed=9, name="x", split="test")
        with torch.no_grad(), capturing(trained.model, [*method._places, OUTPUT]) as run:
            *features, logits = run(trained.preprocess(images.images))
            expected = peer.predict_structured(logits, features)
        np.testing.assert_allclose(score(method, trained, images), expected.numpy(), rtol=1e-3)

    def test_ranges_are_those_of_each_predicted_class(self, trained, draw):
        method = fitted("gram", trained, draw)
        parts = hold_out(30, seed=draw.seed, share=0.1, most=30)
        pixels = trained.preprocess(draw.inliers.source.images[parts.rest])
        with torch.no_grad():
            classes = trained.model(pixels).argmax(dim=1)
            rows = gram.gram_rows(trained.model.stem(pixels))
        assert method._places[0] == ("stem", 0)
        for c in classes.unique():
            torch.testing.assert_close(method._low[0][c], rows[classes == c].amin(dim=0), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(method._high[0][c], rows[classes == c].amax(dim=0), rtol=1e-4, atol=1e-5)
        assert all(low.isfinite().all() for low in method._low)

    def test_the_state_does_not_grow_with_the_images(self, trained, draw):
        sizes = []
        for count in (30, 60):
            images = FitSet.of(make_images(count, seed=0, name="cifar10", split="train"), apart_from=[])
            method = fitted("gram", trained, protocols.full_access(images, draw.outliers)[0])
            sizes.append(sum(one.numel() for one in (*method._low, *method._high, method._expected)))
        assert sizes[0] == sizes[1]


class TestFineTuning:
    def test_a_run_that_was_killed_goes_on_to_the_same_numbers(self, trained, draw, tmp_path, monkeypatch):
        from neuralmean.bench.train import loop

        whole = _fit_in("oe", trained, draw, tmp_path / "whole")
        steps, real = [], loop._step

        def dying(*args):
            if len(steps) == 1:
                raise KeyboardInterrupt
            steps.append(1)
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(loop, "_step", dying)
            patch.setattr(finetune, "Setting", partial(loop.Setting, checkpoint_seconds=-1.0))
            with pytest.raises(KeyboardInterrupt):
                _fit_in("oe", trained, draw, tmp_path / "cut")
        assert (tmp_path / "cut" / "oe.safetensors").exists()
        resumed = []
        monkeypatch.setattr(loop, "_step", lambda *args: resumed.append(args[-1]) or real(*args))
        again = _fit_in("oe", trained, draw, tmp_path / "cut")
        assert resumed == [1]  # of steps 0 and 1
        for key, value in whole.network.state_dict().items():
            torch.testing.assert_close(again.network.state_dict()[key], value, rtol=0, atol=0)

    def test_a_damaged_checkpoint_starts_anew_with_a_message(self, trained, draw, tmp_path):
        whole = _fit_in("oe", trained, draw, tmp_path)
        (tmp_path / "oe.safetensors").write_bytes(b"damaged")
        with pytest.warns(NeuralMeanWarning, match=r"it is damaged .* Training starts over"):
            again = _fit_in("oe", trained, draw, tmp_path)
        for key, value in whole.network.state_dict().items():
            torch.testing.assert_close(again.network.state_dict()[key], value, rtol=0, atol=0)

    def test_the_copy_learns(self, trained, draw):
        method = fitted("energy-ft", trained, draw)
        changed = [
            not torch.equal(mine, value)
            for mine, value in zip(
                method.network.state_dict().values(), trained.model.state_dict().values(), strict=True
            )
        ]
        assert any(changed)
        assert not method.network.training

    def test_a_copy_counts_as_the_model_and_is_left_with_it(self, trained, batch):
        copy = counted_copy(trained.model)
        with metered(trained.model) as watch:
            copy(batch)
        assert watch.cost.passes == 8
        assert not copy._forward_pre_hooks

    def test_more_images_than_the_budget_are_left_out(self, trained, draw):
        from neuralmean.bench.baselines.finetune import _pixels

        view = View(trained, draw.inliers.source, None, reads=frozenset({"images"}), reader=no_features, meter=Meter())
        images, rows = _pixels(view, Budget(images=7), 0)
        assert images.shape == (7, 3, 32, 32)
        np.testing.assert_array_equal(images.permute(0, 2, 3, 1).numpy(), draw.inliers.source.images[rows.numpy()])

    def test_outliers_that_are_not_there_are_an_error(self, trained):
        tuner = Tuner(trained.model, lambda *_: torch.zeros(()), trained)
        with pytest.raises(InputError, match=r"Expected OOD images to train with, but got none"):
            tuner.draw_outliers(3, torch.Generator())

    def test_a_model_without_a_linear_end_has_no_head_to_replace(self, batch):
        model = nn.Sequential(nn.Conv2d(3, 2, 32), nn.Flatten())
        with pytest.raises(InputError, match=r"Expected the model to end in a linear layer, but it does not"):
            replace_head(model, batch[:1], nn.Identity)

    def test_digits_are_not_mirrored(self, trained):
        from dataclasses import replace

        digits = replace(trained, metadata={"dataset": "SVHN"})
        assert not Tuner(trained.model, lambda *_: torch.zeros(()), digits)._flip
        assert Tuner(trained.model, lambda *_: torch.zeros(()), trained)._flip


def _fit_in(name, trained, draw, folder):
    method = baselines.make(name)
    fit_method(method, trained, draw, no_features, folder)
    return method


@pytest.mark.usefixtures("_pytorch_ood")
def test_exposure_loss_agrees_with_pytorch_ood():
    from pytorch_ood.loss import OutlierExposureLoss

    logits, labels = torch.randn(10, 4), torch.tensor([0, 1, 2, 3, 0] + [-1] * 5)
    expected = OutlierExposureLoss(alpha=0.5, reduction="sum")(logits, labels) / 5  # five images of either kind
    torch.testing.assert_close(oe.exposure_loss(logits[:5], labels[:5], logits[5:]), expected)


def test_energy_loss_agrees_with_a_loop():
    inside, labels, outside = torch.randn(5, 3) * 9 + 20, torch.tensor([0, 1, 2, 0, 1]), torch.randn(4, 3) * 9
    total = 0.0
    for logits, label in zip(inside.double(), labels, strict=True):
        energy = -torch.log(torch.exp(logits).sum())
        total += -torch.log(torch.softmax(logits, 0)[label]) / 5 + 0.1 * max(0.0, energy + 23.0) ** 2 / 5
    for logits in outside.double():
        total += 0.1 * max(0.0, -5.0 + torch.log(torch.exp(logits).sum())) ** 2 / 4
    torch.testing.assert_close(energy_ft.energy_loss(inside, labels, outside).double(), total, rtol=1e-4, atol=1e-6)


def test_the_dividing_head_is_cosine_over_gate():
    torch.manual_seed(0)
    head = godin.DividingHead(nn.Linear(4, 3))
    feature = torch.randn(6, 4)
    pre = head.gate(feature)[:, 0]
    gate = torch.sigmoid((pre - pre.mean()) / (pre.var(correction=0) + 1e-5).sqrt())
    for n in range(6):
        for k in range(3):
            cosine = feature[n] @ head.weight[k] / (feature[n].norm() * head.weight[k].norm())
            torch.testing.assert_close(head.train()(feature)[n, k], cosine / gate[n])
            torch.testing.assert_close(head.eval()(feature)[n, k], cosine)


def test_the_step_of_generalized_odin_is_chosen_on_inliers_alone(trained, draw):
    method = fitted("g-odin", trained, draw)
    batch = trained.preprocess(draw.inliers.source.images)
    x = batch.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(method.network(x).amax(dim=1).sum(), x)
    direction = gradient.sign() / torch.tensor(STD).view(1, 3, 1, 1)
    with torch.no_grad():
        sums = [float(method.network(batch + step * direction).amax(dim=1).sum()) for step in godin.STEPS]
        expected = -method.network(batch + method.step * direction).amax(dim=1)
    assert method.step == godin.STEPS[int(np.argmax(sums))]
    np.testing.assert_allclose(score(method, trained, draw.inliers.source), expected.numpy(), rtol=1e-4, atol=1e-6)
    assert not method.uses_outliers


def test_the_subspace_head_has_orthonormal_directions_and_trains_on_absolute_cosines():
    torch.manual_seed(0)
    head = one_d.SubspaceHead(nn.Linear(5, 3))
    torch.testing.assert_close(head.weight @ head.weight.T, torch.eye(3), atol=1e-5, rtol=0)
    feature = torch.randn(2, 5)
    expected = (feature @ head.weight.T).abs() / feature.norm(dim=1, keepdim=True)
    torch.testing.assert_close(head.train()(feature), expected)
    torch.testing.assert_close(head.eval()(feature), feature)
    assert not list(head.parameters())


def test_angles_to_the_first_singular_vectors():
    features = torch.tensor([[1.0, 0.0], [-3.0, 0.0], [0.0, 2.0], [0.0, 1.0]])
    axes = one_d.class_axes(features, torch.tensor([0, 0, 1, 1]))
    torch.testing.assert_close(axes.abs(), torch.eye(2).double())
    found = one_d.angles(torch.tensor([[-5.0, 0.0], [1.0, 1.0], [1.0, 3**0.5]]), axes)
    expected = torch.tensor([0.0, 45.0, 30.0]).double().deg2rad()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


class TestAcet:
    def test_the_attack_stays_near_and_raises_confidence(self, trained, batch):
        start = torch.rand(4, 3, 32, 32)
        model = trained.model.train()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        worst = acet.attack(model, start, model, radius=0.1)
        assert model.training
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        model.eval()
        assert float((worst - start).abs().max()) <= 0.1 + 1e-6
        assert float(worst.min()) >= 0.0
        assert float(worst.max()) <= 1.0
        with torch.no_grad():
            sure = [F.softmax(model(x), dim=1).amax(dim=1) for x in (start, worst)]
        assert (sure[1] > sure[0]).all()

    def test_the_loss_agrees_with_a_loop(self):
        inside, labels, noise = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1]), torch.randn(4, 3)
        expected = -sum(torch.log(torch.softmax(inside[i], 0)[labels[i]]) for i in range(5)) / 5
        expected = expected + sum(torch.log(torch.softmax(noise[i], 0).max()) for i in range(4)) / 4
        torch.testing.assert_close(acet.acet_loss(inside, labels, noise), expected)

    def test_noise_has_full_contrast_and_is_smooth(self):
        images = torch.rand(6, 3, 32, 32)
        noise = acet.make_noise(images, torch.Generator().manual_seed(0))
        assert noise.shape == images.shape
        torch.testing.assert_close(noise.amin(dim=(1, 2, 3)), torch.zeros(6))
        torch.testing.assert_close(noise.amax(dim=(1, 2, 3)), torch.ones(6))
        roughness = [(x[..., 1:] - x[..., :-1]).std() / x.std() for x in (images, noise)]
        assert roughness[1] < 0.6 * roughness[0]

    def test_blur_agrees_with_scipy(self):
        from scipy.ndimage import gaussian_filter1d

        images = torch.rand(1, 3, 16, 16).double()
        expected = images.numpy()
        for axis in (2, 3):
            expected = gaussian_filter1d(expected, 1.2, axis=axis, radius=3, mode="mirror")
        np.testing.assert_allclose(acet._blur(images, 1.2).numpy(), expected, rtol=1e-6)


class TestGood:
    @pytest.fixture
    def network(self):
        torch.manual_seed(0)
        return good.SmallNetwork(3, size=8)

    def test_the_bound_holds_for_images_in_the_box(self, network):
        low, high = torch.rand(2, 3, 8, 8), None
        high = low + 0.1
        with torch.no_grad():
            bound = network.largest_gap(low, high)
            for _ in range(50):
                logits = network(low + 0.1 * torch.rand_like(low))
                assert ((logits.amax(dim=1) - logits.amin(dim=1)) <= bound + 1e-5).all()

    def test_the_bound_of_a_point_is_its_gap(self, network):
        images = torch.rand(4, 3, 8, 8)
        with torch.no_grad():
            logits = network(images)
            torch.testing.assert_close(network.largest_gap(images, images), logits.amax(dim=1) - logits.amin(dim=1))

    def test_intervals_of_a_linear_layer_by_hand(self):
        layer = nn.Linear(2, 1)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[2.0, -3.0]]))
            layer.bias.fill_(1.0)
            centre, radius = good.interval(layer, torch.tensor([[1.0, 1.0]]), torch.tensor([[0.5, 0.1]]))
        assert float(centre) == 0.0
        assert float(radius) == pytest.approx(1.3)

    def test_the_easiest_images_are_bounded_and_the_others_are_not(self):
        found = good.bound_loss(torch.tensor([1.0, 9.0, 2.0]), torch.tensor([0.5, 4.0, 0.25]), quantile=2 / 3)
        expected = np.mean([np.log(1.0 / 2 + 1), np.log(4.0 / 2 + 1), np.log(16.0 / 2 + 1)])
        assert float(found) == pytest.approx(expected)

    def test_radius_and_weight_grow_with_the_steps(self, trained, monkeypatch):
        torch.manual_seed(0)
        network, method = good.SmallNetwork(3), baselines.make("good")
        method._slow_steps = 10.0
        outliers = torch.full((2, 3, 32, 32), 0.5)
        tuner = Tuner(network, method.loss, trained)
        monkeypatch.setattr(tuner, "draw_outliers", lambda count, generator: outliers)
        images, labels = torch.rand(2, 3, 32, 32), torch.tensor([0, 1])
        network.steps.fill_(4)  # the next one is the fifth of ten: half of both
        found = method.loss(tuner, images, labels, torch.Generator())
        low, high = tuner.normalise(outliers - 0.005), tuner.normalise(outliers + 0.005)
        plain = tuner.normalise(outliers)
        bound = good.bound_loss(network.largest_gap(low, high), network.largest_gap(plain, plain))
        expected = torch.nn.functional.cross_entropy(network(tuner.normalise(images)), labels) + 0.15 * bound
        torch.testing.assert_close(found, expected)
        assert int(network.steps) == 5

    def test_bounds_are_for_its_own_network(self, trained, draw):
        tuner = Tuner(trained.model, baselines.make("good").loss, trained)
        with pytest.raises(TypeError, match=r"bounds are implemented for this method's own network only"):
            tuner.loss(torch.rand(2, 3, 32, 32), torch.tensor([0, 1]), torch.Generator())


def _relu_moments(a, b, c):
    """2 E[relu relu], 2 E[relu' relu'] for a Gaussian pair with variances a, b and covariance c (Cho & Saul 2009)."""
    angle = np.arccos(np.clip(c / np.sqrt(a * b), -1, 1))
    return np.sqrt(a * b) * (np.sin(angle) + (np.pi - angle) * np.cos(angle)) / np.pi, (np.pi - angle) / np.pi


def _cosine_moments(a, b, c):
    """E[2 cos cos], E[2 sin sin] with one uniform phase."""
    return np.exp(-(a + b - 2 * c) / 2), np.exp(-(a + b - 2 * c) / 2)


def _reference_tangent_kernel(x, y, moments, layers):
    """The recursion over every pair of positions, one at a time."""
    pairs = {"xy": (x, y), "xx": (x, x), "yy": (y, y)}
    value = {key: np.einsum("chw,cij->hwij", a, b) / len(a) for key, (a, b) in pairs.items()}
    tangent = np.zeros_like(value["xy"])
    for kernel, stride in layers:
        size = (value["xy"].shape[0] - kernel) // stride + 1

        def patch_mean(full, size=size, kernel=kernel, stride=stride):
            out = np.zeros((size,) * 4)
            for h, w, i, j in np.ndindex(out.shape):
                for d, e in np.ndindex(kernel, kernel):
                    out[h, w, i, j] += full[stride * h + d, stride * w + e, stride * i + d, stride * j + e] / kernel**2
            return out

        before = {key: patch_mean(one) for key, one in value.items()}
        theta = before["xy"] + patch_mean(tangent)
        slope = np.zeros_like(theta)
        value = {key: np.zeros_like(one) for key, one in before.items()}
        for place in np.ndindex(theta.shape):
            for key, (first, second) in {"xy": ("xx", "yy"), "xx": ("xx", "xx"), "yy": ("yy", "yy")}.items():
                a, b = before[first][place[:2] * 2], before[second][place[2:] * 2]
                found = moments(a, b, before[key][place])
                value[key][place] = found[0]
                if key == "xy":
                    slope[place] = found[1]
        tangent = theta * slope
    return (value["xy"] + tangent).mean()


class TestKernels:
    LAYERS = ((2, 1), (3, 2))  # 6 x 6 -> 5 x 5 -> 2 x 2

    @pytest.mark.parametrize(
        ("dual", "moments"),
        [(cntk.relu_dual, _relu_moments), (scntk.cosine_dual, _cosine_moments)],
        ids=["cntk", "scntk"],
    )
    def test_nine_offsets_give_what_all_pairs_of_positions_give(self, dual, moments):
        torch.manual_seed(0)
        left, right = torch.randn(2, 3, 6, 6).double(), torch.randn(3, 3, 6, 6).double()
        found = cntk.tangent_kernel(left, right, dual, self.LAYERS)
        for n, m in np.ndindex(2, 3):
            expected = _reference_tangent_kernel(left[n].numpy(), right[m].numpy(), moments, self.LAYERS)
            assert float(found[n, m]) == pytest.approx(expected, rel=1e-9)

    @pytest.mark.parametrize(("kernel", "step"), [(4, 1), (4, 2), (3, 2), (1, 1), (2, 3)])
    def test_patch_means_are_an_average_pool(self, kernel, step):
        maps = torch.randn(2, 3, 13, 9)
        torch.testing.assert_close(cntk._patch_means(maps, kernel, step), F.avg_pool2d(maps, kernel, step))

    def test_a_wide_network_has_nearly_this_tangent_kernel(self):
        torch.manual_seed(0)
        images, width = torch.randn(2, 3, 6, 6), 400
        weights = [torch.randn(width, 3, 2, 2), torch.randn(width, width, 3, 3), torch.randn(1, width)]
        weights = [weight.requires_grad_() for weight in weights]

        def network(x):
            x = (F.conv2d(x, weights[0]) / (3 * 4) ** 0.5).relu() * 2**0.5
            x = (F.conv2d(x, weights[1], stride=2) / (width * 9) ** 0.5).relu() * 2**0.5
            return (x.mean(dim=(2, 3)) @ weights[2].T / width**0.5).squeeze()

        slopes = [
            torch.cat([g.flatten() for g in torch.autograd.grad(network(image[None]), weights)]) for image in images
        ]
        found = cntk.tangent_kernel(images, images, cntk.relu_dual, self.LAYERS)
        for n, m in ((0, 0), (0, 1), (1, 1)):
            assert float(slopes[n] @ slopes[m]) == pytest.approx(float(found[n, m]), rel=0.1)

    def test_the_kernel_is_symmetric_and_positive_in_the_shape_of_convnet4(self):
        torch.manual_seed(0)
        images = torch.randn(4, 3, 32, 32).double()
        for name in ("cntk", "scntk"):
            kernel = baselines.make(name).kernel(images, images)
            torch.testing.assert_close(kernel, kernel.T)
            assert float(torch.linalg.eigvalsh(kernel).min()) > 0

    def test_normalised_kernel_values_are_cosines(self, trained, draw):
        method = cntk.Cntk(5, normalised=True)
        fit_method(method, trained, draw, no_features)
        images = make_images(3, seed=9, name="x", split="test")
        left, right = trained.preprocess(images.images), method._inliers
        assert len(right) == 5
        norms = [method.kernel(batch, batch).double().diagonal().sqrt() for batch in (left, right)]
        expected = -(method.kernel(left, right).double() / norms[0][:, None] / norms[1]).sum(dim=1)
        np.testing.assert_allclose(score(method, trained, images), expected.numpy(), rtol=1e-5)

    @pytest.mark.parametrize("name", ["cntk", "scntk"])
    def test_the_score_is_minus_the_sum_of_kernel_values(self, name, trained, draw):
        method = fitted(name, trained, draw)
        images = make_images(3, seed=9, name="x", split="test")
        left, right = (trained.preprocess(one.images) for one in (images, draw.inliers.source))
        expected = -method.kernel(left, right).double().sum(dim=1)
        np.testing.assert_allclose(score(method, trained, images), expected.numpy(), rtol=1e-5)

    def test_images_that_are_too_small_are_an_error(self):
        with pytest.raises(InputError, match=r"Expected images that 4 convolutions fit into, but got \(1, 3, 8, 8\)"):
            cntk.tangent_kernel(torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8), cntk.relu_dual, cntk.LAYERS)


FINE_TUNED = ["oe", "energy-ft", "g-odin", "1d", "acet", "good"]
IMAGE_METHODS = ["odin", "mahalanobis", "mahalanobis-id", "gram", "cntk", "scntk", *FINE_TUNED]


@pytest.mark.parametrize("name", IMAGE_METHODS)
class TestEvery:
    def test_the_model_is_never_changed(self, name, trained, draw):
        before = fingerprint(trained.model)
        method = fitted(name, trained, draw)
        score(method, trained, make_images(4, seed=9, name="x", split="test"))
        assert fingerprint(trained.model) == before
        assert not trained.model.training
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in trained.model.modules())
        assert all(parameter.grad is None for parameter in trained.model.parameters())

    def test_scoring_before_fitting_is_an_error(self, name, trained):
        with pytest.raises(NotFittedError, match=rf"The method '{name}' is not fitted yet. Call `fit` before `score`"):
            score(baselines.make(name), trained, make_images(4, seed=9, name="x", split="test"))

    def test_it_does_not_suit_a_model_without_classes(self, name, trained):
        from dataclasses import replace

        assert baselines.make(name).suits(trained)
        assert baselines.make(name).suits(replace(trained, num_classes=0)) == (name in ("cntk", "scntk"))
