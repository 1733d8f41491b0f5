"""The report of ResNet-56 with three OOD sets: small, and fast to draw. Part of `make real`."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from neuralmean import Detector
from neuralmean.bench import models
from neuralmean.data.images import ImageBatches
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.report import spread_over, write_report
from tests.report.test_browser import BROWSER, browse

pytestmark = pytest.mark.real

CLOCK = """
<script>
addEventListener("load", () => {
  document.body.getBoundingClientRect();
  const drawn = [...document.querySelectorAll("svg")].map((svg) => svg.getBBox().width).filter((width) => width > 0).length;
  document.title = JSON.stringify({milliseconds: performance.now(), drawn});
});
</script></head>
"""


@pytest.fixture(scope="module")
def real_report(request, tmp_path_factory):
    data, weights = (request.getfixturevalue(name) for name in ("real_data", "real_weights"))
    model = models.load("resnet56", weights / "resnet56-cifar10.safetensors").model
    how = Preprocessing((32, 32), (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))

    def images(name, limit=1000):
        path = data / f"{name}.npz"
        return ImageBatches([path], how, workers=0, skip=spread_over([path], limit))

    # Only size and speed are looked at: that held-out images come again in the report does not matter here.
    detector = Detector(model).fit(images("cifar10-train"), held_out=images("cifar10-test", 500))
    strangers = {name: images(name) for name in ("svhn-test", "cifar100-test", "imagenet-crop")}
    out = tmp_path_factory.mktemp("real") / "report.html"
    info = {"preprocessing": how.to_json(), "id_name": "cifar10-test"}
    return SimpleNamespace(path=write_report(detector, images("cifar10-test"), strangers, out, info=info))


@pytest.fixture(scope="module")
def real_data():
    return _folder("NEURALMEAN_DATA")


@pytest.fixture(scope="module")
def real_weights():
    return _folder("NEURALMEAN_WEIGHTS")


def _folder(variable):
    import os
    from pathlib import Path

    value = os.environ.get(variable)
    if not value or not Path(value).is_dir():
        pytest.skip(f"{variable} does not name a folder")
    return Path(value)


def test_the_report_of_resnet56_is_under_3_megabytes(real_report):
    assert real_report.path.stat().st_size < 3_000_000


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome to look at the report with")
def test_the_report_of_resnet56_is_drawn_in_under_2_seconds(real_report, tmp_path):
    html = re.sub(r"<meta http-equiv[^>]*>", "", real_report.path.read_text(encoding="utf-8"))
    page = tmp_path / "clock.html"
    page.write_text(html.replace("</head>", CLOCK), encoding="utf-8")
    done = browse(tmp_path, page, "--window-size=1100,2000", "--dump-dom")
    found = json.loads(re.search(r"<title>(\{.*?\})</title>", done.stdout).group(1))
    assert found["drawn"] >= 5 + 64
    assert found["milliseconds"] < 2000
