"""Methods that work from cached features agree with an independent version: a naive loop, or pytorch-ood's class."""

from __future__ import annotations

import math
import re
import sys

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean.bench import baselines
from neuralmean.bench.baselines import adapter, nac
from neuralmean.bench.baselines.adapter import at_most, detector_class
from neuralmean.bench.baselines.base import Context, View
from neuralmean.bench.baselines.dk import likeliest_bandwidth
from neuralmean.bench.baselines.gen import generalised_entropy
from neuralmean.bench.baselines.heads import read_head
from neuralmean.bench.baselines.knn import neighbours
from neuralmean.bench.baselines.measure import Meter
from neuralmean.bench.baselines.perturbation import hold_out
from neuralmean.bench.data.imageset import ImageSet
from neuralmean.bench.features import Features
from neuralmean.bench.models import TrainedModel
from neuralmean.errors import InputError, MissingExtraError, NotFittedError

WIDTH, CLASSES, INLIERS, EXAMPLES = 12, 4, 60, 9
FITTED = [
    "knn",
    "vim",
    "react",
    "ash",
    "scale",
    "rmds",
    "mds++",
    "rmds++",
    "fdbd",
    "nci",
    "nnguide",
    "she",
    "nac",
    "dk",
]
WITH_HEAD = ["vim", "react", "ash", "scale", "fdbd", "nci", "nnguide", "nac"]


class Pixels(nn.Module):
    """Its feature is the first pixels, so that nothing but the head is learnt."""

    def __init__(self, *, bias=True):
        super().__init__()
        torch.manual_seed(3)
        self.other = nn.Linear(WIDTH, CLASSES)  # of the head's sizes, but not the head
        self.fc = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x):
        feature = x.flatten(1)[:, :WIDTH]
        self.other(feature)
        return self.fc(feature)


def trained_of(model):
    return TrainedModel(model.eval(), "pixels", CLASSES, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


@pytest.fixture
def trained():
    return trained_of(Pixels())


def make_features(count, seed, shift=0.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % CLASSES
    centres = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(7))
    return (centres[labels] + torch.randn(count, WIDTH, generator=generator) + shift).relu(), labels


@pytest.fixture
def inliers():
    return make_features(INLIERS, 0)


@pytest.fixture
def examples():
    return make_features(EXAMPLES, 1)[0]


def view_of(method, trained, feature, labels=None, meter=None):
    def read(images, *, variance):
        logits = trained.model.fc(feature).detach()
        return Features((), torch.zeros(len(feature), 0), None, logits, feature, 0.0)

    pixels = np.zeros((len(feature), 32, 32, 3), np.uint8)
    images = ImageSet.of(pixels, None if labels is None else labels.numpy(), name="x", split="train")
    return View(trained, images, None, reads=method.reads, reader=read, meter=meter or Meter())


def fit(name, trained, inliers, outliers=None):
    method = baselines.make(name)
    outside = None if outliers is None else view_of(method, trained, outliers)
    method.fit(Context(trained, view_of(method, trained, *inliers), outside, seed=0))
    return method


def scores_of(name, trained, inliers, examples, outliers=None):
    method = fit(name, trained, inliers, outliers)
    return method.score(view_of(method, trained, examples)).double()


def energy(logits):
    return -math.log(sum(math.exp(value) for value in logits))


def logits_of(trained, row):
    weight, bias = trained.model.fc.weight.tolist(), trained.model.fc.bias.tolist()
    return [sum(w * x for w, x in zip(line, row, strict=True)) + b for line, b in zip(weight, bias, strict=True)]


def check(scores, expected, tolerance=1e-5):
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance)


def test_knn_is_the_distance_to_the_kth_neighbour_of_unit_length(trained, inliers, examples):
    unit = [[x / math.hypot(*row) for x in row] for row in inliers[0].tolist()]
    expected = []
    for row in examples.tolist():
        z = [x / math.hypot(*row) for x in row]
        expected.append(sorted(math.dist(z, other) for other in unit)[neighbours(INLIERS, CLASSES) - 1])
    check(scores_of("knn", trained, inliers, examples), expected)


