from __future__ import annotations

import copy
import operator
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from neuralmean import Decision, Detector, Reference
from neuralmean.errors import (
    CalibrationError,
    CalibrationWarning,
    InputError,
    LayerNotFiredError,
    LayerNotFoundError,
    ModelInputError,
    ModelMismatchError,
    NotFittedError,
)
from neuralmean.recording import RecordingModule
from neuralmean.scorers import AverageScorer, LogisticScorer
from neuralmean.stats.moments import Moments
from tests.conftest import TinyNet, count_hooks, make_trained

HELD_OUT = torch.rand(200, 3, 8, 8, generator=torch.Generator().manual_seed(7))


def _reference_nmd(model, image):
    """The paper's Eq. 3 to 5 for one image, from stored activations, one number at a time."""
    kept = {}
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: kept.update({name: args[0].detach().clone()}))
        for name, module in model.named_modules()
        if isinstance(module, nn.BatchNorm2d)
    ]
    model(image.unsqueeze(0))
    for handle in handles:
        handle.remove()
    vector = []
    for name, activation in kept.items():
        for c in range(activation.shape[1]):
            values = activation[0, c].flatten().tolist()
            vector.append(sum(values) / len(values) - model.get_submodule(name).running_mean[c].item())
    return vector


def fitted(model, images, **options):
    return Detector(model, **options).fit(images, held_out=HELD_OUT)


class TestUnfitted:
    def test_the_vector_equals_a_naive_loop(self, model, images):
        vectors = Detector(model).discrepancy(images[:5])
        expected = torch.tensor([_reference_nmd(model, image) for image in images[:5]])
        torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)

    def test_layers_and_channels_are_named(self, model):
        detector = Detector(model)
        assert detector.layers == ("bn1", "bn2")
        assert len(detector.channels) == 10
        assert detector.channels[:2] + detector.channels[-1:] == ["bn1[0]", "bn1[1]", "bn2[5]"]

    def test_the_average_needs_no_data_at_all(self, model, images, strange):
        detector = Detector(model, scorer="average")
        torch.testing.assert_close(detector.score(images), detector.discrepancy(images).abs().mean(1))
        assert detector.score(strange).min() > detector.score(images).max()

    def test_a_decision_needs_a_threshold(self, model, images):
        for ask in (Detector(model).predict, Detector(model)):
            with pytest.raises(
                NotFittedError, match="The detector has no threshold yet. Call `fit` or `calibrate` first"
            ):
                ask(images)

    def test_a_model_without_buffers_needs_a_fit(self, images):
        with pytest.raises(
            NotFittedError, match="no reference yet, as the model has no batch-norm buffers. Call `fit` first"
        ):
            Detector(nn.Conv2d(3, 2, 3)).score(images)

    def test_both_statistics_need_a_fit(self, model, images):
        with pytest.raises(NotFittedError, match="standardised on in-distribution data. Call `fit` first"):
            Detector(model, statistic="both").score(images)


class TestBatch:
    def test_a_batch_score_is_the_average_of_the_pooled_discrepancy(self, model, images):
        detector = Detector(model, scorer="average")
        expected = detector.discrepancy(images).mean(0).abs().mean().item()
        assert detector.score_batch(images) == pytest.approx(expected, rel=1e-5)

    def test_a_batch_of_one_is_a_single_input(self, model, images):
        detector = Detector(model, scorer="average")
        assert detector.score_batch(images[:1]) == pytest.approx(detector.score(images[:1]).item(), rel=1e-6)

    def test_larger_batches_separate_better(self, model, images):
        near = images * 1.05
        detector = Detector(model, scorer="average")

        def gap(size):
            ours, theirs = ([detector.score_batch(part) for part in data.split(size)] for data in (images, near))
            return (np.mean(theirs) - np.mean(ours)) / (np.std(ours) + np.std(theirs))

        assert gap(1) < gap(10) < gap(50)


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
        with pytest.raises(InputError, match="Expected a reference of the layers that are watched"):
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
        with pytest.warns(CalibrationWarning, match="expect more false alarms than asked for: pass `held_out` data"):
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
        with pytest.warns(
            CalibrationWarning, match="slightly rotated, which stands in for images that the model has not memo"
        ):
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


