"""Names of stages for many layers."""

import re
from itertools import pairwise

from neuralmean.report.stages import stages_of
from neuralmean.report.svg import Box, Canvas, names_axis, names_room


def test_few_layers_are_named_one_by_one():
    assert stages_of([f"layer{i}.bn" for i in range(12)]) == []


def test_stages_are_as_fine_as_nine_allow():
    names = ["bn1", *(f"layer{stage}.{block}.bn{n}" for stage in (1, 2, 3) for block in range(6) for n in (1, 2))]
    assert [tuple(stage) for stage in stages_of(names)] == [
        ("bn1", 0, 1),
        ("layer1", 1, 13),
        ("layer2", 13, 25),
        ("layer3", 25, 37),
    ]


def test_finer_stages_are_taken_where_there_are_few():
    names = [f"features.{part}.{n}" for part in ("stem.a", "body.b", "body.c") for n in range(5)]
    assert [stage.name for stage in stages_of(names)] == ["stem.a", "body.b", "body.c"]


def test_layers_without_a_common_path_are_not_grouped():
    assert stages_of([f"conv{i}" for i in range(30)]) == []


def test_names_of_stages_do_not_overprint():
    names = ["bn1", *(f"stage{s}.{b}" for s in range(8) for b in range(3))]
    canvas = Canvas(200, 100)
    names_axis(canvas, Box(0, 0, 200, 50), [8.0 * i for i in range(len(names))], names)

    drawn = canvas.render(plot="x", description="x")
    rows = {}
    for x, y, text in re.findall(r'<text x="([\d.]+)" y="([\d.]+)"[^>]*>(?:<title>[^<]*</title>)?([^<]+)<', drawn):
        rows.setdefault(y, []).append((float(x), 6.6 * len(text)))
    assert len(rows) == 2
    for placed in rows.values():
        for (x, wide), (after, next_wide) in pairwise(placed):
            assert x + wide / 2 < after - next_wide / 2
    assert names_room(names) == 48
