from __future__ import annotations

import builtins
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from neuralmean import Detector
from neuralmean.data.images import ImageBatches
from neuralmean.detector.saved import open_saved
from neuralmean.errors import ArtefactError, InputError, MissingExtraError, NotFittedError
from neuralmean.report import write_report
from neuralmean.stats import metrics
from tests.conftest import make_trained
from tests.report.conftest import HOSTILE, make_detector, noise

SETS = {"fog": noise(40, 2, high=2.0)}


class Page(HTMLParser):
    """Tags with their attributes, and the text outside of scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data + " "

    def plots(self):
        return [attributes["data-plot"] for tag, attributes in self.tags if tag == "svg"]


def test_every_plot_is_there(made):
    plots = Page(made.html).plots()
    once = {"roc", "batches"}
    for name in ("scores", "roc", "batches", "layers", "depth"):
        assert plots.count(name) == (1 if name in once else 2)
    assert plots.count("profile") == 3 * 16


def test_the_table_holds_the_library_s_figures(made, detector):
    found = metrics.evaluate(detector.score(made.inside).double(), detector.score(made.near).double())
    text = Page(made.html).text
    for value in (found.auroc, found.aupr_id, found.aupr_ood, found.tnr95, found.fpr95, found.accuracy):
        assert f"{value:.2f}" in text


def test_the_direction_of_each_figure_is_said_in_words(made):
    text = " ".join(Page(made.html).text.split())
    assert "rejected when the threshold keeps 95 % of ID images. Higher is better." in text
    assert "slips through then: 100 \u2212 TNR95. Lower is better." in text


def test_the_guarantee_and_the_fingerprint_are_told(made, detector):
    text = Page(made.html).text
    assert detector.guarantee in text
    assert detector.fingerprint[:16] in text


def test_nothing_is_fetched_from_anywhere(made):
    for tag, attributes in Page(made.html).tags:
        for name, value in attributes.items():
            if name in ("src", "href", "srcset", "action", "data", "poster") or "url(" in (value or ""):
                assert value.startswith("data:"), (tag, name, value)
    assert "@import" not in made.html
    assert not re.search(r"url\(", made.html)


def test_the_page_forbids_itself_the_network_and_other_scripts(made):
    (policy,) = (a["content"] for t, a in Page(made.html).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2]


def test_names_of_files_and_sets_are_escaped(made):
    page = Page(made.html)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any(attributes.keys() & {"onload", "onerror"} for _, attributes in page.tags)
    assert "<b>far</b>" in page.text
    assert any((attributes.get("alt") or "").endswith(HOSTILE) for tag, attributes in page.tags if tag == "img")


def test_the_file_is_small(made):
    assert made.path.stat().st_size < 400_000


@pytest.mark.parametrize("scorer", ["average", "logistic", "mlp"])
def test_every_scorer_has_a_report(scorer, tmp_path):
    out = write_report(make_detector(scorer=scorer), noise(40, 1), SETS, tmp_path / "r.html")
    plots = set(Page(out.read_text(encoding="utf-8")).plots())
    assert {"layers", "depth", "profile"} <= plots
    assert ("weights" in plots) == (scorer == "logistic")


def test_a_scorer_that_nobody_can_explain_has_a_report_without_layers(tmp_path):
    class Sum:
        def fit(self, inliers, outliers=None):
            return self

        def score(self, vectors):
            return vectors.detach().abs().sum(dim=1)

    out = write_report(make_detector(scorer=Sum()), noise(60, 1), SETS, tmp_path / "r.html")
    page = Page(out.read_text(encoding="utf-8"))
    assert set(page.plots()) == {"scores", "roc", "batches"}
    assert "Which layers" not in page.text


def test_one_layer_and_a_handful_of_images_have_a_report(tmp_path):
    detector = Detector(make_trained(), layers="bn1", scorer="average").calibrate(noise(40, 1))
    out = write_report(detector, noise(3, 1), {"one": noise(1, 2)}, tmp_path / "r.html")
    page = Page(out.read_text(encoding="utf-8"))
    assert page.plots().count("profile") == 1 + 1 + 1 + 1
    assert "only 1 images in 'one'" in page.text


def test_both_statistics_have_a_report(tmp_path):
    out = write_report(make_detector(statistic="both"), noise(60, 1), SETS, tmp_path / "r.html")
    assert "channel means and variances" in out.read_text(encoding="utf-8")


def test_the_limit_holds_for_each_set(detector, tmp_path):
    out = write_report(detector, noise(200, 1), SETS, tmp_path / "r.html", limit=25, title="Fog & co")
    text = Page(out.read_text(encoding="utf-8")).text
    assert "25 ID images" in text
    assert "25 OOD images" in text
    assert "Fog & co" in text


def test_the_report_is_the_same_each_time_but_for_the_clock(detector, tmp_path):
    texts = []
    for name in ("a.html", "b.html"):
        out = write_report(detector, noise(60, 1), SETS, tmp_path / name)
        texts.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "", out.read_text(encoding="utf-8")))
    assert texts[0] == texts[1]


def test_a_run_that_fails_leaves_the_old_report(detector, tmp_path):
    (tmp_path / "r.html").write_text("old")

    def broken():
        yield noise(5, 1)
        raise RuntimeError("disk gone")

    with pytest.raises(RuntimeError, match="disk gone"):
        write_report(detector, noise(20, 1), {"fog": broken()}, tmp_path / "r.html")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    assert (tmp_path / "r.html").read_text() == "old"


def test_a_missing_jinja2_names_its_extra_before_any_work(detector, tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name == "jinja2":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[report\]"):
        write_report(detector, None, SETS, tmp_path / "r.html")


def test_what_cannot_work_is_refused_before_any_work(detector, tmp_path):
    with pytest.raises(InputError, match="`ood_sets` to be at least one set"):
        write_report(detector, None, {}, tmp_path / "r.html")
    with pytest.raises(InputError, match="`limit` to be at least 1, but got 0"):
        write_report(detector, None, SETS, tmp_path / "r.html", limit=0)
    with pytest.raises(ArtefactError, match="to be a file to write, but it is a folder"):
        write_report(detector, None, SETS, tmp_path)
    with pytest.raises(ArtefactError, match="there is no folder .* Create it first"):
        write_report(detector, None, SETS, tmp_path / "no" / "r.html")
    with pytest.raises(NotFittedError, match="no threshold"):
        write_report(Detector(make_trained()), None, SETS, tmp_path / "r.html")


def test_the_demo_ends_with_a_report(tmp_path):
    from neuralmean.cli import demo

    data = demo.load_data()
    model = demo.train_model(data, epochs=1)
    detector = Detector(model).fit(data.train[:200], held_out=data.held_out)
    small = demo.DemoData(
        data.train, data.train_labels, data.held_out, data.test[:60], data.test_labels, data.near[:60], data.far[:60]
    )
    out = demo.write_demo_report(demo.Demo(small, model, 0.0, detector, []), tmp_path / "report.html")
    text = Page(out.read_text(encoding="utf-8")).text
    assert out == tmp_path / "report.html"
    assert "digits 8 and 9" in text
    assert "photo patches" in text
    saved = demo.save_detector(demo.Demo(small, model, 0.0, detector, []), tmp_path)
    opened = open_saved(saved)  # as the commands do
    assert opened.detector.threshold == detector.threshold
    names, scores = [], []
    for batch in ImageBatches(tmp_path / "images", opened.need_preprocessing(), workers=0):
        names += [Path(name).stem for name in batch.names]
        scores += opened.detector.score(batch.images).tolist()
    assert len(names) == 12
    expected = dict(zip([f"photo-{i}" for i in range(4)], detector.score(small.far[:4]).tolist(), strict=True))
    for name, score in expected.items():  # 8 bits a pixel
        assert scores[names.index(name)] == pytest.approx(score, rel=0.05)


def test_names_that_are_no_text_are_written_out(detector, tmp_path):
    batches = [(noise(30, 1), [f"\udcff{i}.png" for i in range(30)])]
    out = write_report(detector, batches, SETS, tmp_path / "r.html")
    assert r"\udcff" in out.read_text(encoding="utf-8")


def test_a_gallery_shows_the_pixels_that_went_in(detector, tmp_path):
    import base64
    import io

    import numpy as np
    from PIL import Image

    inside = noise(30, 1)
    out = write_report(detector, inside, SETS, tmp_path / "r.html")
    first = next(a["src"] for t, a in Page(out.read_text(encoding="utf-8")).tags if t == "img")
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(first.partition(",")[2]))))
    strangest = inside[int(detector.score(inside).argmax())]
    expected = (strangest * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    np.testing.assert_array_equal(shown, expected)