class TestCall:
    def test_output_and_decision_come_from_one_forward_pass(self, images):
        class Counts(TinyNet):
            calls = 0

            def forward(self, x):
                self.calls += 1
                return super().forward(x)

        model = Counts()
        model.load_state_dict(make_trained().state_dict())
        model.eval()
        detector = fitted(model, images)
        expected, model.calls = model(images), 0
        output, decision = detector(images)
        assert model.calls == 1
        assert torch.equal(output, expected)
        assert isinstance(decision, Decision)
        torch.testing.assert_close(decision.score, detector.score(images), rtol=1e-5, atol=1e-6)

    def test_a_decision_agrees_with_its_parts(self, model, images, strange):
        decision = fitted(model, images).predict(torch.cat([images[:10], strange[:10]]))
        assert torch.equal(decision.is_ood, decision.score > decision.threshold)
        assert torch.equal(decision.is_ood, decision.p_value <= 0.05)
        assert len(decision) == 20
        assert [bool(one.is_ood) for one in decision] == decision.is_ood.tolist()
        assert repr(decision[-1]).startswith("Decision(OOD, both: score ")
        assert "of 20 OOD" in repr(decision)

    def test_eight_threads_give_the_serial_answers(self, model, images):
        detector = fitted(model, images)
        parts = images.split(30)[:8]
        serial = [detector(part) for part in parts]
        results = {}

        def work(index):
            for _ in range(20):
                results[index] = detector(parts[index])

        threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, (output, decision) in enumerate(serial):
            assert torch.equal(results[index][0], output)
            assert torch.equal(results[index][1].score, decision.score)

    def test_two_detectors_on_one_model_do_not_see_each_other(self, model, images):
        one, two = fitted(model, images, layers=["bn1"]), fitted(model, images, layers=["bn2"])
        assert one.discrepancy(images).shape == (300, 4)
        assert two.discrepancy(images).shape == (300, 6)
        assert count_hooks(model) == 0


