"""One small detector and its report, made once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from neuralmean import Detector
from neuralmean.report import write_report
from tests.conftest import make_trained

HOSTILE = "\"><script>alert(1)</script>&'.png"


def noise(count, seed, *, low=0.0, high=1.0):
    return low + (high - low) * torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def make_detector(**options):
    detector = Detector(make_trained(), **options)
    ood = noise(60, 5, low=1.0, high=3.0) if options.get("scorer") in ("logistic", "mlp") else None
    detector.fit(noise(120, 3), ood, held_out=noise(99, 4))
    return detector


@pytest.fixture(scope="session")
def detector():
    return make_detector()


@pytest.fixture(scope="session")
def made(detector, tmp_path_factory):
    """A report with two OOD sets, one of hostile names; its sets and text."""
    folder = tmp_path_factory.mktemp("report")
    inside, near, far = noise(150, 6), noise(80, 7, low=0.3, high=1.3), noise(120, 8, low=2.0, high=5.0)
    named = [(far[:64], [f"{i}{HOSTILE}" for i in range(64)]), (far[64:], [f"{i}{HOSTILE}" for i in range(64, 120)])]
    out = write_report(
        detector, inside, {"near": near, "<b>far</b>": named}, folder / "report.html", info={"id_name": "noise"}
    )
    return SimpleNamespace(path=out, html=Path(out).read_text(encoding="utf-8"), inside=inside, near=near, far=far)


@pytest.fixture
def picture_folder(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for index in range(12):
        Image.new("RGB", (40, 20), (20 * index, 30, 200)).save(folder / f"{index:02}.png")
    return folder
