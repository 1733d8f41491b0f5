from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from neuralmean.data.images import ImageBatches
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError
from neuralmean.report.sources import count_images, named_batches, spread_over

ROWS = torch.arange(10.0).view(10, 1, 1, 1)
HOW = Preprocessing((8, 8), (0.5,) * 3, (0.5,) * 3)


def first_values(batches):
    return [batch.first.flatten().tolist() for batch, _ in batches]


def test_a_tensor_comes_without_names():
    (batch, names), *rest = named_batches(ROWS, name="x")
    assert len(batch) == 10
    assert names == [None] * 10
    assert rest == []


def test_pairs_of_images_and_names_keep_their_names():
    pairs = [(ROWS[:2], ["a", "b"]), (ROWS[2:3], ["c"])]
    assert [names for _, names in named_batches(pairs, name="x")] == [["a", "b"], ["c"]]


def test_labels_are_no_names():
    loader = DataLoader(TensorDataset(ROWS, torch.arange(10)), batch_size=5)
    assert [names for _, names in named_batches(loader, name="x")] == [[None] * 5] * 2
    assert [names for _, names in named_batches([(ROWS[:2], torch.arange(2))], name="x")] == [[None, None]]


def test_the_limit_cuts_inside_a_batch():
    pairs = [(ROWS[:4], list("abcd")), (ROWS[4:8], list("efgh")), (ROWS[8:], list("ij"))]
    got = list(named_batches(pairs, name="x", limit=6))
    assert first_values(got) == [[0, 1, 2, 3], [4, 5]]
    assert got[1][1] == ["e", "f"]


def test_the_limit_cuts_every_tensor_of_a_dict():
    inputs = [{"ids": torch.arange(6).view(3, 2), "attention_mask": torch.ones(3, 2), "flag": True}]
    (batch, _), *_ = named_batches(inputs, name="x", limit=2)
    assert batch.kwargs["ids"].tolist() == [[0, 1], [2, 3]]
    assert batch.kwargs["attention_mask"].shape == (2, 2)
    assert batch.kwargs["flag"] is True


def test_what_is_no_data_is_refused():
    with pytest.raises(InputError, match="Expected `fog` to be a tensor"):
        list(named_batches(7, name="fog"))


def test_images_are_counted_where_that_is_possible(picture_folder):
    assert count_images(ROWS, None) == 10
    assert count_images(ROWS, 4) == 4
    assert count_images(ImageBatches(picture_folder, HOW), None) == 12
    assert count_images([(ROWS, None)], None) is None
    assert count_images(iter(()), 5) == 5


def test_a_spread_leaves_exactly_so_many_and_is_the_same_each_time(picture_folder):
    skip = spread_over(picture_folder, 5)
    names = [name for _, batch in ImageBatches(picture_folder, HOW, skip=skip) for name in batch]
    assert len(names) == 5
    assert names == [
        n for _, batch in ImageBatches(picture_folder, HOW, skip=spread_over(picture_folder, 5)) for n in batch
    ]


def test_a_spread_reaches_all_of_an_array(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.zeros((1000, 8, 8, 3), np.uint8))
    skip = spread_over([tmp_path / "a.npz"], 100)
    rows = [
        int(name.rpartition("#")[2])
        for _, names in ImageBatches([tmp_path / "a.npz"], HOW, skip=skip)
        for name in names
    ]
    assert len(rows) == 100
    # 100 of 1,000 at random: about 25 in each quarter, less than 8 in one is a chance of 1 in 100,000.
    assert min(np.histogram(rows, bins=4, range=(0, 1000))[0]) >= 8


def test_a_spread_over_fewer_images_than_asked_for_leaves_them_all(picture_folder):
    skip = spread_over(picture_folder, 500)
    assert not any(skip(str(path)) for path in picture_folder.iterdir())


def test_a_damaged_array_is_left_to_the_reader(tmp_path):
    (tmp_path / "bad.npz").write_bytes(b"no archive")
    assert spread_over([tmp_path / "bad.npz"], 3)("anything")


def test_a_spread_of_nothing_is_refused(picture_folder):
    with pytest.raises(InputError, match="Expected `limit` to be at least 1, but got 0"):
        spread_over(picture_folder, 0)