class TestExplain:
    @pytest.mark.parametrize("scorer", ["average", "logistic", "typicality"])
    def test_contributions_add_up_to_the_score(self, model, images, strange, scorer):
        detector = Detector(model, scorer=scorer).fit(images, strange, held_out=HELD_OUT)
        explanation = detector.explain(strange[:7])
        assert explanation.exact
        total = explanation.by_channel.sum(1) + sum(explanation.terms.values())
        torch.testing.assert_close(total, detector.score(strange[:7]), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(explanation.by_layer.sum(1), explanation.by_channel.sum(1), rtol=1e-4, atol=1e-4)
        assert explanation.by_layer.shape == (7, 2)

    def test_a_scorer_that_is_not_a_sum_is_explained_to_first_order(self, model, images, strange):
        with torch.no_grad():
            explanation = Detector(model, scorer="mlp").fit(images, strange, held_out=HELD_OUT).explain(strange[:3])
        assert not explanation.exact
        assert explanation.by_layer.shape == (3, 2)

    def test_the_largest_contributions_come_first(self, model, images, strange):
        explanation = fitted(model, images, scorer="average").explain(strange[:1])
        layers, channels = explanation.top_layers(), explanation.top_channels(n=3)
        assert [name for name, _ in layers] == sorted(
            detector_layers := ["bn1", "bn2"], key=dict(layers).get, reverse=True
        )
        assert len(layers) == len(detector_layers)
        assert len(channels) == 3
        assert channels[0][1] == explanation.by_channel.max().item()
        assert "1 inputs" in repr(explanation)


class TestBadInput:
    @pytest.fixture
    def detector(self, model, images):
        return fitted(model, images, scorer="average")

    def test_empty_data(self, detector, images):
        with pytest.raises(InputError, match="Expected `id_data` to hold at least one example"):
            detector.fit(images[:0])
        with pytest.raises(InputError, match="Expected `ood_data` to hold at least one example"):
            Detector(detector.model, scorer="logistic").fit(images, images[:0])
        with pytest.raises(InputError, match="Expected `x` to hold at least one example"):
            detector.predict(images[:0])  # and the fit that failed has left the detector as it was

    def test_wrong_channel_count(self, detector, model):
        with pytest.raises(ModelInputError, match=r"an input that TinyNet accepts, but got shape \(4, 1, 8, 8\)"):
            detector(torch.zeros(4, 1, 8, 8))
        assert count_hooks(model) == 0

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
    def test_nan_and_inf(self, detector, images, value):
        images[3, 1, 2, 2] = value
        for ask in (detector, detector.predict, detector.score, detector.fit, detector.explain):
            with pytest.raises(
                InputError, match=r"Expected finite activations, but 1 of \d+ inputs in `\w+` \(rows \[3\]\)"
            ):
                ask(images)

    def test_one_class_only(self, model, images):
        from neuralmean.scorers import make_scorer

        with pytest.raises(
            InputError, match="Expected examples of both kinds to fit the 'logistic' scorer, but got 5 in-dist"
        ):
            make_scorer("logistic").fit(torch.zeros(5, 2), torch.zeros(0, 2))

    def test_labels_passed_as_data(self, detector, images):
        labels = torch.zeros(300, dtype=torch.int64)
        with pytest.raises(InputError, match=r"`ood_data` to hold inputs of the model .* Are these labels"):
            Detector(detector.model).fit(images, labels)
        with pytest.raises(InputError, match="Are these labels"):
            detector.predict(labels)

    def test_a_layer_name_with_a_typo(self, model):
        with pytest.raises(LayerNotFoundError, match="Did you mean 'bn1'"):
            Detector(model, layers=["b1"])

    @pytest.mark.parametrize("rate", [0, 1, 1.5, -0.1, "5%"], ids=repr)
    def test_false_alarm_rate_out_of_range(self, detector, images, rate):
        for ask in (detector.fit, detector.calibrate):
            with pytest.raises(InputError, match=r"Expected `false_alarm_rate` to be a number in the \(0, 1\) range"):
                ask(images, false_alarm_rate=rate)

    def test_int_images(self, detector):
        with pytest.raises(
            InputError, match="Expected `x` to hold floats, prepared as for training, but got torch.uint8"
        ):
            detector(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))

    def test_something_that_is_no_model(self):
        with pytest.raises(InputError, match=r"Expected `model` to be a torch\.nn\.Module, but got str"):
            Detector("resnet")

    def test_an_unknown_scorer(self, model):
        with pytest.raises(InputError, match="but got 'logstic'. Did you mean 'logistic'"):
            Detector(model, scorer="logstic")
        with pytest.raises(
            InputError, match="Expected `scorer` to be a name or an object with `fit` and `score`, but got 3"
        ):
            Detector(model, scorer=3)

    def test_a_head_that_is_not_there(self, model):
        with pytest.raises(InputError, match="Expected `head` to be a layer of TinyNet, but got 'classifier'"):
            Detector(model, head="classifier")


