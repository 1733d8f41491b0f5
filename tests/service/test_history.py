"""The history: written in batches, bounded, safe under kill -9, readable weeks later."""

import signal
import sqlite3
import time

import pytest
from benchmarks import history as benchmark
from typer.testing import CliRunner

from neuralmean.cli.app import load_commands
from neuralmean.errors import InputError, StorageError
from neuralmean.service.history import (
    History,
    HistoryRow,
    read_alarms,
    read_picture,
    read_rows,
    read_span,
    read_totals,
)


@pytest.fixture
def by_hand(monkeypatch):
    """Only the test writes, not the thread of the history."""
    monkeypatch.setattr("neuralmean.service.history.EVERY_S", 1000)


def _rows(first, count, when, every=0.01):
    return [
        HistoryRow(first + i, when + every * i, float(i), 0.5, i % 10 == 0, "content" if i % 10 == 0 else None, i % 3)
        for i in range(count)
    ]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.db"


def test_what_is_added_can_be_read_and_numbers_go_on_after_a_restart(path):
    now = time.time()
    history = History(path)
    history.add(_rows(1, 100, now), [(1, b"png")])
    history.close()
    history = History(path)
    history.add(_rows(1, 50, now))
    history.close()
    rows = list(read_rows(path))
    assert [row.number for row in rows] == list(range(1, 151))
    assert rows[:100] == _rows(1, 100, now)
    assert len(list(read_rows(path, flagged=True))) == 15
    assert (read_picture(path, 1), read_picture(path, 2)) == (b"png", None)
    totals = read_totals(path)
    assert (totals["n"], totals["n_ood"], totals["n_alarms"], totals["n_pictures"]) == (150, 15, 0, 1)


def test_a_summary_counts_by_half_hour_day_and_week(path):
    now = 1_700_000_000.0
    history = History(path, days=1e6)
    history.add(_rows(1, 100, now - 10 * 86400), [])
    history.add(_rows(101, 40, now - 3 * 3600), [])
    history.add(_rows(141, 20, now - 60), [])
    history.close()
    hours, days, weeks = (read_span(path, span, now=now) for span in ("hours", "days", "weeks"))
    assert [row["n"] for row in hours if row["n"]] == [40, 20]
    assert hours[-1]["n"] == 20
    assert sum(row["n"] for row in days) == sum(row["n"] for row in weeks) == 160
    assert sum(row["n_ood"] for row in days) == 10 + 4 + 2
    assert days[0]["start"] < days[1]["start"]
    with pytest.raises(
        InputError, match=r"Expected the span to be one of \['hours', 'days', 'weeks'\], but got 'years'"
    ):
        read_span(path, "years")


def test_an_alarm_keeps_its_examples_after_newer_pictures_have_come(path, by_hand):
    history = History(path, n_pictures=5)
    history.add(_rows(1, 3, time.time()), [(2, b"two"), (3, b"three")])
    history.begin_alarm({"item": 3, "examples": [3, 2], "sentence": "Most inputs look unusual."})
    history.flush()
    history.end_alarm()
    for number in range(10, 30):
        history.add(_rows(number, 1, time.time()), [(number, b"new")])
        history.flush()
    history.tidy()
    history.close()
    (alarm,) = read_alarms(path)
    assert (alarm["examples"], alarm["sentence"]) == ([3, 2], "Most inputs look unusual.")
    assert alarm["ended"] >= alarm["time"]
    assert (read_picture(path, 3), read_picture(path, 12), read_picture(path, 29)) == (b"three", None, b"new")
    assert read_totals(path)["n_pictures"] == 5


def test_layers_that_are_known_later_are_added_to_the_alarm_that_is_on(path):
    history = History(path)
    history.begin_alarm({"item": 3, "examples": [], "layers": []})
    history.end_alarm()
    history.begin_alarm({"item": 9, "examples": [], "layers": []})
    history.name_layers(["conv1", "conv2"])
    history.close()
    assert [(alarm["item"], alarm["layers"]) for alarm in read_alarms(path)] == [(9, ["conv1", "conv2"]), (3, [])]


def test_the_file_stays_within_its_bound_however_fast_rows_come(path, by_hand):
    history, sizes = History(path, max_bytes=2_000_000), []
    for part in range(30):
        history.add(_rows(1 + 5000 * part, 5000, time.time(), every=0.001))
        history._write()
        sizes.append(sum(file.stat().st_size for file in path.parent.glob("history.db*")))
    history.close()
    assert path.stat().st_size <= 2_000_000
    assert max(sizes) < 2_000_000 + 4 * 2**20 + 500_000  # SQLite's log is merged every 4 MiB
    assert max(row.number for row in read_rows(path)) == 150_000


