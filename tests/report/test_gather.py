from __future__ import annotations

import numpy as np
import pytest
import torch

from neuralmean import Detector
from neuralmean.errors import InputError, ModelMismatchError
from neuralmean.report import gather as module
from neuralmean.report.gather import gather
from tests.conftest import make_trained
from tests.report.conftest import make_detector, noise


def test_scores_are_those_of_the_detector(detector):
    images = noise(70, 1)
    result = gather(detector, images, name="x")
    np.testing.assert_allclose(result.scores, detector.score(images).double().numpy(), rtol=1e-5, atol=1e-5)
    assert result.flagged == pytest.approx(float(detector.predict(images).is_ood.float().mean()))


def test_the_model_runs_once_over_each_image(detector):
    calls = []
    handle = detector.model.conv1.register_forward_hook(lambda module, args, output: calls.append(len(output)))
    try:
        gather(detector, noise(130, 1), name="x")
    finally:
        handle.remove()
    assert sum(calls) == 130


def test_contributions_are_those_of_explain(detector):
    images = noise(40, 2, high=2.0)
    result, explained = gather(detector, images, name="x"), detector.explain(images)
    n = len(detector.layers)
    torch.testing.assert_close(result.parts.mean[:n].float(), explained.by_layer.mean(dim=0), rtol=1e-4, atol=1e-5)
    total = result.parts.mean.sum().item()
    assert total == pytest.approx(result.scores.mean(), abs=1e-4)
    assert result.part_names == [
        *detector.layers,
        *("rest" if term == "constant" else term for term in explained.terms),
    ]


def test_the_gallery_holds_both_ends_in_order(detector):
    images = noise(100, 3, high=1.5)
    result = gather(detector, images, name="x")
    order = result.scores.argsort()
    assert [picture.row for picture in result.least] == order[: module.GALLERY].tolist()
    assert [picture.row for picture in result.most] == order[::-1][: module.GALLERY].tolist()
    torch.testing.assert_close(result.most[0].image, images[result.most[0].row])


def test_p_values_are_those_of_the_detector(detector):
    images = noise(30, 4, high=1.4)
    result = gather(detector, images, name="x")
    expected = detector.predict(images).p_value
    assert all(picture.p_value == pytest.approx(expected[picture.row].item()) for picture in result.most)


def test_flags_and_p_values_are_those_of_each_group():
    model, images = make_trained(), noise(460, 9, high=1.5)
    with torch.no_grad():
        model.fc.bias -= model(images).median(dim=0).values  # so that the predictions differ
    detector = Detector(model, scorer="average").calibrate(images[60:], groups="predicted", false_alarm_rate=0.2)
    images = images[:60]
    decision, result = detector.predict(images), gather(detector, images, name="x")
    assert len(set(decision.groups)) > 1
    assert result.n_flagged == int(decision.is_ood.sum()) != int((decision.score > decision.threshold).sum())
    for picture in result.most:
        assert picture.p_value == decision.p_value[picture.row].item()
        assert (picture.kind != "typical") == decision.is_ood[picture.row].item()


def test_of_equal_scores_the_first_images_are_shown(detector):
    result = gather(detector, noise(1, 5).expand(40, -1, -1, -1), name="x")
    # The same image may get other last bits in another row of a batch, by the processor's vectors: not all are equal.
    expected = sorted(range(40), key=lambda row: (-result.scores[row], row))[: module.GALLERY]
    assert sorted(picture.row for picture in result.most) == sorted(expected)
    assert len(set(result.scores.tolist())) < 40


def test_names_go_with_their_images(detector):
    images = noise(20, 6, high=3.0)
    pairs = [(images[:12], [f"n{i}" for i in range(12)]), (images[12:], [f"n{i}" for i in range(12, 20)])]
    result = gather(detector, pairs, name="x")
    assert all(picture.name == f"n{picture.row}" for picture in result.most + result.least)


def test_memory_is_bounded_by_a_uniform_sample(detector, monkeypatch):
    monkeypatch.setattr(module, "SAMPLE_ROWS", 100)
    images = noise(1000, 7)
    result = gather(detector, images, name="x")
    assert len(result.sample) == 100
    assert result.sample_parts.shape[0] == 100
    everything = torch.cat([seen.stats.means for seen in detector.observe_each(images)])
    rows = [int((everything - row).abs().sum(dim=1).argmin()) for row in result.sample.means]
    assert len(set(rows)) == 100
    assert min(np.histogram(rows, bins=4, range=(0, 1000))[0]) >= 8


def test_a_scorer_that_nobody_can_explain_has_no_parts():
    class Sum:
        def fit(self, inliers, outliers=None):
            return self

        def score(self, vectors):
            return vectors.detach().abs().sum(dim=1)

    result = gather(make_detector(scorer=Sum()), noise(20, 8), name="x")
    assert result.parts is None
    assert result.sample_parts is None
    assert result.part_names == []


def test_inputs_that_are_no_images_have_no_picture(detector):
    from neuralmean.report.gather import _Ends

    ends = _Ends()
    ends.add(torch.zeros(2), torch.ones(2), ["typical"] * 2, [None, None], torch.zeros(2, 5), None)
    assert ends.most()[0].image is None


def test_files_that_cannot_be_read_are_counted(detector):
    class Source(list):
        n_unreadable = 3

    assert gather(detector, Source([noise(5, 9)]), name="x").unreadable == 3


def test_a_set_without_images_is_refused(detector):
    with pytest.raises(InputError, match="at least one image that can be read in 'fog'"):
        gather(detector, [], name="fog")


def test_a_model_that_changed_since_the_fit_is_refused():
    detector = make_detector()
    with torch.no_grad():
        detector.model.conv1.weight.add_(1)
    with pytest.raises(ModelMismatchError):
        gather(detector, noise(5, 9), name="x")
