"""A detector comes back from its file as it was saved."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.errors import (
    ModelMismatchError,
    NotFittedError,
)
from tests.conftest import make_trained
from tests.detector.conftest import HELD_OUT, fitted


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


def test_a_detector_with_exits_can_be_fitted_without_once_loaded(tmp_path, model, images, strange):
    detector = Detector(model).fit(images, strange, held_out=HELD_OUT, early_exit=True)
    detector.save(tmp_path / "x.nmd")
    loaded = Detector.load(tmp_path / "x.nmd", model)
    assert loaded(strange)[0] is None
    loaded.fit(images, strange, held_out=HELD_OUT)
    output, decision = loaded(strange)
    assert output.shape == (100, 3)
    assert decision.is_ood.all()


@pytest.mark.parametrize("scorer", ["mlp", "logistic"])
def test_what_is_asked_in_inference_mode_is_answered(tmp_path, model, images, strange, scorer):
    detector = Detector(model, scorer=scorer).fit(images, strange, held_out=HELD_OUT)
    expected = detector.explain(strange[:3]).by_layer
    detector.save(tmp_path / "x.nmd")
    with torch.inference_mode():
        torch.testing.assert_close(detector.explain(strange[:3]).by_layer, expected)
        loaded = Detector.load(tmp_path / "x.nmd", model)
    torch.testing.assert_close(loaded.explain(strange[:3]).by_layer, expected)


def test_other_layers_of_the_same_name_are_another_model(tmp_path, model, images):
    fitted(model, images).save(tmp_path / "x.nmd")
    other = copy.deepcopy(model)
    other.bn1 = nn.Identity()
    with pytest.raises(ModelMismatchError, match="with other layers"):
        Detector.load(tmp_path / "x.nmd", other)
