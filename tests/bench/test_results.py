"""Rows: their format, and a file that is whole at every moment."""

from __future__ import annotations

import json

import pytest

from neuralmean.bench import results
from neuralmean.bench.results import COLUMNS, Results, identity, make_row, read_rows
from neuralmean.errors import ArtefactError, InputError


def figures(**changes):
    row = {
        "experiment": "full-access",
        "model": "resnet56",
        "id": "cifar10",
        "ood": "svhn",
        "method": "msp",
        "protocol": "full-access",
        "auroc": 93.3,
        "tnr95": 60.0,
        "accuracy": 88.0,
        "n_id": 10,
        "n_ood": 10,
        "seed": 0,
        "seconds": 1.5,
    }
    return {**row, **changes}


def test_the_columns_are_those_of_the_design_in_its_order():
    assert ", ".join(COLUMNS) == (
        "experiment, model, id, ood, method, protocol, auroc, tnr95, accuracy, n_id, n_ood, seed, seconds"
    )


def test_a_row_has_its_columns_first_and_the_rest_after_them():
    row = make_row(dict(reversed(figures().items())), draws=10)
    assert tuple(row) == (*COLUMNS, "draws")


@pytest.mark.parametrize(
    ("change", "message"), [({"extra": 1}, r"\['extra'\] unknown"), ({"auroc": "drop"}, r"\['auroc'\] are missing")]
)
def test_a_row_with_other_columns_is_an_error(change, message):
    row = {key: value for key, value in figures(**change).items() if value != "drop"}
    with pytest.raises(InputError, match=message):
        make_row(row)


def test_every_added_row_is_on_disk_at_once(tmp_path):
    held = Results(tmp_path / "rows.json")
    held.add(make_row(figures()))
    assert read_rows(tmp_path / "rows.json") == [figures()]
    held.add(make_row(figures(ood="cifar100")))
    assert [row["ood"] for row in read_rows(tmp_path / "rows.json")] == ["svhn", "cifar100"]
    assert [row["ood"] for row in Results(tmp_path / "rows.json")] == ["svhn", "cifar100"]


def test_rows_that_are_added_together_replace_their_like_and_keep_the_others(tmp_path):
    held = Results(tmp_path / "rows.json")
    held.add(make_row(figures(seed=1)), make_row(figures(seed=2)))
    held.add(make_row(figures(seed=2, auroc=50.0)), make_row(figures(seed=3)))
    found = [(row["seed"], row["auroc"] == 50.0) for row in read_rows(tmp_path / "rows.json")]
    assert found == [(1, False), (2, True), (3, False)]


def test_the_file_is_a_plain_list_with_a_row_a_line(tmp_path):
    held = Results(tmp_path / "rows.json")
    held.add(make_row(figures()))
    held.add(make_row(figures(seed=1)))
    text = (tmp_path / "rows.json").read_text()
    assert isinstance(json.loads(text), list)
    assert len(text.splitlines()) == 4


def test_a_row_is_found_again_only_if_it_is_made_of_the_same(tmp_path):
    held = Results(tmp_path / "rows.json")
    held.add(make_row(figures(), inputs="a", limit=None))
    assert held.find(make_row(figures(auroc=None), inputs="a", limit=None)) == make_row(
        figures(), inputs="a", limit=None
    )
    assert held.find(make_row(figures(), inputs="b", limit=None)) is None
    assert held.find(make_row(figures(), inputs="a", limit=200)) is None
    assert held.find(make_row(figures(seed=1), inputs="a", limit=None)) is None


def test_a_row_made_anew_takes_the_place_of_the_old_one(tmp_path):
    held = Results(tmp_path / "rows.json")
    held.add(make_row(figures(), inputs="a"))
    held.add(make_row(figures(auroc=50.0), inputs="b"))
    assert [row["auroc"] for row in held] == [50.0]
    assert len(held) == 1


def test_the_setting_tells_rows_apart():
    one, other = make_row(figures(), setting="batch 4"), make_row(figures(), setting="batch 8")
    assert identity(one) != identity(other)


@pytest.mark.parametrize(
    "content", ["{", '{"rows": []}', '[{"auroc": 1}]', "[1]"], ids=["cut", "dict", "short", "number"]
)
def test_a_file_with_something_else_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ArtefactError, match=r"Name another file"):
        Results(path)
    assert path.read_text() == content


def test_a_file_without_end_is_refused(tmp_path, monkeypatch):
    (tmp_path / "rows.json").write_text(" " * 101)
    monkeypatch.setattr(results, "MOST_BYTES", 100)
    with pytest.raises(ArtefactError, match="it cannot be read: it has more than 0 MB"):
        read_rows(tmp_path / "rows.json")


def test_a_missing_file_to_read_is_one_clear_error(tmp_path):
    with pytest.raises(ArtefactError, match=r"but there is none. Run `nmd bench run` first"):
        read_rows(tmp_path / "none.json")


def test_a_value_that_json_cannot_hold_is_refused_before_the_file_changes(tmp_path):
    held = Results(tmp_path / "rows.json")
    held.add(make_row(figures()))
    with pytest.raises(ValueError, match=r"Out of range float"):
        held.add(make_row(figures(seed=1, auroc=float("nan"))))
    assert len(read_rows(tmp_path / "rows.json")) == 1


def test_no_rows_make_an_empty_list(tmp_path):
    results.write_rows(tmp_path / "rows.json", [])
    assert read_rows(tmp_path / "rows.json") == []


def test_two_who_add_to_one_file_keep_each_others_rows(tmp_path):
    one, other = Results(tmp_path / "rows.json"), Results(tmp_path / "rows.json")
    one.add(make_row(figures(ood="svhn")))
    other.add(make_row(figures(ood="lsun")))
    one.add(make_row(figures(ood="isun")))
    assert [row["ood"] for row in read_rows(tmp_path / "rows.json")] == ["svhn", "lsun", "isun"]
    assert len(one) == 3
