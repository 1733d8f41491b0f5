from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from neuralmean.report import plots
from neuralmean.report.analysis import Comparison, histogram
from neuralmean.stats.metrics import Interval, bootstrap, evaluate, roc_curve


def classes(drawn, word):
    return [e for e in ET.fromstring(drawn).iter() if word in (e.get("class") or "").split()]


def titles(drawn):
    return [e.text for e in ET.fromstring(drawn).iter() if e.tag == "title"]


def comparison(name, shift, seed=0):
    random = np.random.default_rng(seed)
    inside, outside = random.normal(0, 1, 200), random.normal(shift, 1, 150)
    return Comparison(
        name=name,
        figures=evaluate(inside, outside),
        intervals=bootstrap(inside, outside, resamples=20),
        roc=roc_curve(inside, outside, max_points=50),
        by_batch={1: (90.0, Interval(85.0, 95.0)), 2: (98.0, Interval(97.0, 99.0))},
        by_depth=np.array([60.0, 90.0]),
    )


def test_every_set_keeps_its_colour_and_the_eighth_is_dashed():
    assert [plots.series(i) for i in (0, 1, 7, 8, 15)] == ["s0", "s1 d0", "s7 d0", "s1 d1", "s1 d2"]


@pytest.mark.parametrize(
    ("share", "words"), [(0.0, "0 %"), (0.00001, "0.1 %"), (0.5, "50.0 %"), (0.99999, "99.9 %"), (1, "100 %")]
)
def test_what_is_not_all_does_not_look_like_all(share, words):
    assert plots.percent(share) == words


@pytest.mark.parametrize("width", [plots.WIDE, plots.NARROW])
def test_the_histogram_has_a_row_per_set_and_one_threshold(width):
    random = np.random.default_rng(0)
    sets = [random.normal(0, 1, 300), random.normal(4, 1, 200)]
    found = histogram(sets, 1.5)
    drawn = plots.draw_histogram(["in", "out"], found, [0.07, 0.99], 1.5, width=width)
    assert len(classes(drawn, "threshold")) == 1
    assert [e.text for e in classes(drawn, "value")] == ["7.0 % false alarms", "99.0 % caught"]
    for index in (0, 1):
        bars = [e for e in classes(drawn, "bar") if f"s{index}" in e.get("class").split()]
        assert len(bars) == np.count_nonzero(found.shares[index])
    cut = float(classes(drawn, "threshold")[0].get("x1"))
    assert all(float(bar.get("x")) >= cut for bar in classes(drawn, "over"))
    assert all(float(bar.get("x")) < cut for bar in classes(drawn, "under"))


def test_what_lies_beyond_the_axis_is_said():
    sets = [np.linspace(0, 1, 100), np.append(np.linspace(1, 2, 50), np.full(50, 1e9))]
    drawn = plots.draw_histogram(["in", "out"], histogram(sets, 0.95), [0.05, 1.0], 0.95, width=plots.WIDE)
    assert classes(drawn, "value")[1].text == "50.0 % beyond the axis · 100 % caught"
    assert any("score above" in title for title in titles(drawn))


def test_roc_curves_go_from_corner_to_corner_and_marks_lie_on_the_threshold():
    drawn = plots.draw_roc([comparison("a", 2), comparison("b", 1)], [(0.25, 0.95), (0.5, 0.95)])
    curves = classes(drawn, "curve")
    assert len(curves) == 2
    box = (52, 34, plots.HALF - 14, plots.HALF - 34)
    for curve in curves:
        points = [tuple(map(float, point.split())) for point in curve.get("d")[1:].split("L")]
        assert points[0] == (box[0], box[3])
        assert points[-1] == (box[2], box[1])
    mark = classes(drawn, "mark")[0]
    assert float(mark.get("cx")) == pytest.approx(box[0] + 0.25 * (box[2] - box[0]), abs=0.1)
    assert float(mark.get("cy")) == pytest.approx(box[3] - 0.95 * (box[3] - box[1]), abs=0.1)


def test_batches_have_a_mark_and_a_whisker_for_each_size():
    drawn = plots.draw_batches([comparison("a", 2), comparison("b", 1)])
    assert len(classes(drawn, "mark")) == len(classes(drawn, "whisker")) == 4
    assert "a, 2 together: AUROC 98.0 % (97.0 to 99.0)" in titles(drawn)


@pytest.mark.parametrize(("lowest", "floor"), [(99.0, 90), (88.0, 80), (50.0, 50), (3.0, 0)])
def test_the_axis_does_not_blow_up_small_differences(lowest, floor):
    assert plots._floor(lowest) == floor


def test_layers_and_depth_have_a_mark_for_each_layer_and_set():
    sets = {"a": np.array([0.1, 2.0, -0.3]), "b": np.array([0.0, 0.5, 1.0])}
    layers = plots.draw_layers(["bn1", "bn2", "bn3"], sets, np.full(3, 0.2), width=plots.WIDE)
    depth = plots.draw_depth(["bn1", "bn2", "bn3"], {k: v * 10 + 60 for k, v in sets.items()}, width=plots.NARROW)
    assert len(classes(layers, "mark")) == len(classes(depth, "mark")) == 6
    assert len(classes(layers, "band")) == 1
    assert "bn2: +2 for a, compared with ID" in titles(layers)
    assert "bn3: \u22120.3 for a, compared with ID" in titles(layers)
    assert titles(depth) == ["bn1", "bn2", "bn3"]


def test_layers_that_all_add_nothing_can_be_drawn():
    assert classes(plots.draw_layers(["bn1"], {"a": np.zeros(1)}, np.zeros(1), width=plots.WIDE), "mark")


def test_weights_are_bars_from_zero():
    drawn = plots.draw_weights(["bn1", "bn2"], np.array([1.0, 2.0]), width=plots.WIDE)
    heights = [float(bar.get("height")) for bar in classes(drawn, "bar")]
    assert heights[1] == pytest.approx(2 * heights[0], rel=0.01)


def test_a_profile_names_its_strangest_layer_and_does_not_leave_its_frame():
    drawn = plots.draw_profile(np.array([0.5, 1e6, -1e6]), ["bn1", "bn2", "bn3"], "s1")
    assert "most unusual: bn2" in titles(drawn)[0]
    assert classes(drawn, "up")[0].get("d") == "M0 18h25.6v2h-25.6zM32 0h25.6v20h-25.6z"
    assert classes(drawn, "down")[0].get("d") == "M64 20h25.6v8h-25.6z"