class TestSavedFile:
    @pytest.mark.parametrize("statistic", ["mean", "variance", "both"])
    @pytest.mark.parametrize("scorer", ["average", "logistic", "mlp", "typicality"])
    def test_scores_are_the_same_bit_for_bit(self, tmp_path, model, images, strange, scorer, statistic):
        detector = Detector(model, scorer=scorer, statistic=statistic).fit(images, strange, held_out=HELD_OUT)
        detector.save(tmp_path / "x.nmd", info={"model": "toy"})
        again = Detector.load(tmp_path / "x.nmd", copy.deepcopy(model))
        before, after = detector.predict(strange), again.predict(strange)
        assert torch.equal(before.score, after.score)
        assert torch.equal(before.p_value, after.p_value)
        assert before.threshold == after.threshold
        assert again.info == {"model": "toy"}
        assert (again.fitted, again.guarantee) == (detector.fitted, detector.guarantee)
        assert again.score_batch(images[:9]) == detector.score_batch(images[:9])
        old, new = detector.profile, again.profile
        assert old.moments.count == new.moments.count
        for name in ("moments.mean", "moments.m2", "squares", "largest"):
            assert torch.equal(*map(operator.attrgetter(name), (old, new)))

    def test_a_reference_from_data_survives(self, tmp_path, images):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))
        detector = fitted(model, images, scorer="average")
        detector.save(tmp_path / "x.nmd")
        again = Detector.load(tmp_path / "x.nmd", model)
        assert (again.reference.source, again.reference.count) == ("data", 300)
        assert torch.equal(again.score(images), detector.score(images))

    def test_the_file_is_small_and_not_a_pickle(self, tmp_path, model, images):
        fitted(model, images, scorer="average").save(tmp_path / "x.nmd")
        content = (tmp_path / "x.nmd").read_bytes()
        assert len(content) < 8192
        assert b"__metadata__" in content[:100]

    def test_other_weights_are_refused(self, tmp_path, model, images):
        fitted(model, images).save(tmp_path / "x.nmd")
        with pytest.raises(
            ModelMismatchError, match="Expected the TinyNet that .* was fitted on, but its weights differ"
        ):
            Detector.load(tmp_path / "x.nmd", make_trained(seed=5))

    def test_another_model_is_refused(self, tmp_path, model, images):
        fitted(model, images).save(tmp_path / "x.nmd")
        with pytest.raises(ModelMismatchError, match="Expected the TinyNet .* but got a Sequential with other layers"):
            Detector.load(tmp_path / "x.nmd", nn.Sequential(nn.BatchNorm2d(3)))
        with pytest.raises(ModelMismatchError, match="but got str"):
            Detector.load(tmp_path / "x.nmd", "resnet")

    def test_an_unfitted_detector_cannot_be_saved(self, tmp_path, model):
        with pytest.raises(NotFittedError, match="Expected a fitted detector to save"):
            Detector(model).save(tmp_path / "x.nmd")

    def test_repr_says_what_it_is(self, model, images):
        assert (
            repr(Detector(model, scorer="average"))
            == "Detector(TinyNet: 2 layers, 10 channels, average, not calibrated)"
        )
        assert "threshold" in repr(fitted(model, images))


@pytest.mark.parametrize("scorer", ["average", "logistic", "mlp", "typicality"])
def test_what_was_fitted_in_inference_mode_serves_outside(model, images, scorer):
    strange = images.flip(0) * 3 + 1
    with torch.inference_mode():
        detector = Detector(model, scorer=scorer).fit(images, strange, held_out=images.roll(1, dims=3))
        inside = detector(images[:4])[1].score
    torch.testing.assert_close(detector(images[:4])[1].score, inside)
    assert detector.explain(images[:4]).by_layer.shape == (4, len(detector.layers))


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


def test_a_detector_with_exits_can_be_fitted_without_once_loaded(tmp_path, model, images, strange):
    detector = Detector(model).fit(images, strange, held_out=HELD_OUT, early_exit=True)
    detector.save(tmp_path / "x.nmd")
    loaded = Detector.load(tmp_path / "x.nmd", model)
    assert loaded(strange)[0] is None
    loaded.fit(images, strange, held_out=HELD_OUT)
    output, decision = loaded(strange)
    assert output.shape == (100, 3)
    assert decision.is_ood.all()


class Dividing(nn.Module):
    """Divides its feature by its length, which may be nothing, behind the last watched layer."""

    def __init__(self):
        super().__init__()
        self.inner = make_trained()
        self.fc = nn.Linear(3, 2)

    def forward(self, x):
        feature = self.inner(x)
        return self.fc((feature - self.inner.fc.bias) / (x.abs().sum((1, 2, 3)) > 0).unsqueeze(1))


def test_a_score_that_is_no_number_is_an_error_and_not_a_verdict(images):
    detector = Detector(Dividing(), scorer="typicality").fit(images, held_out=HELD_OUT)
    inputs = torch.cat([images[:2], torch.zeros(1, 3, 8, 8)])
    for ask in (detector, detector.predict):
        with pytest.raises(InputError, match=r"Expected a score for each input, but 1 of 3 \(rows \[2\]\) are NaN"):
            ask(inputs)


