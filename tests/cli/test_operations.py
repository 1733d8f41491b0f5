"""Bounds and groups on the command line."""

import json

import pytest

from tests.cli.conftest import pictures, save_pictures

FIT = ("fit", "toynet:Net", "--weights", "w.safetensors", "--id", "train", "--out", "m.nmd", "--scorer", "average")
PREPARED = ("--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--size", "12")


@pytest.fixture
def fitted(world, nmd):
    code, _, err = nmd(*FIT, "--held-out", "val", "--confidence", "0.9", *PREPARED)
    assert code == 0, err
    assert "A false-alarm rate of 0.05 that holds with a confidence of 0.9 needs at least 45 held-out images." in err
    return world


def test_the_summary_bounds_the_false_flags(fitted, nmd):
    _, _, err = nmd("score", "m.nmd", "new")
    assert "flags are false, 95 % sure" in err


@pytest.mark.parametrize("out", [(), ("--out", "rows.jsonl")], ids=["stdout", "file"])
def test_fdr_flags_a_list_instead(fitted, nmd, out):
    code, text, err = nmd("score", "m.nmd", "new", "--fdr", "0.2", "--format", "json", *out)
    assert code == 0, err
    lines = (fitted / "rows.jsonl").read_text() if out else text
    rows = [json.loads(line) for line in lines.splitlines()]
    assert [row["is_ood"] for row in rows] == [False] * 5 + [True] * 5
    assert nmd("score", "m.nmd", "new", "--fdr", "2")[0] == 2
    assert nmd("score", "m.nmd", "new", "--fdr", "0.1", "--engine", "ray")[0] == 2


def test_groups_may_be_folders_a_table_or_predictions(world, nmd):
    save_pictures(world / "cameras" / "door", pictures(40, 7))
    save_pictures(world / "cameras" / "yard", pictures(40, 8))
    code, _, err = nmd(*FIT, "--held-out", "cameras", "--groups", "folder", *PREPARED)
    assert code == 0, err
    code, _, err = nmd("score", "m.nmd", "cameras/yard", "--groups", "folder")
    assert code == 0, err
    code, _, err = nmd("score", "m.nmd", "new")
    assert (code, "Expected --groups, as the detector was fitted with labels of groups" in err) == (2, True)
    for command in (("explain", "m.nmd", "new/0000.png"), ("report", "m.nmd", "--id", "val", "--ood", "new")):
        code, _, err = nmd(*command, *(["--trust-local-code"] if command[0] == "report" else []))
        assert (code, "which takes no labels of inputs" in err) == (1, True), err
    code, _, err = nmd("score", "m.nmd", "new", "--groups", "folder", "--batch-size", "1")
    assert (code, err.count("1 of the groups had no held-out examples: 'inner'")) == (0, 1)  # and not for every batch
    (world / "g.csv").write_text("path,group\n0000.png,door\n")
    code, _, err = nmd("score", "m.nmd", "new/inner", "--groups", "g.csv")
    assert code == 1
    assert "to have a row for" in err
    (world / "g.csv").write_text("path,group\ndoor/0000.png,door\nyard/0000.png,yard\n")
    code, _, err = nmd("score", "m.nmd", "new/inner", "--groups", "g.csv")
    assert code == 1
    assert "of that file name in different groups" in err
    (world / "bad.csv").write_text("a,b\n1,2\n")
    assert nmd("score", "m.nmd", "new", "--groups", "bad.csv")[0] == 2
    assert nmd("score", "m.nmd", "new", "--groups", "camera")[0] == 2
    code, _, err = nmd(*FIT, "--held-out", "cameras", "--groups", "predicted", "--false-alarm-rate", "0.2", *PREPARED)
    assert code == 0, err
    assert nmd("score", "m.nmd", "new")[0] == 0
    assert nmd(*FIT, "--groups", "folder", *PREPARED)[0] == 2
