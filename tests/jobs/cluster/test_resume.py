"""Runs that were stopped, and their journal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neuralmean import Detector
from neuralmean.errors import (
    ArtefactError,
)
from neuralmean.jobs import Journal
from tests.conftest import make_trained
from tests.jobs.cluster.conftest import png, rows_of, score


class TestResume:
    def _stop_after(self, monkeypatch, n):
        """Make the driver die after `n` chunks are noted."""
        whole, keys = Journal.add, []

        def add(self, key, content):
            whole(self, key, content)
            keys.append(key)
            if len(keys) == n:
                raise KeyboardInterrupt

        monkeypatch.setattr(Journal, "add", add)

    @pytest.fixture
    def undisturbed(self, saved, folder, tmp_path):
        score(saved, folder, tmp_path / "whole.jsonl", chunk_size=20)
        return (tmp_path / "whole.jsonl").read_bytes()

    def _interrupt(self, saved, folder, out, monkeypatch, n=3):
        with monkeypatch.context() as patch:
            self._stop_after(patch, n)
            with pytest.raises(KeyboardInterrupt):
                score(saved, folder, out, chunk_size=20)

    def test_a_run_goes_on_where_it_was_and_ends_the_same(self, saved, folder, tmp_path, monkeypatch, undisturbed):
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, folder, out, monkeypatch)
        assert not out.exists()
        outcome = score(saved, folder, out, chunk_size=20)
        assert outcome.n_resumed == 60
        assert outcome.n_images == 149
        assert out.read_bytes() == undisturbed

    def test_a_torn_line_is_done_again(self, saved, folder, tmp_path, monkeypatch, undisturbed):
        out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
        self._interrupt(saved, folder, out, monkeypatch)
        whole = journal.read_bytes()
        for cut in (1, 30, len(whole.splitlines(keepends=True)[-1]) + 5):
            journal.write_bytes(whole[:-cut])
            assert score(saved, folder, out, chunk_size=20).n_resumed in (20, 40)
            assert out.read_bytes() == undisturbed

    def test_a_line_that_rotted_is_done_again(self, saved, folder, tmp_path, monkeypatch, undisturbed):
        out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
        self._interrupt(saved, folder, out, monkeypatch)
        lines = journal.read_bytes().splitlines(keepends=True)
        lines[2] = lines[2][:40] + bytes([lines[2][40] ^ 1]) + lines[2][41:]
        journal.write_bytes(b"".join(lines))
        assert score(saved, folder, out, chunk_size=20).n_resumed == 20
        assert out.read_bytes() == undisturbed

    def test_inputs_that_changed_are_done_again(self, saved, folder, tmp_path, monkeypatch):
        import shutil

        mine = tmp_path / "mine"
        shutil.copytree(folder, mine)
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, mine, out, monkeypatch)
        (mine / "a" / "0030x.png").write_bytes(png(5000))
        assert score(saved, mine, out, chunk_size=20).n_resumed == 20
        assert len({row["path"] for row in rows_of(out)}) == len(rows_of(out)) == 150

    @pytest.mark.parametrize("change", [{"chunk_size": 30}, {"batch_size": 8}, {"resume": False}], ids=str)
    def test_other_settings_start_afresh(self, saved, folder, tmp_path, monkeypatch, change):
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, folder, out, monkeypatch)
        assert score(saved, folder, out, **{"chunk_size": 20, **change}).n_resumed == 0
        assert len(rows_of(out)) == 149

    def test_another_detector_starts_afresh(self, saved, folder, tmp_path, monkeypatch):
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, folder, out, monkeypatch)
        Detector.load(saved, make_trained()).calibrate(torch.rand(60, 3, 8, 8)).save(tmp_path / "other.nmd")
        assert score(tmp_path / "other.nmd", folder, out, chunk_size=20).n_resumed == 0

    def test_a_second_run_at_the_same_output_is_refused(self, saved, folder, tmp_path):
        pytest.importorskip("fcntl")
        journal = Journal(tmp_path / "out.jsonl", "x", resume=True)
        with pytest.raises(ArtefactError, match="Expected to be the only run"):
            score(saved, folder, tmp_path / "out.jsonl")
        journal.close()

    def test_a_folder_that_is_not_there_is_named(self, saved, folder, tmp_path):
        with pytest.raises(ArtefactError, match="No such file or directory"):
            score(saved, folder, tmp_path / "nowhere" / "out.jsonl")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_a_clear_error(self):
        journal = object.__new__(Journal)
        journal.path = Path("/dev/full")
        with (
            Path("/dev/full").open("r+b", buffering=0) as journal._file,
            pytest.raises(ArtefactError, match="the disk is full"),
        ):
            journal._write(b"line")

    def test_the_old_output_stays_until_the_new_one_is_whole(self, saved, folder, tmp_path, monkeypatch):
        out = tmp_path / "out.jsonl"
        out.write_text("old")
        self._interrupt(saved, folder, out, monkeypatch)
        assert out.read_text() == "old"
