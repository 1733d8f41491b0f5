import io
import re
import subprocess
import sys
import threading

import pytest

from neuralmean.data import progress
from neuralmean.data.progress import showing, track
from neuralmean.errors import InputError


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Clock:
    """A clock that moves by a fixed step each time someone looks at it."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def monotonic(self):
        self.now += self.step
        return self.now


def test_nothing_is_shown_where_stderr_is_no_terminal(capsys):
    assert list(track(range(5), description="Counting")) == [0, 1, 2, 3, 4]
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_with_count_and_unit(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    assert list(track([[1, 2], [3]], description="Fitting [x]", total=3, size=len)) == [[1, 2], [3]]
    assert "Fitting [x]" in terminal.getvalue()
    assert "3/3 images" in terminal.getvalue()


def test_quiet_and_off_show_nothing_on_a_terminal(monkeypatch):
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track([1], description="A", quiet=True)) == [1]
    with showing("off"):
        assert list(track([1], description="B")) == [1]
    assert terminal.getvalue() == ""


def test_lines_say_how_far_how_fast_and_how_long(capsys, monkeypatch):
    monkeypatch.setattr(progress, "time", _Clock(step=1.0))
    with showing("lines", every=0.0):
        list(track([[0] * 10] * 2, description="Scoring", total=20, size=len))
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"\d+\.\d+|\d:\d\d", "N", line) for line in lines] == [
        "Scoring: 10 of 20 images, N images/s, N left",
        "Scoring: 20 images in N, N images/s",
    ]


def test_lines_wait_between_each_other(capsys, monkeypatch):
    monkeypatch.setattr(progress, "time", _Clock(step=1.0))
    with showing("lines", every=1e9):
        list(track(range(50), description="Scoring"))
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_lines_go_to_stderr_never_to_stdout(capsys):
    with showing("lines"):
        list(track([1], description="Scoring"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Scoring: 1 images in 0:00")


@pytest.mark.parametrize(
    ("done", "total", "seconds", "line"),
    [
        (30, 120, 60.0, "X: 30 of 120 rows, 0.500 rows/s, 3:00 left"),
        (1_000_000, 8_200_000, 500.0, "X: 1,000,000 of 8,200,000 rows, 2,000 rows/s, 1:00:00 left"),
        (0, 10, 0.0, "X: 0 of 10 rows"),
        (0, 0, 0.0, "X: 0 rows in 0:00"),
        (12, 10, 2.0, "X: 12 of 10 rows, 6.0 rows/s"),
        (7, None, 2.0, "X: 7 rows, 3.5 rows/s"),
    ],
)
def test_one_plain_line(done, total, seconds, line):
    assert progress.plain_line("X", done, total, "rows", seconds) == line


def test_a_track_inside_another_is_silent(capsys):
    with showing("lines"):
        for _ in track([1], description="Outer"):
            list(track([1, 2], description="Inner"))
        list(track([1], description="After"))
    err = capsys.readouterr().err
    assert "Outer" in err
    assert "After" in err
    assert "Inner" not in err


def test_stopping_early_ends_the_bar(capsys):
    with showing("lines"):
        items = track(range(10), description="First")
        assert next(items) == 0
        items.close()
        list(track([1], description="Second"))
    assert "Second" in capsys.readouterr().err


def test_items_are_taken_one_at_a_time():
    taken = []

    def source():
        for i in range(3):
            taken.append(i)
            yield i

    items = track(source(), description="Lazy")
    assert taken == []
    next(items)
    assert taken == [0]


def test_an_error_of_the_source_comes_through(capsys):
    def source():
        yield 1
        raise RuntimeError("broken source")

    with showing("lines"), pytest.raises(RuntimeError, match="broken source"):
        list(track(source(), description="X"))


def test_the_style_ends_with_the_block_and_other_threads_have_their_own(capsys):
    with showing("lines"):
        thread = threading.Thread(target=lambda: list(track([1], description="Thread")))
        thread.start()
        thread.join()
    list(track([1], description="After"))
    assert capsys.readouterr().err == ""


def test_an_unknown_style_is_refused():
    with pytest.raises(InputError, match=r"Expected `style` to be one of .*'lines'.*, but got 'loud'"), showing("loud"):
        pass


def test_a_negative_pause_is_refused():
    with pytest.raises(InputError, match="Expected `every` to be a number of seconds"), showing("lines", every=-1):
        pass


def test_rich_is_imported_only_when_a_bar_is_drawn():
    code = (
        "import sys; from neuralmean.data.progress import track; list(track([1], description='x')); "
        "sys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, check=False).returncode == 0