def test_old_rows_go_by_age_and_by_size(path, by_hand):
    history = History(path, days=1)
    now = time.time()
    history.add(_rows(1, 1000, now - 5 * 86400))
    history.add(_rows(1001, 1000, now - 60))
    history.flush()
    history.tidy()
    assert [row.number for row in read_rows(path)] == list(range(1001, 2001))
    history.max_bytes = 200_000
    for part in range(40):
        history.add(_rows(2001 + 1000 * part, 1000, now))
        history.flush()
        history.tidy()
    history.close()
    assert path.stat().st_size < 2 * 200_000 + 100_000
    assert max(row.number for row in read_rows(path)) == 42000


def test_pictures_go_by_age_and_all_rows_do_also_without_new_ones(path, by_hand):
    history = History(path, days=1)
    now = time.time()
    history.add(_rows(1, 10, now - 5 * 86400), [(1, b"old")])
    history.flush()
    history.tidy()
    assert list(read_rows(path)) == []
    assert read_picture(path, 1) is None
    history.add(_rows(11, 10, now - 5 * 86400), [(11, b"old")])
    history.add(_rows(21, 10, now), [(21, b"new")])
    history.flush()
    history.tidy()
    history.close()
    assert [row.number for row in read_rows(path)] == list(range(21, 31))
    assert (read_picture(path, 11), read_picture(path, 21)) == (None, b"new")


def test_numbers_of_pictures_that_outlive_their_rows_are_not_given_again(path, by_hand):
    history = History(path, days=1)
    history.add(_rows(1, 3, time.time() - 5 * 86400), [(2, b"of the alarm")])
    history.begin_alarm({"item": 3, "examples": [2]})
    history.flush()
    history.tidy()
    history.close()
    assert list(read_rows(path)) == []
    history = History(path, days=1)
    history.add(_rows(1, 1, time.time()), [(1, b"new")])
    history.close()
    assert [row.number for row in read_rows(path)] == [3]
    assert (read_picture(path, 2), read_picture(path, 3)) == (b"of the alarm", b"new")


def test_without_thumbnails_there_is_no_picture(path):
    history = History(path, n_pictures=0)
    history.add(_rows(1, 3, time.time()), [(1, b"png")])
    history.close()
    assert read_totals(path)["n_pictures"] == 0


def test_files_that_are_no_history_are_refused(path, tmp_path):
    path.write_bytes(b"no database" * 100)
    with pytest.raises(StorageError, match="to be a history, but SQLite reported: file is not a database"):
        History(path)
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE a (b)")
    with pytest.raises(StorageError, match="to be a history of this version, but it is something else"):
        History(other)
    with pytest.raises(InputError, match="to be a history, but there is no such file"):
        read_totals(tmp_path / "none.db")


def test_the_command_shows_days_and_writes_tables(path, tmp_path):
    history = History(path)
    history.add(_rows(1, 100, time.time()))
    history.begin_alarm({"item": 3, "examples": [], "sentence": "Most inputs look unusual."})
    history.close()
    run = CliRunner().invoke(load_commands(), ["history", str(path)])
    assert "100 decisions" in run.output
    assert "Most inputs look unusual." in run.output
    out = tmp_path / "rows.csv"
    assert CliRunner().invoke(load_commands(), ["history", str(path), "--out", str(out), "--flagged"]).exit_code == 0
    assert len(out.read_text().splitlines()) == 11
    parquet = pytest.importorskip("pyarrow.parquet")
    assert (
        CliRunner().invoke(load_commands(), ["history", str(path), "--out", str(tmp_path / "r.parquet")]).exit_code == 0
    )
    assert parquet.read_table(tmp_path / "r.parquet").num_rows == 100


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_twenty_kills_lose_at_most_the_last_second(path):
    for turn in range(20):
        lost, is_sound = benchmark.kill(path, 2 + 0.17 * turn)
        assert lost <= 1.0
        assert is_sound


@pytest.mark.slow
def test_the_page_shows_ten_million_rows_in_under_a_second_and_the_file_keeps_its_bound(path):
    benchmark.fill(path, 10_000_000)
    assert sum(row["n"] for row in read_span(path, "weeks")) == 10_000_000
    assert all(seconds < 1 for _, seconds in benchmark.answers(path))
    largest = benchmark.write_on(path, 500_000, 400_000_000)
    assert path.stat().st_size <= 400_000_000
    assert largest < 400_000_000 + 20_000_000  # the log of transactions
