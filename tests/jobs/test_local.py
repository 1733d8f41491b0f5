"""Scores into one file, in this process: exactly once each, resumable, and written like those of many workers."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from neuralmean import Detector
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import ArtefactError, InputError, MissingExtraError
from neuralmean.files.artefact import Artefact
from neuralmean.jobs import (
    Journal,
    ScoreFile,
    ScoreRow,
    Tally,
    format_of,
    format_rows,
    score_images,
    write_rows,
)
from tests.conftest import make_trained

HOW = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "x.nmd"
    Detector(make_trained(), scorer="average").calibrate(torch.rand(60, 3, 8, 8)).save(path)
    return path


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """Two array files of 100 and 50 images."""
    folder = tmp_path_factory.mktemp("arrays")
    for seed, count in enumerate((100, 50)):
        pixels = np.random.default_rng(seed).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        np.save(folder / f"{seed}.npy", pixels)
    return [str(path) for path in sorted(folder.iterdir())]


def _score(saved, arrays, out, *, resume=False, stop_after=None, kind="json", settings=()):
    """Score into `out`; with `stop_after` the process goes down when so many batches are noted."""
    tally = Tally()
    detector = Detector.load(saved, make_trained())

    def batches(skip):
        made = score_images(detector, HOW, arrays, tally=tally, batch_size=16, workers=0, skip=skip)
        for number, rows in enumerate(made):
            if number == stop_after:
                raise KeyboardInterrupt
            yield rows

    ScoreFile(out, kind, artefact=Artefact.read(saved), settings=list(settings), resume=resume).write(batches, tally)
    return tally


def test_the_progress_of_a_run_that_goes_on_is_that_of_what_is_left(saved, arrays, tmp_path, monkeypatch):
    counted = []

    def track(batches, *, description, total, size):
        for batch in batches:
            yield batch
            counted.append((size(batch), total()))

    with pytest.raises(KeyboardInterrupt):
        _score(saved, arrays, tmp_path / "out.csv", stop_after=4)
    monkeypatch.setattr("neuralmean.jobs.local.track", track)
    _score(saved, arrays, tmp_path / "out.csv", resume=True)
    assert counted[0] == (16, 150 - 64)
    assert sum(count for count, _ in counted) == 150 - 64


@pytest.mark.parametrize("stop_after", [0, 1, 4, 6, 9])
def test_rows_of_arrays_are_scored_exactly_once_after_an_interruption(saved, arrays, tmp_path, stop_after):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert _score(saved, arrays, whole).scored == 150
    with pytest.raises(KeyboardInterrupt):
        _score(saved, arrays, out, stop_after=stop_after)
    assert not out.exists()
    tally = _score(saved, arrays, out, resume=True)
    assert (tally.scored, tally.resumed) == (150, 16 * stop_after)
    assert out.read_bytes() == whole.read_bytes()
    assert len({json.loads(line)["path"] for line in out.read_text().splitlines()}) == 150


def _interrupted(saved, arrays, out, *, after=4):
    with pytest.raises(KeyboardInterrupt):
        _score(saved, arrays, out, stop_after=after)
    return out.with_name(out.name + ".partial")


def test_a_line_that_is_torn_or_rotten_is_done_again(saved, arrays, tmp_path):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    _score(saved, arrays, whole)
    partial = _interrupted(saved, arrays, out)
    good = partial.read_bytes()
    lines = good.splitlines(keepends=True)
    rotten = [*lines[:3], lines[3].replace(b".npy", b".npz", 1), *lines[4:]]
    for content, resumed in ((good[:-1], 48), (good + b"torn", 64), (b"".join(rotten), 32)):
        partial.write_bytes(content)
        assert _score(saved, arrays, out, resume=True).resumed == resumed
        assert out.read_bytes() == whole.read_bytes()
        assert not partial.exists()


def test_without_resume_a_run_begins_anew(saved, arrays, tmp_path):
    _interrupted(saved, arrays, tmp_path / "out.jsonl")
    assert _score(saved, arrays, tmp_path / "out.jsonl").resumed == 0


def test_a_run_with_other_settings_is_not_gone_on_with(saved, arrays, tmp_path):
    partial = _interrupted(saved, arrays, tmp_path / "out.jsonl")
    before = partial.read_bytes()
    with pytest.raises(InputError, match="to be of the same detector and settings, but it is not. Leave out --resume"):
        _score(saved, arrays, tmp_path / "out.jsonl", resume=True, settings=["other"])
    assert partial.read_bytes() == before


def test_inputs_that_are_gone_are_noticed(saved, arrays, tmp_path):
    _interrupted(saved, arrays, tmp_path / "out.jsonl")
    with pytest.raises(InputError, match=r"Expected the inputs of the interrupted run, but '.*0.npy#0' is not among"):
        _score(saved, arrays[1:], tmp_path / "out.jsonl", resume=True)


def test_inputs_that_were_added_are_scored_once(saved, arrays, tmp_path):
    _interrupted(saved, arrays[1:], tmp_path / "out.jsonl", after=2)
    tally = _score(saved, arrays, tmp_path / "out.jsonl", resume=True)
    assert (tally.scored, tally.resumed) == (150, 32)
    paths = [json.loads(line)["path"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(set(paths)) == 150


def test_a_second_run_at_the_same_output_is_refused(saved, arrays, tmp_path):
    pytest.importorskip("fcntl")
    journal = Journal(tmp_path / "out.csv", "x", resume=False)
    with pytest.raises(ArtefactError, match="Expected to be the only run that writes"):
        _score(saved, arrays, tmp_path / "out.csv")
    journal.close()


@pytest.mark.parametrize("out", ["", ".", "/"])
def test_a_folder_cannot_be_the_output_and_that_is_said_before_any_work(saved, arrays, out):
    with pytest.raises(ArtefactError, match="to be a file to write, but it is a folder"):
        _score(saved, arrays, Path(out), stop_after=0)


def test_a_name_that_is_no_text_is_written_out():
    rows = [ScoreRow("\udcff.png", 0.5, 1.0, True, "content")]
    assert list(format_rows("csv", rows, header=False)) == [r"\udcff.png,0.5,1.0,true,content"]
    assert next(format_rows("table", rows, header=False)).endswith(r"  \udcff.png")
    assert json.loads(next(format_rows("json", rows)))["path"] == "\udcff.png"


@pytest.mark.parametrize("name", ["a\nb.png", "a\rb.png", 'a"b.png', " a.png", "a\r\n"])
def test_a_name_with_a_line_end_stays_one_row_of_csv(name):
    text = "".join(
        f"{line}\n"
        for line in format_rows(
            "csv", [ScoreRow(name, 0.5, 1.0, True, "both"), ScoreRow("c", 0.5, 1.0, False, "typical")]
        )
    )
    _, first, second = csv.reader(io.StringIO(text, newline=""))
    assert first == [name, "0.5", "1.0", "true", "both"]
    assert second[0] == "c"


@pytest.mark.parametrize("count", [0, 3, 25])
def test_parquet_is_written_in_parts(tmp_path, monkeypatch, count):
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("neuralmean.jobs.rows._ROWS_AT_ONCE", 10)
    rows = [ScoreRow(f"{i}\udcff", i / 3, 0.5, i % 2 == 0, "typical") for i in range(count)]
    write_rows(tmp_path / "x.parquet", "parquet", iter(rows))
    read = parquet.read_table(tmp_path / "x.parquet")
    assert read.column_names == list(ScoreRow._fields)
    assert [row["score"] for row in read.to_pylist()] == [row.score for row in rows]


def test_formats_are_known_by_name_and_by_ending():
    assert format_of(Path("x.JSONL"), None) == "json"
    assert format_of(None, None) == "table"
    with pytest.raises(InputError, match="Expected the format to be one of"):
        format_of(None, "xml")
    with pytest.raises(InputError, match="Expected a file to write parquet to"):
        format_of(None, "parquet")
    with pytest.raises(InputError, match="Expected `out` to end in one of"):
        format_of(Path("x.anything"), None)


def test_without_pyarrow_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[report\]"):
        format_of(Path("x.parquet"), None)
