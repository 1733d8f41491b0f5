"""Options that several commands share: preprocessing, rates, untrained models."""

import json
import sys

import pytest
import torch

from neuralmean.cli import options
from neuralmean.errors import MissingExtraError, UsageError
from tests.cli.conftest import FIT

DATA = ("--id", "train", "--held-out", "val", "--out", "m.nmd", "-q")


def preprocessing_of(path):
    from neuralmean.files.artefact import Artefact

    return Artefact.read(path).header["info"]["preprocessing"]


@pytest.mark.parametrize(
    ("crop", "interpolation", "settings"),
    [
        (None, None, {}),
        ("squash", None, {"crop": "squash"}),
        ("center:0.875", "bicubic", {"crop": "center", "crop_fraction": 0.875, "interpolation": "bicubic"}),
    ],
)
def test_crop_and_interpolation_are_read(crop, interpolation, settings):
    assert options.crop_settings(crop, interpolation) == settings


def test_a_share_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match="Expected --crop to be MODE or MODE:SHARE, but got 'center:most'"):
        options.crop_settings("center:most", None)


def test_fit_keeps_crop_and_interpolation(world, nmd):
    code, _, err = nmd("fit", "toynet:Net", *FIT, *DATA, "--crop", "center:0.5", "--interpolation", "bicubic")
    assert code == 0, err
    kept = preprocessing_of(world / "m.nmd")
    assert (kept["crop"], kept["crop_fraction"], kept["interpolation"]) == ("center", 0.5, "bicubic")


def test_an_unknown_crop_is_refused_with_the_choices(world, nmd):
    code, _, err = nmd("fit", "toynet:Net", *FIT, *DATA, "--crop", "corner")
    assert code == 1
    assert "Expected `crop` to be one of ['center', 'squash', 'border'], but got 'corner'" in err


def test_a_callable_may_bring_its_preprocessing(world, nmd):
    with (world / "toynet.py").open("a") as file:
        file.write("\nNet.preprocessing = {'size': [12, 12], 'mean': [0.5] * 3, 'std': [0.25] * 3, 'crop': 'squash'}\n")
    sys.modules.pop("toynet", None)
    code, _, err = nmd("fit", "toynet:Net", "--weights", "w.safetensors", *DATA)
    assert code == 0, err
    kept = preprocessing_of(world / "m.nmd")
    assert (kept["std"], kept["crop"]) == ([0.25] * 3, "squash")
    code, _, err = nmd("fit", "toynet:Net", "--weights", "w.safetensors", "--mean", "0.1,0.1,0.1", *DATA)
    assert code == 0, err
    assert preprocessing_of(world / "m.nmd")["mean"] == [0.1] * 3


def test_what_is_missing_is_named(world, nmd):
    code, _, err = nmd("fit", "toynet:Net", "--weights", "w.safetensors", "--mean", "0.5,0.5,0.5", *DATA)
    assert code == 1
    assert "got no std" in err


def test_a_package_that_another_needs_is_named(tmp_path, monkeypatch):
    from neuralmean.data.preprocessing import import_quietly

    (tmp_path / "needy.py").write_text("import no_such_package_of_needy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        MissingExtraError,
        match="it needs 'no_such_package_of_needy', which is not. Install",
    ):
        import_quietly("needy", "needy")
    with pytest.raises(MissingExtraError, match="Expected 'absent_package' to be installed, but it is not"):
        import_quietly("absent_package", "absent_package")


def test_an_untrained_model_is_refused_unless_allowed(world, nmd):
    plain = FIT[2:]
    code, _, err = nmd("fit", "toynet:Net", *plain, *DATA)
    assert code == 1
    assert (
        "Expected a trained model, but 'toynet:Net' has random weights. Pass --weights FILE, or --allow-untrained"
        in err
    )
    code, _, err = nmd("fit", "toynet:Net", *plain, *DATA, "--allow-untrained")
    assert code == 0, err


def test_rate_moves_the_verdicts_and_nothing_else(saved, nmd):
    rows = {}
    for rate in (None, "0.5"):
        code, out, err = nmd(
            "score",
            saved,
            "new",
            "--trust-local-code",
            "--format",
            "json",
            "-q",
            *(() if rate is None else ("--rate", rate)),
        )
        assert code == 0, err
        rows[rate] = [json.loads(line) for line in out.splitlines()]
    assert [row["score"] for row in rows[None]] == [row["score"] for row in rows["0.5"]]
    assert all(row["is_ood"] == (row["p_value"] <= 0.5) for row in rows["0.5"])
    assert sum(row["is_ood"] for row in rows["0.5"]) > sum(row["is_ood"] for row in rows[None])


@pytest.mark.parametrize(("rate", "code"), [("1.5", 2), ("0.0001", 1)])
def test_a_rate_that_cannot_be_is_refused(saved, nmd, rate, code):
    left, _, err = nmd("score", saved, "new", "--trust-local-code", "--rate", rate)
    assert left == code
    assert "Error: Expected" in err


def test_a_served_detector_has_the_rate(saved):
    from neuralmean.service.launch import load_served

    served = load_served(saved, rate=0.2, trust_local_code=True)
    assert served.detector.false_alarm_rate == 0.2
    assert isinstance(served.detector.threshold, float)


def test_the_rate_of_early_exits_cannot_be_moved(world):
    import toynet
    from safetensors.torch import load_file

    from neuralmean import Detector

    model = toynet.Net().eval()
    model.load_state_dict(load_file("w.safetensors"))
    images = torch.rand(120, 3, 12, 12)
    detector = Detector(model).fit(images, held_out=torch.rand(60, 3, 12, 12), early_exit=True)
    with pytest.raises(ValueError, match="Expected a detector without early exit"):
        detector.set_rate(0.1)


def test_the_demo_prints_what_its_report_shows(tmp_path, nmd):
    code, out, err = nmd("demo", "--out", tmp_path)
    assert code == 0, err
    report = (tmp_path / "report.html").read_text()
    printed = [line.split()[-3].rstrip("%") for line in out.splitlines() if line.startswith("default")]
    assert len(printed) == 2
    for auroc in printed:
        assert auroc in report
