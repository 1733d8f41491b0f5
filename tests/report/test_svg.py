from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from neuralmean.report.svg import Box, Canvas, Scale, label, names_axis, shorten, ticks, x_axis, y_axis


def elements(canvas, tag):
    root = ET.fromstring(canvas.render(plot="p", description="d"))
    return [element for element in root.iter() if element.tag == tag]


def test_a_scale_is_a_straight_line():
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(3, 3, 10, 20)(3) == 10


@pytest.mark.parametrize("low", [-7.3, 0, 0.001, 95.2])
@pytest.mark.parametrize("span", [1e-6, 0.3, 1, 17, 4e5])
@pytest.mark.parametrize("count", [3, 5, 8])
def test_ticks_are_round_inside_and_about_as_many_as_asked_for(low, span, count):
    found = ticks(low, low + span, count)
    assert all(low - 1e-9 * span <= tick <= low + span + 1e-9 * max(1, abs(low)) for tick in found)
    assert count / 2.6 <= len(found) <= count * 2.1
    step = (found[-1] - found[0]) / (len(found) - 1)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert min(abs(mantissa - wanted) for wanted in (1, 2, 5)) < 1e-2


def test_an_axis_without_length_has_one_tick():
    assert ticks(3.0, 3.0) == [3.0]
    assert ticks(0.0, math.inf) == [0.0]


def test_labels_are_short_and_minus_is_minus():
    assert [label(value) for value in (0.0, -0.5, 12345.678)] == ["0", "\u22120.5", "1.235e+04"]


def test_long_names_lose_their_middle():
    assert shorten("layer1.0.bn1", 18) == "layer1.0.bn1"
    assert len(shorten("a" * 50, 18)) == 18


def test_text_is_escaped_wherever_it_goes():
    canvas, evil = Canvas(10, 10), "<script>&\"'"
    canvas.text(0, 0, evil, title=evil)
    canvas.rect(0, 0, 1, 1, "bar", title=evil)
    canvas.line(0, 0, 1, 1, "axis", title=evil)
    drawn = canvas.render(plot="p", description=evil, hover=True)
    assert "<script" not in drawn
    root = ET.fromstring(drawn)
    assert root.get("aria-label") == evil
    assert [element.text for element in root.iter() if element.tag == "title"] == [evil] * 4


def test_many_bars_are_one_shape():
    canvas = Canvas(10, 10)
    canvas.bars([(0, 1, 2, 3), (4, 5, 6, 7)], "up")
    canvas.bars([], "down")
    assert [path.get("d") for path in elements(canvas, "path")] == ["M0 1h2v3h-2zM4 5h6v7h-6z"]


def test_four_shapes_can_be_told_apart():
    drawn = []
    for shape in range(5):
        canvas = Canvas(10, 10)
        canvas.marker(5, 5, shape, "mark")
        drawn.append(canvas.render(plot="p", description="d"))
    assert len(set(drawn)) == 4
    assert drawn[0] == drawn[4]


def test_numbers_that_are_none_do_not_break_the_drawing():
    canvas = Canvas(10, 10)
    canvas.line(math.nan, 0, math.inf, 1, "axis")
    assert elements(canvas, "line")[0].get("x1") == "0"


def test_axes_write_their_numbers_and_captions():
    canvas, box = Canvas(100, 100), Box(10, 10, 90, 90)
    y_axis(canvas, box, Scale(0, 100, 90, 10), "kept", unit=" %")
    x_axis(canvas, box, Scale(0, 1, 10, 90), "score", count=2, grid=True)
    words = [text.text for text in elements(canvas, "text")]
    assert words == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %", "kept", "0", "0.5", "1", "score"]


def test_names_are_thinned_where_there_is_no_room():
    canvas = Canvas(100, 100)
    names_axis(canvas, Box(0, 0, 100, 50), list(range(0, 100, 2)), [f"n{i}" for i in range(50)])
    assert len(elements(canvas, "text")) == 5


def test_names_that_fit_are_level():
    canvas = Canvas(300, 100)
    names_axis(canvas, Box(0, 0, 300, 50), [50, 150, 250], ["bn1", "bn2", "bn3"])
    assert [text.get("transform") for text in elements(canvas, "text")] == [None] * 3


def test_one_name_and_no_name_have_their_axis():
    for places, names in (([5.0], ["a"]), ([], [])):
        canvas = Canvas(100, 100)
        names_axis(canvas, Box(0, 0, 100, 50), places, names)
        assert len(elements(canvas, "text")) == len(names)
