"""What a fit learns, and what a failed one leaves."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from neuralmean import Detector, Reference
from neuralmean.errors import (
    CalibrationError,
    CalibrationWarning,
    InputError,
    ModelMismatchError,
)
from neuralmean.recording import RecordingModule
from neuralmean.scorers import AverageScorer, LogisticScorer
from neuralmean.stats.moments import Moments
from tests.conftest import make_trained
from tests.detector.conftest import HELD_OUT, fitted


class TestFit:
    @pytest.mark.parametrize("statistic", ["mean", "variance", "both"])
    @pytest.mark.parametrize("scorer", ["average", "logistic", "mlp", "typicality"])
    def test_every_scorer_and_statistic_tells_the_strange_apart(self, model, images, strange, scorer, statistic):
        detector = Detector(model, scorer=scorer, statistic=statistic).fit(images, strange[:50], held_out=HELD_OUT)
        assert detector.predict(strange[50:]).is_ood.float().mean() > 0.9
        assert detector.predict(images).is_ood.float().mean() < 0.15

    def test_fit_returns_itself_and_says_what_it_saw(self, model, images, strange):
        detector = Detector(model, scorer="logistic")
        assert detector.fit(images, strange, held_out=HELD_OUT) is detector
        assert (detector.fitted["n_id"], detector.fitted["n_ood"], detector.fitted["n_held_out"]) == (300, 100, 200)

    def test_crafted_data_stands_in_for_missing_outliers(self, model, images):
        detector = fitted(model, images, scorer="logistic")
        assert detector.fitted["n_crafted"] == 300

    def test_crafting_needs_images(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(InputError, match=r"Expected images of shape \(N, C, H, W\) to permute"):
            Detector(model, scorer="logistic").fit(torch.randn(100, 4))

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda x: x,
            lambda x: x.numpy(),
            lambda x: TensorDataset(x, torch.zeros(len(x))),
            lambda x: DataLoader(TensorDataset(x), batch_size=32),
            lambda x: x.split(50),
            lambda x: iter(x.split(50)),
        ],
        ids=["tensor", "array", "dataset", "loader", "batches", "iterator"],
    )
    def test_data_may_come_in_any_form(self, model, images, wrap):
        detector = Detector(model, scorer="average").fit(wrap(images), held_out=wrap(HELD_OUT))
        plain = Detector(model, scorer="average").fit(images, held_out=HELD_OUT)
        assert detector.threshold == pytest.approx(plain.threshold, rel=1e-6)

    def test_a_model_without_batch_norm_makes_its_reference_from_the_data(self, images, strange):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 2))
        detector = fitted(model, images, scorer="average")
        measured = Reference.from_data(model, None, images)
        assert detector.reference.source == "data"
        torch.testing.assert_close(detector.reference.mean, measured.mean, rtol=1e-5, atol=1e-6)
        assert detector.predict(strange).is_ood.all()

    def test_a_reference_can_be_given(self, model, images):
        reference = Reference.from_data(model, ["bn2"], images)
        detector = Detector(model, reference=reference)
        assert detector.layers == ("bn2",)
        torch.testing.assert_close(detector.discrepancy(images).mean(0), torch.zeros(6), rtol=0, atol=1e-5)

    def test_a_reference_of_other_layers_is_an_error(self, model, images):
        with pytest.raises(InputError, match="Expected a reference of the watched layers"):
            Detector(model, layers=["bn1"], reference=Reference.from_batchnorm(model, ["bn2"]))

    def test_a_scorer_of_ones_own_is_called_with_vectors(self, model, images, strange):
        class Largest:
            def fit(self, inliers):
                self.scale = inliers.std(0)
                return self

            def score(self, vectors):
                return (vectors / self.scale).abs().amax(1)

        detector = fitted(model, images, scorer=Largest())
        assert detector.predict(strange).is_ood.all()
        with pytest.raises(InputError, match="Expected a scorer that comes with neuralmean to save, but got Largest"):
            detector.save("never.nmd")

    def test_a_scorer_of_ones_own_may_take_outliers(self, model, images, strange):
        class Direction:
            def fit(self, inliers, outliers):
                self.direction = outliers.mean(0) - inliers.mean(0)

            def score(self, vectors):
                return vectors @ self.direction

        detector = Detector(model, scorer=Direction()).fit(images, strange[:50], held_out=HELD_OUT)
        assert detector.predict(strange[50:]).is_ood.all()

    def test_a_scorer_must_give_one_number_per_row(self, model, images):
        class Wrong:
            def fit(self, inliers):
                return self

            def score(self, vectors):
                return vectors

        with pytest.raises(
            InputError, match=r"Expected `score` to return a tensor of shape \(200,\), but got \(200, 10\)"
        ):
            fitted(model, images, scorer=Wrong())

    def test_fitting_again_after_training_takes_the_model_as_it_is(self, model, images):
        detector = fitted(model, images, scorer="average")
        with torch.no_grad():
            model.bn1.running_mean.add_(1)
        with pytest.raises(ModelMismatchError, match="the model's weights have changed since"):
            detector.predict(images)
        detector.fit(images, held_out=HELD_OUT)
        assert torch.equal(detector.reference.mean[:4], model.bn1.running_mean.double())
        detector.predict(images)


class TestCalibration:
    def test_without_held_out_data_the_detector_says_what_that_is_worth(self, model, images):
        with pytest.warns(CalibrationWarning, match="expect more false alarms than requested: pass `held_out` data"):
            detector = Detector(model, scorer="average").fit(images)
        assert detector.calibration_source == "all"
        assert "pass `held_out`" in detector.guarantee

    @pytest.mark.parametrize(("n", "source"), [(300, "folds"), (1200, "kept_aside")])
    def test_a_scorer_that_learns_is_not_calibrated_on_what_it_learnt_from(self, model, strange, n, source):
        images = torch.rand(n, 3, 8, 8)
        with pytest.warns(CalibrationWarning):
            detector = Detector(model, scorer="logistic").fit(images, strange)
        assert detector.calibration_source == source
        assert detector.predict(torch.rand(500, 3, 8, 8)).is_ood.float().mean() < 0.12

    @pytest.mark.parametrize("n", [300, 2500])
    def test_the_default_is_calibrated_on_turned_images_without_held_out_ones(self, model, n):
        with pytest.warns(CalibrationWarning, match="slightly rotated, in place of images that the model has not memo"):
            detector = Detector(model).fit(torch.rand(n, 3, 8, 8))
        assert detector.calibration_source == "rotated"
        assert len(detector.calibration.scores) == {300: 300, 2500: 500}[n]

    @pytest.mark.parametrize(
        ("scorer", "statistic"), [("average", "mean"), ("typicality", "mean"), ("average", "both")]
    )
    def test_what_held_out_data_looks_like_is_known_however_it_came(self, model, images, scorer, statistic):
        detector = Detector(model, scorer=scorer, statistic=statistic).fit(images, held_out=HELD_OUT, batch_size=64)
        found, vectors = detector.profile, detector.discrepancy(HELD_OUT)
        again = detector.calibrate(HELD_OUT, batch_size=50).profile
        expected = Moments.of(vectors)
        for profile in (found, again):
            assert profile.moments.count == len(HELD_OUT)
            torch.testing.assert_close(profile.moments.mean, expected.mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(profile.moments.m2, expected.m2, rtol=1e-4, atol=1e-6)
            assert profile.squares.shape == profile.largest.shape == (2,)
        torch.testing.assert_close(found.squares, again.squares, rtol=1e-4, atol=0)

    def test_without_held_out_data_there_is_no_such_thing(self, model, images):
        with pytest.warns(CalibrationWarning):
            assert fitted(model, images, scorer="average").fit(images).profile is None

    def test_inputs_that_are_no_images_are_cross_fitted_instead(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).train()
        with torch.no_grad():
            for _ in range(50):
                model(torch.randn(64, 4))
        with pytest.warns(CalibrationWarning, match="by cross-fitting"):
            assert Detector(model).fit(torch.randn(200, 4)).calibration_source == "folds"

    def test_with_held_out_data_there_is_nothing_to_warn_of(self, model, images):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            detector = fitted(model, images)
        assert "holds for fresh inputs" in detector.guarantee

    @pytest.mark.parametrize("scorer", ["average", "typicality"])
    def test_held_out_data_that_was_fitted_on_is_noticed(self, model, images, scorer):
        with pytest.warns(CalibrationWarning, match="50 of 250 held-out examples are also in `id_data`"):
            Detector(model, scorer=scorer).fit(images, held_out=torch.cat([images[:50], HELD_OUT]))

    def test_too_few_examples_are_an_error_with_the_number_needed(self, model, images):
        with pytest.raises(
            CalibrationError, match=r"at least 99 held-out examples for a false-alarm rate of 0\.01, but got 50"
        ):
            Detector(model, scorer="average").fit(images, held_out=HELD_OUT[:50], false_alarm_rate=0.01)
        with pytest.raises(CalibrationError, match="at least 999 in-distribution examples"):
            Detector(model, scorer="logistic").fit(images, images + 1, false_alarm_rate=0.001)

    def test_few_shot_works_without_held_out_data(self, model, images, strange):
        with pytest.warns(CalibrationWarning):
            detector = Detector(model, scorer="logistic").fit(images[:25], strange[:25])
        assert detector.score(strange[25:]).min() > detector.score(images[25:]).max()

    def test_a_threshold_can_be_set_later(self, model, images):
        detector = fitted(model, images, scorer="average")
        before = detector.threshold
        assert detector.calibrate(HELD_OUT, false_alarm_rate=0.2) is detector
        assert detector.threshold < before

    def test_false_alarms_on_fresh_data_are_as_asked(self, model, images):
        detector = Detector(model).fit(images, held_out=torch.rand(1000, 3, 8, 8), false_alarm_rate=0.1)
        assert detector.predict(torch.rand(2000, 3, 8, 8)).is_ood.float().mean().item() == pytest.approx(0.1, abs=0.035)


def test_a_scorer_of_ones_own_is_fitted_also_if_it_names_nothing_that_it_learns(model, images):
    class Widest(AverageScorer):
        name = "widest"

        def fit(self, inliers, outliers=None):
            self.column = int(inliers.std(dim=0).argmax())
            return self

        def score(self, vectors):
            return vectors[:, self.column].abs()

    detector = Detector(model, scorer=Widest()).fit(images, held_out=images.roll(1, dims=3))
    vectors = detector.discrepancy(images)
    assert torch.equal(detector.score(images), vectors[:, vectors.std(dim=0).argmax()].abs())


class Refusing(nn.Module):
    """A batch norm that never trains, as detection backbones have it: `train` returns nothing."""

    def __init__(self):
        super().__init__()
        self.inner = make_trained()

    def forward(self, x):
        return self.inner(x)

    def train(self, mode=True):
        super().train(mode)
        self.inner.bn1.eval()


def test_a_model_whose_train_returns_nothing(images):
    detector = Detector(Refusing(), scorer="average").calibrate(images)
    twin = RecordingModule(detector.model, detector.watched, variance=False, head=None)
    means = twin((images[:5],), {}, None)[1]
    torch.testing.assert_close(means, detector.observe(images[:5]).stats.means)


def test_a_scorer_that_cannot_be_copied_is_told(model, images):
    class Holding(AverageScorer):
        def __init__(self):
            self.lock = threading.Lock()

    with pytest.raises(InputError, match="Expected a `scorer` that can be copied, but Holding cannot: cannot pickle"):
        Detector(model, scorer=Holding())


def test_a_fit_that_fails_leaves_the_scorer_as_it_was(model, images, strange):
    own = LogisticScorer()
    detector = Detector(model, scorer=own).fit(images, strange, held_out=HELD_OUT)
    before = detector.score(strange)
    with pytest.raises(CalibrationError):
        detector.fit(images[:100], strange[:50] * 2, held_out=HELD_OUT[:5])
    assert torch.equal(detector.score(strange), before)
    other = Detector(model, scorer=own).fit(images[:100], strange[:50] * 2, held_out=HELD_OUT)
    assert not torch.equal(other.score(strange), before)
    assert torch.equal(detector.score(strange), before)


def test_outliers_are_crafted_for_a_scorer_that_needs_the_output_too(model, images):
    class Both:
        needs = frozenset({"logits"})
        uses_outliers = True

        def fit(self, inliers, outliers):
            self.n_outliers = len(outliers)

        def score(self, seen):
            return seen.vector.abs().mean(1)

    with pytest.warns(CalibrationWarning):
        assert Detector(model, scorer=Both()).fit(images).scorer.n_outliers == 300


class Writing(nn.Module):
    """Prepares its input in place."""

    def __init__(self, in_place):
        super().__init__()
        self.inner, self.in_place = make_trained(), in_place

    def forward(self, x):
        return self.inner(x.sub_(0.3).div_(0.25) if self.in_place else (x - 0.3) / 0.25)


@pytest.mark.parametrize("held_out", [None, HELD_OUT])
@pytest.mark.filterwarnings("ignore::neuralmean.errors.CalibrationWarning")
def test_a_model_that_writes_to_its_input_sees_every_row_once(images, held_out):
    def fresh(rows):
        return None if rows is None else (part.clone() for part in rows.split(50))

    found = [
        Detector(Writing(way).eval()).fit(fresh(images), held_out=fresh(held_out)).threshold for way in (True, False)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
