from __future__ import annotations

import pytest
from PIL import Image
from typer.testing import CliRunner

from neuralmean import Detector
from neuralmean.cli import report_command  # noqa: F401 - registers the command
from neuralmean.cli.app import app
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError
from tests.conftest import make_trained
from tests.report.conftest import noise

HOW = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)


@pytest.fixture
def saved(tmp_path):
    detector = Detector(make_trained(), scorer="average").calibrate(noise(40, 1))
    detector.save(tmp_path / "m.nmd", info={"model": "tests.conftest:make_trained", "preprocessing": HOW.to_json()})
    return tmp_path / "m.nmd"


def run(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=True)


def test_the_command_writes_the_report(saved, picture_folder, tmp_path):
    (picture_folder / "broken.png").write_bytes(b"no image")
    out = tmp_path / "report.html"
    arguments = ["--id", picture_folder, "--ood", f"blue={picture_folder}", "--model", "tests.conftest:make_trained"]
    done = run(saved, *arguments, "--out", out, "--workers", 0, "--title", "Blue")
    assert done.exit_code == 0, done.output
    assert "The report:" in done.stderr
    assert "Cannot read" in done.stderr
    assert done.stdout == ""
    html = out.read_text(encoding="utf-8")
    assert "<h1>Blue</h1>" in html
    assert "12 ID images" in html
    assert "photos (ID)" in html
    assert "1 files of &#39;blue&#39; could not be read" in html
    assert str(picture_folder / "03.png") in html


def test_quiet_says_nothing_and_the_limit_holds(saved, picture_folder, tmp_path):
    out = tmp_path / "r.html"
    arguments = ["--id", picture_folder, "--ood", f"a={picture_folder}", "--model", "tests.conftest:make_trained"]
    done = run(saved, *arguments, "--out", out, "--workers", 0, "--limit", 5, "--quiet")
    assert (done.exit_code, done.output) == (0, "")
    assert "5 ID images" in out.read_text(encoding="utf-8")


def test_a_picture_is_read_from_its_file(saved, tmp_path):
    folder = tmp_path / "big"
    folder.mkdir()
    for index in range(3):
        Image.new("RGB", (300, 300), (200, 0, 0)).save(folder / f"{index}.png")
    arguments = ["--id", folder, "--ood", f"a={folder}", "--model", "tests.conftest:make_trained"]
    done = run(saved, *arguments, "--out", tmp_path / "r.html", "--workers", 0)
    assert done.exit_code == 0, done.exception
    assert "data:image/jpeg;base64," in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_wrong_name_is_told(saved, picture_folder):
    done = run(saved, "--id", picture_folder, "--ood", "=x")
    assert isinstance(done.exception, InputError)
    assert "Expected NAME=DIR" in str(done.exception)


def test_the_help_has_a_worked_example():
    done = run("--help")
    assert done.exit_code == 0
    assert "nmd report model.nmd" in " ".join(done.stdout.split())
