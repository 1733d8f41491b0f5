"""The detector as a whole: calls, bad input, and the state of the model afterwards."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean import Decision, Detector
from neuralmean.errors import (
    CalibrationWarning,
    InputError,
    LayerNotFiredError,
    LayerNotFoundError,
    ModelInputError,
    ModelMismatchError,
    NeuralMeanWarning,
    NotFittedError,
)
from neuralmean.scorers import GuidedScorer
from tests.conftest import TinyNet, count_hooks, make_trained
from tests.detector.conftest import HELD_OUT, fitted, reference_nmd


class TestUnfitted:
    def test_the_vector_equals_a_naive_loop(self, model, images):
        vectors = Detector(model).discrepancy(images[:5])
        expected = torch.tensor([reference_nmd(model, image) for image in images[:5]])
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
        assert repr(decision[-1]).startswith("Decision(OOD, ")
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
    split = list(images[:120].split(batch))
    with pytest.warns(CalibrationWarning):
        detector = Detector(model).fit(split)
    assert len(detector.calibration.scores) == 120  # all of few are rotated
    assert type(Detector(model).fit(images, list(strange.split(batch)), held_out=HELD_OUT).scorer) is GuidedScorer


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


@pytest.mark.parametrize(
    ("scorer", "layers", "tokens"), [(None, None, True), ("typicality", None, True), (None, ["patch"], False)]
)
def test_a_network_of_layer_norms_gets_the_scorer_for_tokens(scorer, layers, tokens):
    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.norm1, self.norm2 = nn.Conv2d(3, 6, 4, stride=4), nn.LayerNorm(6), nn.LayerNorm(6)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            x = self.norm1(self.patch(x).flatten(2).transpose(1, 2))
            return self.head(self.norm2(torch.relu(x)).mean(1))

    x = torch.randn(60, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuralMeanWarning)
        detector = Detector(Transformer().eval(), scorer=scorer, layers=layers).fit(x, held_out=x.flip(3))
    assert detector.scorer.tokens is tokens