def test_an_infinite_score_is_a_score(model, images):
    class Certain:
        def fit(self, inliers):
            pass

        def score(self, vectors):
            return torch.where(vectors.abs().sum(1) > 20, torch.inf, vectors[:, 1])

    detector = Detector(model, scorer=Certain()).fit(images, held_out=HELD_OUT)
    decision = detector.predict(images[:3] * 50)
    assert decision.score.isinf().all()
    assert decision.is_ood.all()


class Tagger(nn.Module):
    """A class for each token: its head sees tokens and not inputs."""

    def __init__(self):
        super().__init__()
        self.emb, self.norm, self.fc = nn.Embedding(20, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, ids):
        h = self.norm(self.emb(ids))
        return self.fc(h.reshape(-1, 8)).view(*ids.shape, 3)


def test_a_head_that_sees_more_rows_than_inputs_is_none():
    ids = torch.randint(20, (200, 6), generator=torch.Generator().manual_seed(0))
    model = Tagger().eval()
    detector = Detector(model).fit(ids[:100], held_out=ids[100:])
    assert detector.head is None
    assert detector(ids[:2])[1].score.shape == (2,)
    with pytest.raises(InputError, match=r"Expected one row for each of the .* inputs at the head 'fc', but got"):
        Detector(model, head="fc").fit(ids[:100], held_out=ids[100:])


@pytest.mark.parametrize("batch", [2, 20])
def test_what_is_chosen_does_not_depend_on_the_batches(model, images, strange, batch):
    split = list(images[:80].split(batch))
    with pytest.warns(CalibrationWarning):
        detector = Detector(model).fit(split)
    assert len(detector.calibration.scores) == 80  # all of few are turned
    assert type(Detector(model).fit(images, list(strange.split(batch)), held_out=HELD_OUT).scorer) is LogisticScorer


@pytest.mark.parametrize("scorer", ["mlp", "logistic"])
def test_what_is_asked_in_inference_mode_is_answered(tmp_path, model, images, strange, scorer):
    detector = Detector(model, scorer=scorer).fit(images, strange, held_out=HELD_OUT)
    expected = detector.explain(strange[:3]).by_layer
    detector.save(tmp_path / "x.nmd")
    with torch.inference_mode():
        torch.testing.assert_close(detector.explain(strange[:3]).by_layer, expected)
        loaded = Detector.load(tmp_path / "x.nmd", model)
    torch.testing.assert_close(loaded.explain(strange[:3]).by_layer, expected)


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


@pytest.mark.parametrize("early_exit", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda detector: pickle.loads(pickle.dumps(detector))])
def test_a_detector_can_be_copied_and_sent(model, images, strange, copied, early_exit):
    detector = Detector(model).fit(images, strange, held_out=HELD_OUT, early_exit=early_exit)
    twin = copied(detector)
    assert twin.model is not model
    assert torch.equal(twin.score(strange), detector.score(strange))
    torch.testing.assert_close(twin(images[:3])[0], model(images[:3]))
    with torch.no_grad():
        twin.model.fc.weight.add_(1)
    with pytest.raises(ModelMismatchError):
        twin.score(strange)
    detector.score(strange)


@pytest.mark.parametrize("statistic", ["mean", "variance", "both"])
def test_a_model_in_double_precision(model, images, strange, statistic):
    single = Detector(model, statistic=statistic).fit(images, held_out=HELD_OUT)
    double = Detector(copy.deepcopy(model).double(), statistic=statistic).fit(
        images.double(), held_out=HELD_OUT.double()
    )
    torch.testing.assert_close(double.score(strange.double()).float(), single.score(strange), rtol=1e-2, atol=1e-2)
    assert double.explain(strange[:2].double()).by_layer.shape == (2, 2)


