"""What a saved file says of its scorer."""

from __future__ import annotations

import pytest

from neuralmean import Detector
from neuralmean.detector.inspection import describe_saved
from neuralmean.errors import NeuralMeanWarning
from tests.detector.conftest import HELD_OUT, fitted


def test_all_terms_are_named(model, images, tmp_path):
    fitted(model, images).save(tmp_path / "a.nmd")
    assert "terms: far, angle, reach, doubt" in describe_saved(tmp_path / "a.nmd")


def test_a_term_that_is_left_out_is_named_with_the_reason(model, images, tmp_path):
    with pytest.warns(NeuralMeanWarning, match="The term 'angle' of the score is left out, as it takes 100 examples"):
        detector = Detector(model).fit(images[:60], held_out=HELD_OUT)
    detector.save(tmp_path / "a.nmd")
    expected = "terms: far, reach, doubt (angle is left out, as it takes 100 examples)"
    assert expected in describe_saved(tmp_path / "a.nmd")


def test_the_terms_beside_learnt_evidence_are_named_too(model, images, strange, tmp_path):
    Detector(model).fit(images, strange, held_out=HELD_OUT).save(tmp_path / "a.nmd")
    assert "terms: far, angle, reach, doubt" in describe_saved(tmp_path / "a.nmd")


def test_other_scorers_have_no_terms(model, images, tmp_path):
    fitted(model, images, scorer="average").save(tmp_path / "a.nmd")
    assert not any(line.startswith("terms:") for line in describe_saved(tmp_path / "a.nmd"))
