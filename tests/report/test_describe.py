from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from neuralmean import Detector
from neuralmean.detector.fitting import GUARANTEES
from neuralmean.errors import CalibrationWarning
from neuralmean.report import describe, write_report
from neuralmean.report.gather import gather
from tests.conftest import make_trained
from tests.report.conftest import make_detector, noise


def as_dict(detector):
    return {fact.name: fact for fact in describe.facts(detector)}


def test_the_facts_say_what_was_fitted_on_what(detector):
    facts = as_dict(detector)
    assert facts["Model"].value == "TinyNet"
    assert facts["Watched"].value == "2 layers, 10 channels"
    assert facts["Scorer"].value == "typicality"
    assert "batch-norm buffers" in facts["Reference"].value
    assert facts["Fitted on"].value == "120 ID images"
    assert facts["Threshold from"].value == "99 scores of held-out images"
    assert facts["Threshold"].more == "5 % false alarms requested"
    assert facts["Weights"].value == f"sha256 {detector.fingerprint[:16]}…"
    assert facts["Fitted at"].value.endswith("UTC")


def test_spec_and_paths_of_a_saved_detector_are_shown():
    detector = make_detector(scorer="logistic")
    detector.info = {
        "model": "timm:resnet18",
        "weights": "w.safetensors",
        "id": ["a/", "b/"],
        "ood": {"fog": "c/"},
        "held_out": "d/",
    }
    facts = describe.facts(detector)
    assert [fact.more for fact in facts if fact.name in ("Weights", "Fitted on", "and on", "Threshold from")] == [
        "w.safetensors",
        "a/, b/",
        "c/",
        "d/",
    ]
    assert as_dict(detector)["Model"].value == "timm:resnet18"
    assert as_dict(detector)["and on"].value == "60 OOD images"


def test_every_source_of_a_threshold_has_a_name():
    assert describe._CALIBRATION.keys() == GUARANTEES.keys()


def test_a_detector_fitted_without_held_out_images_has_a_report(images, tmp_path):
    with pytest.warns(CalibrationWarning):
        detector = Detector(make_trained()).fit(images[:200])
    assert detector.calibration_source == "rotated"
    path = write_report(detector, images[200:260], {"noise": images[:50] + 3}, tmp_path / "r.html")
    assert "scores of ID images, slightly rotated" in path.read_text()


def test_crafted_images_are_called_so():
    detector = Detector(make_trained(), scorer="logistic").fit(noise(60, 1), held_out=noise(40, 2))
    assert as_dict(detector)["and on"].value == "60 crafted OOD images"


def test_a_reference_from_data_says_how_many_images():
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    detector = Detector(model).fit(noise(120, 1), held_out=noise(40, 2))
    assert as_dict(detector)["Reference"].more == "120 images"


def test_a_detector_that_was_only_calibrated_has_no_fit_to_tell_of():
    detector = Detector(make_trained(), scorer="average").calibrate(noise(40, 1))
    assert not {"Fitted on", "Fitted at"} & set(as_dict(detector))


def test_nothing_to_be_careful_about_is_nothing_said(detector):
    inside, outside = gather(detector, noise(200, 21), name="in"), gather(detector, noise(100, 22, high=3), name="out")
    if inside.flagged > 0.08:
        pytest.fail("the toy data no longer fits the toy model")
    assert describe.cautions(detector, inside, [outside], None) == []


def test_more_false_alarms_than_asked_for_are_told(detector):
    inside = gather(detector, noise(200, 1, low=2.0, high=5.0), name="in")
    (said,) = describe.cautions(detector, inside, [], None)
    assert "more than the 5 % requested" in said
    assert "200 ID images" in said


def test_a_weak_guarantee_is_told():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        detector = Detector(make_trained()).fit(noise(200, 3))
    inside = gather(detector, noise(200, 3), name="in")
    assert describe.cautions(detector, inside, [], None) == [detector.guarantee]


def test_images_of_the_fit_are_told(tmp_path):
    detector = make_detector()
    detector.info = {
        "id": [str(tmp_path / "train")],
        "held_out": [str(tmp_path / "val")],
        "ood": [str(tmp_path / "fog")],
    }
    result = gather(detector, noise(200, 21), name="in")
    info = {"id": [f"{tmp_path}/x/../val"], "ood": {"fog": str(tmp_path / "fog")}}
    said = describe.cautions(detector, result, [], info)
    assert [words.split(":")[-1].strip()[:20] for words in said] == ["the figures flatter.", "their figures flatte"]


def test_small_sets_and_unreadable_files_are_told(detector):
    class Source(list):
        n_unreadable = 1200

    inside = gather(detector, noise(200, 21), name="in")
    outside = gather(detector, Source([noise(30, 2)]), name="fog")
    assert describe.cautions(detector, inside, [outside], None) == [
        "There are only 30 images in 'fog': expect wide intervals.",
        "1,200 files of 'fog' could not be read and are left out.",
    ]


@pytest.mark.parametrize(
    ("used", "shown", "shared"),
    [("/a/val", "/a/val", True), ("/a/val", "/a", True), ("/a", "/a/val/1.png", True), ("/a/val", "/a/val/*.png", True),
     ("/a/val", "/b/val", False), ("/a/val", "/a/value", False), ("/a/*/train", "/a/*/test", False),
     ("/a/*.png", "/a/test", False), ("/a/*.png", "/a/*.png", True), ("/a/*/x.png", "/", True)],
)  # fmt: skip
def test_images_of_the_fit_are_known_by_where_they_are(used, shown, shared):
    assert describe._share_images({Path(used)}, {Path(shown)}) is shared


def test_the_sentence_on_batches_says_what_the_curve_shows():
    from types import SimpleNamespace

    from neuralmean.report.describe import batches_sentence

    sets = [
        SimpleNamespace(name="up", by_batch={1: (80.0, None), 32: (99.0, None)}),
        SimpleNamespace(name="down", by_batch={1: (60.0, None), 8: (55.5, None)}),
        SimpleNamespace(name="level", by_batch={1: (100.0, None), 32: (100.0, None)}),
        SimpleNamespace(name="few", by_batch={1: (70.0, None)}),
    ]
    text = batches_sentence(sets)
    assert "up rises from 80.0 to 99.0 % with 32" in text
    assert "down falls from 60.0 to 55.5 % with 8" in text
    assert "level stays at 100.0 %" in text
    assert "few has too few images" in text