def test_an_input_that_the_model_cannot_take_is_told_on_every_way(model, images):
    wrong = r"Expected `{}` to be an input that TinyNet accepts, but got shape \({}"
    with pytest.raises(ModelInputError, match=wrong.format("id_data", "64, 4, 8, 8")):
        Detector(model).fit(torch.rand(200, 4, 8, 8))
    detector = fitted(model, images, scorer="average")
    with pytest.raises(ModelInputError, match=wrong.format("x", "3, 8, 8")):
        detector(images[0])
    with pytest.raises(
        ModelInputError, match=wrong.format("id_data", "64, 3, 8, 8") + r".*unexpected keyword argument 'y'"
    ):
        Detector(model).fit({"y": images})


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


def test_encoder_layers_of_torch_are_watched():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(96, 3)).eval()
    x = torch.rand(200, 6, 16, generator=torch.Generator().manual_seed(0))
    detector = Detector(model).fit(x, held_out=torch.rand(200, 6, 16))
    assert len(detector.layers) == 4
    torch.testing.assert_close(detector(x[:3])[0], model(x[:3]))
    assert not any("out_proj" in name for name in Detector(model, layers="0.layers.*").layers)


def test_detectors_on_a_model_and_on_its_part_leave_it_as_it_was(images):
    whole = nn.Sequential(make_trained(), nn.Linear(3, 2))
    detectors = [Detector(one, scorer="average").calibrate(images) for one in (whole, whole[0])]
    whole.train()
    before = whole[0].bn1.running_mean.clone()
    threads = [threading.Thread(target=lambda d=d: [d.score(images[:4]) for _ in range(150)]) for d in detectors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(whole[0].bn1.running_mean, before)
    assert all(module.training for module in whole.modules())


def test_a_head_that_never_runs_is_told(images):
    model = make_trained()
    model.aux = nn.Linear(6, 3)
    with pytest.raises(LayerNotFiredError, match="Expected the head 'aux' to run in the forward pass, but it did not"):
        Detector(model, head="aux").fit(images, held_out=HELD_OUT)


def test_nothing_is_scored_also_with_exits(model, images, strange):
    detector = Detector(model).fit(images, strange, held_out=HELD_OUT, early_exit=True)
    assert len(detector(images[:0])[1]) == 0


def test_a_batch_needs_a_scorer_that_can_score_one(model, images):
    class Own:
        needs = frozenset({"logits"})

        def fit(self, inliers):
            pass

        def score(self, seen):
            return seen.logits[:, 0]

    with pytest.raises(InputError, match="Expected a scorer with `score_batch`, as Own needs the model's logits"):
        fitted(model, images, scorer=Own()).score_batch(images[:4])


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_below_one_is_told(model, images, size):
    with pytest.raises(InputError, match=f"Expected `batch_size` to be a whole number of at least 1, but got {size}"):
        Detector(model, scorer="average").score(images, batch_size=size)


def test_other_layers_of_the_same_name_are_another_model(tmp_path, model, images):
    fitted(model, images).save(tmp_path / "x.nmd")
    other = copy.deepcopy(model)
    other.bn1 = nn.Identity()
    with pytest.raises(ModelMismatchError, match="with other layers"):
        Detector.load(tmp_path / "x.nmd", other)


def test_a_decision_is_neither_true_nor_false_and_can_be_cut(model, images):
    decision = fitted(model, images, scorer="average").predict(images[:6])
    with pytest.raises(InputError, match="Expected to be asked for `is_ood`"):
        bool(decision)
    assert torch.equal(decision[2:4].score, decision.score[2:4])
    for last in (-1, 5, np.int64(5), torch.tensor(5)):
        assert torch.equal(decision[last].score, decision.score[-1:])


def test_terms_are_above_their_usual(model, images):
    detector = fitted(model, images)
    found = detector.explain(HELD_OUT)
    for name in ("feature", "reach", "energy"):
        assert abs(found.terms[name].mean()) < 0.5  # in units of their deviation on in-distribution inputs
    total = found.by_layer.sum(1) + sum(found.terms.values())
    torch.testing.assert_close(total, found.score, rtol=1e-3, atol=1e-3)