def test_knn_takes_neighbours_in_proportion_to_the_images():
    assert neighbours(50_000, 10) == 50
    assert neighbours(10_000, 10) == 10
    assert neighbours(50_000, 100) == 200
    assert neighbours(500, 10) == 5
    assert neighbours(25, 10) == 2  # not more than a class has
    assert neighbours(2, 10) == 1
    assert neighbours(1000, 1000) == 1


def test_vim_is_the_scaled_residual_beside_the_energy(trained, inliers, examples):
    weight, bias = (tensor.detach().double().numpy() for tensor in (trained.model.fc.weight, trained.model.fc.bias))
    origin = -np.linalg.pinv(weight) @ bias
    centred = inliers[0].double().numpy() - origin
    values, vectors = np.linalg.eigh(centred.T @ centred)
    residual = vectors[:, np.argsort(values)[: WIDTH - WIDTH // 2]]
    largest = (inliers[0].double().numpy() @ weight.T + bias).max(axis=1)
    alpha = largest.sum() / np.linalg.norm(centred @ residual, axis=1).sum()
    expected = []
    for row in examples.double().numpy():
        expected.append(alpha * np.linalg.norm((row - origin) @ residual) + energy(weight @ row + bias))
    check(scores_of("vim", trained, inliers, examples), expected, 1e-4)


def test_react_is_the_energy_of_the_feature_cut_off_at_its_ninetieth_percentile(trained, inliers, examples):
    ordered = sorted(inliers[0].flatten().tolist())
    place = 0.9 * (len(ordered) - 1)
    low = ordered[int(place)]
    threshold = low + (place - int(place)) * (ordered[int(place) + 1] - low)
    expected = [energy(logits_of(trained, [min(x, threshold) for x in row])) for row in examples.tolist()]
    assert (examples > threshold).any()
    check(scores_of("react", trained, inliers, examples), expected)


def _reference_shaped(trained, row, *, prune, share):
    kept = sorted(range(WIDTH), key=lambda i: row[i])[round(share * WIDTH) :]
    factor = math.exp(sum(row) / sum(row[i] for i in kept))
    return energy(logits_of(trained, [x * factor if i in kept or not prune else 0.0 for i, x in enumerate(row)]))


@pytest.mark.parametrize(("name", "prune", "share"), [("ash", True, 0.9), ("scale", False, 0.85)])
def test_ash_and_scale_are_the_energy_of_the_shaped_feature(name, prune, share, trained, inliers, examples):
    expected = [_reference_shaped(trained, row, prune=prune, share=share) for row in examples.tolist()]
    check(scores_of(name, trained, inliers, examples), expected)


@pytest.mark.parametrize("name", ["ash", "scale", "react"])
def test_a_feature_without_any_activation_has_the_energy_of_the_bias(name, trained, inliers):
    expected = energy(trained.model.fc.bias.tolist())
    check(scores_of(name, trained, inliers, torch.zeros(1, WIDTH)), [expected])


@pytest.mark.parametrize("name", ["ash", "scale", "react"])
def test_the_share_is_the_one_that_does_best_on_the_outliers_of_the_protocol(name, trained, inliers):
    outliers = make_features(40, 5, shift=-0.7)[0]
    method = fit(name, trained, inliers, outliers)
    quality = {}
    for percentile in method.percentiles:
        other = baselines.make(name)
        other.percentiles = (percentile,)
        other.fit(Context(trained, *(view_of(other, trained, rows) for rows in (inliers[0], outliers)), seed=0))
        inside, outside = (other.score(view_of(other, trained, rows)) for rows in (inliers[0], outliers))
        quality[percentile] = ((outside[None] > inside[:, None]).double()).mean().item()
    assert len(set(quality.values())) > 1
    assert quality[method.percentile] == pytest.approx(max(quality.values()))


@pytest.mark.parametrize(("name", "module"), [("ash", adapter), ("scale", adapter), ("react", adapter), ("nac", nac)])
def test_what_is_tuned_on_is_drawn_from_sets_that_are_ordered_by_class(name, module, trained, monkeypatch):
    inliers, outliers = make_features(100, 0)[0], make_features(100, 5)[0]
    inliers[:50], outliers[:50] = 0.0, 0.0  # all images of the first class look alike and have one score
    seen = []
    evaluate = module.evaluate
    monkeypatch.setattr(module, "evaluate", lambda *scores: seen.append(scores) or evaluate(*scores))
    monkeypatch.setattr(module, "TUNED_ON", 20)
    fit(name, trained, (inliers, torch.zeros(100, dtype=torch.int64)), outliers)
    inside, outside = seen[0]
    assert len(inside) == len(outside) == 20
    assert len(set(inside.tolist())) > 1
    assert len(set(outside.tolist())) > 1


@pytest.mark.parametrize("name", FITTED)
def test_a_fit_costs_as_many_passes_as_it_says_it_uses_images(name, trained):
    method, meter = baselines.make(name), Meter()
    (inliers, labels), (outliers, _) = make_features(1100, 0), make_features(1050, 5)
    outside = view_of(method, trained, outliers, meter=meter) if method.uses_outliers else None
    method.fit(Context(trained, view_of(method, trained, inliers, labels, meter), outside, seed=0))
    expected = {
        "react": (1100, 1000),
        "ash": (1000, 1000),
        "scale": (1000, 1000),
        "nac": (1100, 1000),
        "nci": (1100, 1000),
    }
    assert method.n_used(trained, 1100, 1050) == expected.get(name, (1100, 0))
    assert meter.cost(0.0, None).passes == sum(expected.get(name, (1100, 0)))


def test_at_least_one_activation_of_a_small_feature_is_kept():
    assert at_most(0.65, 64) == 0.65
    assert at_most(0.65, 2) == 0.5


def test_fdbd_is_minus_the_mean_distance_to_the_boundaries_beside_that_to_the_mean(trained, inliers, examples):
    weight, mean = trained.model.fc.weight.tolist(), inliers[0].double().mean(dim=0).tolist()
    expected = []
    for row in examples.tolist():
        logits = logits_of(trained, row)
        top = max(range(CLASSES), key=lambda k: logits[k])
        distances = [(logits[top] - logits[k]) / math.dist(weight[top], weight[k]) for k in range(CLASSES) if k != top]
        expected.append(-sum(distances) / (CLASSES - 1) / math.dist(row, mean))
    check(scores_of("fdbd", trained, inliers, examples), expected)


def test_gen_agrees_with_pytorch_ood_where_nothing_is_clipped():
    logits = torch.randn(20, 7, generator=torch.Generator().manual_seed(0)).double()
    theirs = detector_class("GEN").score(logits, gamma=0.1) * 7  # theirs is a mean
    torch.testing.assert_close(generalised_entropy(logits), theirs)


def test_gen_sums_over_the_hundred_likeliest_classes():
    logits = torch.randn(3, 150, generator=torch.Generator().manual_seed(0)).double()
    expected = []
    for row in logits.tolist():
        total = sum(math.exp(x) for x in row)
        top = sorted((math.exp(x) / total for x in row), reverse=True)[:100]
        expected.append(sum(p**0.1 * (1 - p) ** 0.1 for p in top))
    check(generalised_entropy(logits), expected, 1e-12)


def test_gen_tells_very_confident_images_apart():
    scores = generalised_entropy(torch.tensor([[60.0, 0.0], [80.0, 0.0]]))
    check(scores, [2 * math.exp(-6), 2 * math.exp(-8)], 1e-12)


def _reference_mds_plus(inliers, labels, examples):
    """Distance to the nearest class, and to the mean of all, of unit-length features, from the paper's text."""
    from sklearn.covariance import LedoitWolf

    def unit(rows):
        return np.array([row / max(np.linalg.norm(row), 1e-12) for row in rows])

    rows, points = unit(inliers), unit(examples)
    classes = sorted(set(labels))
    means = {k: rows[labels == k].mean(axis=0) for k in classes}
    centre = rows.mean(axis=0)
    few = len(rows) < 2 * len(classes)
    residual = np.array([row - (centre if few else means[k]) for row, k in zip(rows, labels, strict=True)])
    within, total = (
        np.linalg.inv(LedoitWolf(assume_centered=True).fit(one).covariance_) for one in (residual, rows - centre)
    )
    nearest = [min((z - mean) @ within @ (z - mean) for mean in means.values()) for z in points]
    whole = [(z - centre) @ total @ (z - centre) for z in points]
    return nearest, whole


@pytest.mark.parametrize("per_class", [15, 1], ids=["many", "one image per class"])
def test_mds_plus_is_the_distance_of_unit_features_to_the_nearest_class(trained, examples, per_class):
    inliers, labels = make_features(INLIERS, 0)
    labels = torch.arange(INLIERS) % (INLIERS // per_class)
    nearest, whole = _reference_mds_plus(*(one.double().numpy() for one in (inliers, labels, examples)))
    check(scores_of("mds++", trained, (inliers, labels), examples), nearest)
    check(scores_of("rmds++", trained, (inliers, labels), examples), np.subtract(nearest, whole).tolist())


@pytest.mark.parametrize("name", ["mds++", "rmds"])
def test_distances_to_classes_of_one_image_still_tell_images_apart(name, trained, examples):
    inliers, _ = make_features(INLIERS, 0)
    assert len(set(scores_of(name, trained, (inliers, torch.arange(INLIERS)), examples).tolist())) == EXAMPLES


def test_nci_is_the_alignment_with_the_class_weights_and_the_length(trained, inliers, examples):
    weight, mean = trained.model.fc.weight.tolist(), inliers[0].double().mean(dim=0).tolist()
    expected = []
    for row in examples.tolist():
        logits = logits_of(trained, row)
        own = weight[max(range(CLASSES), key=lambda k: logits[k])]
        centred = [x - m for x, m in zip(row, mean, strict=True)]
        alignment = sum(w * z for w, z in zip(own, centred, strict=True)) / math.hypot(*centred)
        expected.append(-alignment - 0.0001 * sum(map(abs, row)))
    check(scores_of("nci", trained, inliers, examples), expected)


def test_nci_chooses_the_weight_of_the_length_by_the_outliers(trained, inliers):
    short = inliers[0] / 10  # the same directions: only the length tells them apart
    assert fit("nci", trained, inliers, short).alpha > 0.0001


def test_nnguide_is_the_energy_guided_by_the_nearest_inliers(trained, inliers, examples):
    bank = [(row, -energy(logits_of(trained, row))) for row in inliers[0].tolist()]
    expected = []
    for row in examples.tolist():
        similar = [
            weight * sum(a * b for a, b in zip(row, other, strict=True)) / math.hypot(*row) / math.hypot(*other)
            for other, weight in bank
        ]
        guidance = sum(sorted(similar, reverse=True)[:10]) / 10
        expected.append(-guidance * -energy(logits_of(trained, row)))
    check(scores_of("nnguide", trained, inliers, examples), expected)


def test_she_is_minus_the_product_with_the_mean_of_the_predicted_class(trained, inliers, examples):
    feature, labels = inliers
    predicted = [max(range(CLASSES), key=logits_of(trained, row).__getitem__) for row in feature.tolist()]
    patterns = {}
    for k in range(CLASSES):
        own = [row for row, p, y in zip(feature.double(), predicted, labels.tolist(), strict=True) if p == y == k]
        patterns[k] = torch.stack(own).mean(dim=0) if own else feature.double().mean(dim=0)
    expected = []
    for row in examples.double():
        top = max(range(CLASSES), key=logits_of(trained, row.tolist()).__getitem__)
        expected.append(-float(row @ patterns[top]))
    check(scores_of("she", trained, inliers, examples), expected)


def test_she_agrees_with_pytorch_ood_where_every_class_has_an_image_that_is_classified_rightly(
    trained, inliers, examples
):
    feature = inliers[0]
    labels = trained.model.fc(feature).argmax(dim=1)
    if len(labels.unique()) < CLASSES:
        pytest.skip("a class that is never predicted")
    theirs = detector_class("SHE")(None, read_head(trained).as_module()).fit_features(feature, labels)
    expected = theirs.predict_features(examples).double()
    torch.testing.assert_close(scores_of("she", trained, (feature, labels), examples), expected, rtol=1e-4, atol=1e-4)


def test_vim_is_not_disturbed_by_channels_that_are_always_zero(trained, inliers, examples):
    feature = inliers[0].clone()
    feature[:, 3:6] = 0
    shown = examples.clone()
    shown[:, 3:6] = 0
    doubled = scores_of("vim", trained, (feature, inliers[1]), shown)
    assert doubled.isfinite().all()
    shown[:, 3:6] = 5.0  # in a channel that no inlier used, only the logits move
    moved = scores_of("vim", trained, (feature, inliers[1]), shown) - doubled
    logits = [trained.model.fc(one).double().logsumexp(dim=1) for one in (shown, shown * (feature.amax(dim=0) > 0))]
    torch.testing.assert_close(moved, (logits[1] - logits[0]).detach(), rtol=1e-4, atol=1e-4)


def test_rmds_agrees_with_pytorch_ood(trained, inliers, examples):
    feature, labels = inliers[0].double(), inliers[1]
    theirs = detector_class("RMD")(None)
    theirs.fit_features(feature.float(), labels)
    expected = theirs.predict_features(examples) * INLIERS  # theirs leaves out the division by the number of images
    torch.testing.assert_close(scores_of("rmds", trained, inliers, examples), expected.double(), rtol=1e-3, atol=1e-3)


def test_rmds_is_the_nearest_class_less_the_whole(trained, inliers, examples):
    rows, labels = inliers[0].double().numpy(), inliers[1].numpy()
    means = [rows[labels == k].mean(axis=0) for k in range(CLASSES)]
    within = sum(np.outer(r - means[k], r - means[k]) for r, k in zip(rows, labels, strict=True)) / INLIERS
    total = sum(np.outer(r - rows.mean(axis=0), r - rows.mean(axis=0)) for r in rows) / INLIERS
    expected = []
    for row in examples.double().numpy():
        to_class = min((row - mean) @ np.linalg.inv(within) @ (row - mean) for mean in means)
        centred = row - rows.mean(axis=0)
        expected.append(to_class - centred @ np.linalg.inv(total) @ centred)
    check(scores_of("rmds", trained, inliers, examples), expected, 1e-8)


def test_rmds_leaves_out_channels_that_never_change(trained, inliers, examples):
    dead = inliers[0].clone()
    dead[:, 5] = 0.0
    found = scores_of("rmds", trained, (dead, inliers[1]), examples)
    moved = examples.clone()
    moved[:, 5] += 100.0
    assert found.isfinite().all()
    torch.testing.assert_close(scores_of("rmds", trained, (dead, inliers[1]), moved), found)


def _reference_states(trained, rows, steepness):
    states = []
    for row in rows.double():
        row = row.clone().requires_grad_()
        log_p = (row @ trained.model.fc.weight.double().T + trained.model.fc.bias.double()).log_softmax(dim=0)
        divergence = -log_p.mean() - math.log(CLASSES)  # KL of the uniform distribution from p
        (gradient,) = torch.autograd.grad(divergence, row)
        states.append([1 / (1 + math.exp(-steepness * x)) for x in (row * gradient).tolist()])
    return states


def test_nac_is_minus_the_mean_coverage_of_the_states(trained, inliers, examples):
    head = read_head(trained)
    coverage = nac.Coverage.of(nac.pull(inliers[0], head), 10.0, 50, 5)
    known = _reference_states(trained, inliers[0], 10.0)
    expected = []
    for states in _reference_states(trained, examples, 10.0):
        total = 0.0
        for neuron, state in enumerate(states):
            count = sum(int(row[neuron] * 50) == int(state * 50) for row in known)
            total += min(count / 5, 1.0)
        expected.append(-total / WIDTH)
    check(coverage.score(nac.pull(examples, head)), expected, 1e-12)


def test_nac_has_the_parameters_that_do_best_on_the_outliers_of_the_protocol(trained, inliers):
    outliers = make_features(40, 5, shift=3.0)[0]
    method = fit("nac", trained, inliers, outliers)
    head, parts = read_head(trained), hold_out(INLIERS, seed=0, share=0.2)
    assert len(parts.validation) == INLIERS // 5
    pulls = nac.pull(inliers[0], head)

    def quality(steepness, bins, enough):
        coverage = nac.Coverage.of(pulls[parts.rest], steepness, bins, enough)
        inside, outside = coverage.score(pulls[parts.validation]), coverage.score(nac.pull(outliers, head))
        return ((outside[None] > inside[:, None]).double() + 0.5 * (outside[None] == inside[:, None])).mean().item()

    chosen = (method.coverage.steepness, method.coverage.counts.shape[1], method.coverage.enough)
    best = max(quality(a, b, r) for a in nac.STEEPNESS for b in nac.BINS for r in nac.ENOUGH)
    assert quality(*chosen) == pytest.approx(best)
    assert method.coverage.counts.sum(dim=1).tolist() == [INLIERS] * WIDTH


def test_nac_without_outliers_has_the_papers_parameters(trained, inliers):
    coverage = fit("nac", trained, inliers).coverage
    assert (coverage.steepness, coverage.counts.shape[1], coverage.enough) == (100.0, 50, 50)


def test_dk_is_minus_the_log_of_the_sum_of_kernel_values(trained, inliers, examples):
    method = fit("dk", trained, inliers)
    expected = []
    for row in examples.double().tolist():
        values = [math.exp(-(math.dist(row, x) ** 2) / (2 * method.bandwidth**2)) for x in inliers[0].double().tolist()]
        expected.append(-math.log(sum(values)))
    check(method.score(view_of(method, trained, examples)), expected)


def test_the_bandwidth_of_dk_is_the_one_under_which_left_out_inliers_are_likeliest(inliers):
    rows = inliers[0].double().tolist()
    distances = sorted(math.dist(a, b) for i, a in enumerate(rows) for b in rows[:i])
    median = distances[(len(distances) - 1) // 2]

    def likelihood(width):
        total = 0.0
        for i, row in enumerate(rows):
            others = [math.exp(-(math.dist(row, x) ** 2) / (2 * width**2)) for j, x in enumerate(rows) if j != i]
            total += math.log(sum(others) or 1e-300) - WIDTH * math.log(width)
        return total

    best = max((median / 2**halvings for halvings in range(7)), key=likelihood)
    assert likeliest_bandwidth(inliers[0].double()) == pytest.approx(best)
    assert best < median


class TestHead:
    def test_it_is_the_layer_that_gives_the_logits(self, trained, examples):
        head = read_head(trained)
        torch.testing.assert_close(head(examples), trained.model.fc(examples).double().detach())
        torch.testing.assert_close(head.as_module()(examples), trained.model.fc(examples).detach())

    def test_it_may_have_no_bias(self, examples):
        trained = trained_of(Pixels(bias=False))
        torch.testing.assert_close(read_head(trained)(examples), trained.model.fc(examples).double().detach())

    def test_it_is_a_copy(self, trained):
        read_head(trained).weight.zero_()
        assert trained.model.fc.weight.abs().sum() > 0

    def test_a_model_without_one_says_so(self):
        bare = trained_of(nn.Flatten())
        with pytest.raises(InputError, match=r"Expected 'pixels' to end in a linear layer, but it does not\. Use a"):
            read_head(bare)


@pytest.mark.parametrize("name", FITTED)
class TestEveryFittedMethod:
    def test_scoring_before_fitting_is_an_error(self, name, trained, examples):
        method = baselines.make(name)
        with pytest.raises(
            NotFittedError, match=rf"The method '{re.escape(name)}' is not fitted yet\. Call `fit` before `score`"
        ):
            method.score(view_of(method, trained, examples))

    def test_cached_features_are_left_alone(self, name, trained, inliers, examples):
        before = inliers[0].clone(), examples.clone()
        scores_of(name, trained, inliers, examples)
        assert torch.equal(inliers[0], before[0])
        assert torch.equal(examples, before[1])


@pytest.mark.parametrize("name", ["knn", "vim", "rmds", "dk"])
def test_what_is_far_from_all_inliers_scores_higher(name, trained, inliers, examples):
    far = torch.zeros(3, WIDTH)
    far[:, 0] = 60.0
    near = scores_of(name, trained, inliers, examples)
    assert scores_of(name, trained, inliers, far).min() > near.max()


@pytest.mark.parametrize("name", WITH_HEAD)
def test_methods_with_a_head_need_classes(name, trained):
    from dataclasses import replace

    assert not baselines.make(name).suits(replace(trained, num_classes=0))


@pytest.mark.parametrize("name", ["knn", "react", "ash", "scale", "nci", "nnguide"])
def test_without_pytorch_ood_the_message_says_what_to_install(name, trained, inliers, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_ood.detector", None)
    with pytest.raises(MissingExtraError, match=r"needs the 'pytorch-ood' package.*`pip install neuralmean\[bench\]`"):
        fit(name, trained, inliers)
