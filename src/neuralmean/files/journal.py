"""The finished parts of a long run, on disk, one line each, so that the run can resume.

A line has a checksum and the key of its part, which only the writer interprets. After a crash, complete lines are kept
and the rest is truncated. Only one run can write at a time; a second one raises.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from neuralmean.errors import ArtefactError, InputError
from neuralmean.files.atomic import DISK_FULL

_NO_FILE = "Expected {!r} to be the journal of an earlier run, but it is a link, a pipe or a device. Delete it."


class Entry(NamedTuple):
    """One finished part: its key, its content as JSON values, and where its line ends in the file."""

    key: str
    content: Any
    end: int


class Journal:
    """The finished parts of one run that writes the file `out`, stored in `OUT.partial` next to it.

    Args:
        out: The output, which may not exist yet.
        run: Identity of the run (detector, settings); lines of another run are not used.
        resume: Whether to continue from the existing journal.
        refuse_others: Whether to raise for a journal of another run, instead of starting over.

    Attributes:
        path: Where the journal is.
        start: Position of the first entry in the file.
    """

    def __init__(self, out: Path, run: str, *, resume: bool, refuse_others: bool = False) -> None:
        with _told(out):
            if not out.name or out.is_dir():
                raise ArtefactError(
                    f"Expected {str(out)!r} to be a file to write, but it is a folder. Name a file inside it."
                )
        self.path = out.with_name(out.name + ".partial")
        first = _line("run", run.encode())
        self.start = len(first)
        self._file = _open(self.path)
        try:
            with _told(self.path):
                found = self._file.readline() if resume else b""
            if found != first:
                if refuse_others and found.endswith(b"\n"):
                    raise InputError(
                        f"Expected {str(self.path)!r} to be of the same detector and settings, but it is not. "
                        "Leave out --resume to start again."
                    )
                self.cut(0)
                self._write(first)
        except BaseException:
            self._file.close()
            raise

    def entries(self) -> Iterator[Entry]:
        """Yield every finished part, in order, up to the first incomplete line."""
        end = self.start
        with _told(self.path), self.path.open("rb") as file:
            file.seek(end)
            while line := file.readline():
                checksum, _, rest = line.rstrip(b"\n").partition(b" ")
                if not line.endswith(b"\n") or checksum != _checksum(rest):
                    return
                try:
                    key, _, content = rest.partition(b" ")
                    entry = Entry(key.decode("ascii"), json.loads(content), end + len(line))
                except (ValueError, RecursionError):  # a matching checksum is no proof
                    return
                end = entry.end
                yield entry

    def add(self, key: str, content: Any) -> None:
        """Record that a part is done, with its content as JSON values."""
        self._write(_line(key, json.dumps(content).encode("ascii")))

    def cut(self, end: int | None = None) -> int:
        """Drop everything after `end`, the end of an entry; None keeps all complete entries. Returns the new end."""
        if end is None:
            end = self.start
            for entry in self.entries():
                end = entry.end
        with _told(self.path):
            self._file.truncate(end)
            return self._file.seek(end)

    def close(self) -> None:
        """Close the file; another run may continue from it."""
        with _told(self.path):
            self._file.close()

    def remove(self) -> None:
        """Delete the journal, after the result was written."""
        self.close()
        with _told(self.path):
            self.path.unlink(missing_ok=True)

    def _write(self, line: bytes) -> None:
        rest = memoryview(line)
        with _told(self.path):
            while rest:
                rest = rest[self._file.write(rest) :]


@contextmanager
def _told(path: Path) -> Generator[None]:
    """Translate errors of the system inside the block."""
    try:
        yield
    except OSError as error:
        why = "the disk is full" if error.errno in DISK_FULL else f"the system reported: {error.strerror or error}"
        raise ArtefactError(
            f"Expected to write {str(path)!r}, but {why}. Finished parts are kept: run it again to continue (`nmd score` with "
            "`--resume`)."
        ) from error


def _line(key: str, content: bytes) -> bytes:
    rest = key.encode("ascii") + b" " + content
    return _checksum(rest) + b" " + rest + b"\n"


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)


def _open(path: Path) -> FileIO:
    """Open a file for reading and writing, create it if missing, and lock it."""
    # Symbolic links are not followed, as another file would be truncated; pipes are not waited for.
    flags = sum(getattr(os, name, 0) for name in ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK"))
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ArtefactError(_NO_FILE.format(str(path))) from None
        raise ArtefactError(
            f"Expected to write {str(path)!r}, but the system reported: {error.strerror or error}. Choose another path."
        ) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ArtefactError(_NO_FILE.format(str(path)))
        _lock(descriptor, path)
        # Unbuffered: a write that failed on a full disk must not be repeated, and fail again, when the file is closed.
        return os.fdopen(descriptor, "r+b", buffering=0)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise ArtefactError(
                f"Expected to open {str(path)!r}, but the system reported: {error.strerror}."
            ) from error
        raise


def _lock(descriptor: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # no locks on Windows
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArtefactError(
            f"Expected to be the only run that writes {str(path)!r}, but another run uses it. Wait for it, or choose "
            "another output."
        ) from None
    except OSError as error:
        raise ArtefactError(
            f"Expected to lock {str(path)!r}, but the system reported: {error.strerror or error}. Choose another disk."
        ) from error
