from __future__ import annotations

import errno
import gc
import os
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from neuralmean.data import table
from neuralmean.data.table import Blocks, Table, empty, take
from neuralmean.errors import StorageError

ROWS = torch.arange(40.0).reshape(10, 4)


@pytest.fixture(params=["in memory", "on disk"])
def place(request, monkeypatch, tmp_path):
    """Where tables are held: every test must pass in both places."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if request.param == "on disk":
        monkeypatch.setattr(table, "IN_MEMORY", 0)
    return request.param


def is_mapped(tensor):
    """Whether a tensor lies in a mapped file that has lost its name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(end, 16) for end in line.split()[0].split("-"))
        if start <= tensor.data_ptr() < stop:
            return "(deleted)" in line
    return False


class TestTable:
    @pytest.mark.parametrize("additions", [None, 1, 4, 100])
    def test_rows_come_back_in_order_however_many_were_expected(self, place, additions):
        made = Table(additions)
        for part in ROWS.split(3):
            made.add(part)
        assert torch.equal(made.rows, ROWS)

    def test_rows_may_have_any_shape_and_type(self, place):
        made = Table(2)
        made.add(torch.ones(2, dtype=torch.int64))
        made.add(torch.zeros(1, dtype=torch.int64))
        assert made.rows.tolist() == [1, 1, 0]

    def test_what_was_added_may_change_afterwards(self, place):
        made, rows = Table(), ROWS.clone()
        made.add(rows)
        rows.zero_()
        assert torch.equal(made.rows, ROWS)

    def test_a_table_that_was_expected_is_never_moved(self, monkeypatch):
        shapes = []
        monkeypatch.setattr(table, "empty", lambda shape, dtype: shapes.append(shape) or torch.empty(shape))
        made = Table(4)
        for part in ROWS.split(3):
            made.add(part)
        assert shapes == [(12, 4)]


class TestDisk:
    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
    def test_only_what_is_larger_than_the_bound_goes_to_disk(self, monkeypatch):
        monkeypatch.setattr(table, "IN_MEMORY", 4 * 40)
        assert not is_mapped(empty((10, 4), torch.float32))
        assert is_mapped(empty((11, 4), torch.float32))
        assert is_mapped(empty((10, 4), torch.float64))

    @pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
    def test_the_file_has_no_name_and_is_gone_with_its_last_view(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(table, "IN_MEMORY", 0)
        view = empty((10, 4), torch.float32)[3:]
        assert not list(tmp_path.iterdir())
        assert str(tmp_path) in Path("/proc/self/maps").read_text()
        del view
        gc.collect()
        assert str(tmp_path) not in Path("/proc/self/maps").read_text()

    def test_a_disk_with_too_little_room_is_an_error_with_a_cure(self, monkeypatch, tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setattr(table, "IN_MEMORY", 0)
        usage = namedtuple("usage", "total used free")(0, 0, 159)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(StorageError, match=rf"room for 0\.0 GB of rows in {tmp_path}, but got: No space .* TMPDIR"):
            empty((10, 4), torch.float32)

    @pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="not on this system")
    def test_so_is_one_that_another_process_fills_meanwhile(self, monkeypatch):
        def full(file, start, size):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(table, "IN_MEMORY", 0)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(StorageError, match="No space left"):
            empty((10, 4), torch.float32)

    def test_where_room_cannot_be_reserved_the_file_still_has_its_size(self, monkeypatch):
        monkeypatch.setattr(table, "IN_MEMORY", 0)
        monkeypatch.delattr(os, "posix_fallocate", raising=False)
        assert empty((10, 4), torch.float32).fill_(2).sum() == 80


class TestBlocks:
    def test_blocks_are_small_and_give_all_rows_each_time(self, monkeypatch):
        monkeypatch.setattr(table, "BLOCK", 4 * 4 * 3)
        blocks = Blocks(ROWS)
        assert [len(block) for block in blocks] == [3, 3, 3, 1]
        assert torch.equal(torch.cat(list(blocks)), ROWS)

    def test_a_row_longer_than_a_block_is_a_block(self, monkeypatch):
        monkeypatch.setattr(table, "BLOCK", 1)
        assert [len(block) for block in Blocks(ROWS)] == [1] * 10

    def test_chosen_rows_come_in_the_order_asked_for(self, monkeypatch):
        monkeypatch.setattr(table, "BLOCK", 4 * 4 * 2)
        chosen = torch.tensor([7, 2, 2, 0, 9])
        blocks = Blocks(ROWS, chosen)
        assert len(blocks) == 5
        assert torch.equal(torch.cat(list(blocks)), ROWS[chosen])
        assert torch.equal(blocks[torch.tensor([0, 4])], ROWS[[7, 9]])
        beside = list(blocks.beside(chosen))
        assert all(torch.equal(block, ROWS[rows]) for block, rows in beside)
        assert [len(rows) for _, rows in beside] == [2, 2, 1]

    def test_changes_are_made_one_after_the_other(self):
        blocks = Blocks(ROWS).then(lambda rows: rows[:, :2]).then(torch.Tensor.double).then(lambda rows: rows + 1)
        assert blocks.width == 2
        assert torch.equal(torch.cat(list(blocks)), ROWS[:, :2].double() + 1)

    def test_copies_of_rows(self, place):
        assert torch.equal(take(ROWS, torch.tensor([3, 1])), ROWS[[3, 1]])
