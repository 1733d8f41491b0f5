"""The journal of a long run: what was finished is there after anything."""

from __future__ import annotations

import errno
import sys

import pytest

from neuralmean.errors import ArtefactError, InputError
from neuralmean.files import journal as module
from neuralmean.files.journal import Entry, Journal


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.csv"


def opened(out, run="run", **options):
    return Journal(out, run, **{"resume": True, **options})


def keys(journal):
    return [entry.key for entry in journal.entries()]


def write(out, *names):
    journal = opened(out)
    for name in names:
        journal.add(name, {"of": name})
    journal.close()


def test_parts_come_back_in_order_with_where_they_end(out):
    write(out, "a", "b")
    journal = opened(out)
    first, second = journal.entries()
    assert (first.key, first.content, second) == ("a", {"of": "a"}, Entry("b", {"of": "b"}, second.end))
    assert journal.start < first.end < second.end == journal.path.stat().st_size
    assert journal.path.name == "out.csv.partial"
    journal.remove()
    assert not journal.path.exists()
    journal.remove()  # twice is fine


def test_without_resume_it_begins_anew(out):
    write(out, "a")
    journal = opened(out, resume=False)
    assert keys(journal) == []
    assert journal.path.stat().st_size == journal.start
    journal.close()


@pytest.mark.parametrize("n_lost", range(1, 20))
def test_a_torn_end_is_cut_off_and_the_run_goes_on(out, n_lost):
    write(out, "a", "b")
    path = out.with_name("out.csv.partial")
    path.write_bytes(path.read_bytes()[:-n_lost])
    journal = opened(out)
    assert keys(journal) == ["a"]
    end = journal.cut()
    assert path.stat().st_size == end
    journal.add("c", 1)
    assert keys(journal) == ["a", "c"]
    journal.close()


def test_a_rotten_line_ends_what_counts(out):
    write(out, "a", "b", "c")
    path = out.with_name("out.csv.partial")
    path.write_bytes(path.read_bytes().replace(b'"of": "b"', b'"of": "x"'))
    journal = opened(out)
    assert keys(journal) == ["a"]
    journal.close()


def test_cutting_at_an_entry_keeps_what_is_before_it(out):
    write(out, "a", "b", "c")
    journal = opened(out)
    first = next(iter(journal.entries()))
    assert journal.cut(first.end) == first.end
    assert keys(journal) == ["a"]
    journal.add("d", None)
    assert keys(journal) == ["a", "d"]
    journal.close()


def test_lines_of_another_run_are_not_used(out):
    write(out, "a")
    with pytest.raises(InputError, match="to be of the same detector and settings, but it is not. Leave out --resume"):
        opened(out, "other", refuse_others=True)
    journal = opened(out, "other")
    assert keys(journal) == []
    journal.close()


def test_a_first_line_that_is_torn_is_no_other_run(out):
    path = out.with_name("out.csv.partial")
    path.write_bytes(b"0000 ru")
    journal = opened(out, refuse_others=True)
    assert keys(journal) == []
    journal.close()


def test_a_second_run_is_refused_and_may_come_later(out):
    journal = opened(out)
    with pytest.raises(
        ArtefactError, match="to be the only run that writes .*out.csv.partial', but another run uses it"
    ):
        opened(out)
    journal.close()
    opened(out).close()


def test_a_folder_and_a_place_that_cannot_be_written_are_told(tmp_path):
    for folder in (tmp_path, tmp_path / ".."):
        with pytest.raises(ArtefactError, match="but it is a folder. Name a file inside it"):
            opened(folder)
    with pytest.raises(ArtefactError, match="but the system reported: No such file or directory. Choose another path"):
        opened(tmp_path / "none" / "out.csv")


class _Full:
    """A file on a disk that takes some bytes of each line, and then no more."""

    def __init__(self, file, n_bytes, code):
        self._file, self._left, self._code = file, n_bytes, code

    def write(self, data):
        if not self._left:
            raise OSError(self._code, "no more")
        part = bytes(data[: min(3, self._left)])  # also less than asked for, as the system may
        self._left -= len(part)
        return self._file.write(part)

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize(
    ("code", "sentence"), [(errno.ENOSPC, "the disk is full"), (errno.EIO, "the system reported: no more")]
)
def test_a_disk_that_fails_is_told_and_loses_nothing(out, code, sentence):
    write(out, "a")
    journal = opened(out)
    journal.cut()
    journal._file = _Full(journal._file, 10, code)
    with pytest.raises(ArtefactError, match=f"out.csv.partial', but {sentence}. Finished parts are kept: run it again"):
        journal.add("b", 1)
    journal.close()
    journal = opened(out)
    assert keys(journal) == ["a"]
    journal.cut()
    journal._file = _Full(journal._file, 1000, code)
    journal.add("b", 1)
    assert keys(journal) == ["a", "b"]
    journal.close()


def test_where_files_cannot_be_locked_it_is_written_all_the_same(out, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    journal = opened(out)
    journal.add("a", 1)
    assert keys(journal) == ["a"]
    journal.close()


def test_the_checksum_is_that_of_zlib():
    assert module._checksum(b"") == b"00000000"
    assert module._checksum(b"123456789") == b"cbf43926"  # the check value of CRC-32
