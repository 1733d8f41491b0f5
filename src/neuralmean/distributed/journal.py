"""What has been scored so far, on disk: one line for each finished chunk, in order, so that a run can go on.

A line carries a checksum and the key of its chunk. After a crash whatever is whole and still belongs to the inputs is kept,
the rest is cut off. Only the driver writes; a second one at the same file is refused.
"""

from __future__ import annotations

import errno
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from neuralmean.distributed.chunks import Chunk
from neuralmean.distributed.jobs import ChunkScores
from neuralmean.errors import ArtefactError
from neuralmean.images import Unreadable

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Journal:
    """The finished chunks of one run.

    Args:
        path: Where it is kept.
        run: What the run is (detector, settings): lines of another run are not used.
        resume: Whether to go on from what is there.

    Attributes:
        n_resumed: How many inputs an earlier run had finished, once `unfinished` has begun.
    """

    def __init__(self, path: Path, run: str, *, resume: bool) -> None:
        self.path = path
        self.n_resumed = 0
        self._first = _line("run", run.encode())
        self._file = _open(path)
        try:
            if not (resume and self._file.readline() == self._first):
                self._cut(0)
                self._write(self._first)
        except BaseException:
            self._file.close()
            raise

    def unfinished(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """Yield the chunks that are not in the journal, after cutting off what no longer fits them."""
        end = len(self._first)
        pending = None
        for key, _, stop in self._lines():
            pending = next(chunks, None)
            if pending is None or pending.key != key:
                break
            self.n_resumed += len(pending)
            end, pending = stop, None
        self._cut(end)
        if pending is not None:
            yield pending
        yield from chunks

    def add(self, chunk: Chunk, scores: ChunkScores) -> None:
        """Note that a chunk is done."""
        unreadable = [[note.path, note.reason] for note in scores.unreadable]
        record = [scores.names, scores.score, scores.p_value, scores.is_ood, unreadable]
        self._write(_line(chunk.key, json.dumps(record).encode("ascii")))

    def read(self) -> Iterator[ChunkScores]:
        """Yield every finished chunk, in order."""
        for _, content, _ in self._lines():
            names, score, p_value, is_ood, unreadable = json.loads(content)
            yield ChunkScores(names, score, p_value, is_ood, [Unreadable(*note) for note in unreadable])

    def close(self) -> None:
        """Let go of the file; another run may go on from it."""
        self._file.close()

    def remove(self) -> None:
        """Delete it: the result is written."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _lines(self) -> Iterator[tuple[str, bytes, int]]:
        """Yield key, content and end of each whole line after the first, up to the first that is not."""
        self._file.seek(len(self._first))
        end = len(self._first)
        while line := self._file.readline():
            checksum, _, rest = line.rstrip(b"\n").partition(b" ")
            if not line.endswith(b"\n") or checksum != _checksum(rest):
                return
            key, _, content = rest.partition(b" ")
            end += len(line)
            yield key.decode("ascii"), content, end

    def _cut(self, end: int) -> None:
        self._file.truncate(end)
        self._file.seek(end)

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            why = "the disk is full" if error.errno in _FULL else f"the system said: {error.strerror or error}"
            raise ArtefactError(
                f"Expected to write {str(self.path)!r}, but {why}. What is finished is kept: run it again to go on."
            ) from error


def _line(key: str, content: bytes) -> bytes:
    rest = key.encode("ascii") + b" " + content
    return _checksum(rest) + b" " + rest + b"\n"


def _checksum(content: bytes) -> bytes:
    return b"%08x" % zlib.crc32(content)


def _open(path: Path) -> BinaryIO:
    """Open a file to read and write, making it where there is none, and keep others out."""
    try:
        # Unbuffered writes: what was noted survives the process, and a line that did not fit shows at once.
        file: BinaryIO = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666), "r+b")
    except OSError as error:
        raise ArtefactError(
            f"Expected to write {str(path)!r}, but the system said: {error.strerror or error}. Choose another path."
        ) from error
    try:
        import fcntl
    except ImportError:  # Windows: two runs at one file are then the user's business
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ArtefactError(
            f"Expected to be the only run that writes {str(path)!r}, but another one is at it. Wait for it, or choose "
            "another output."
        ) from None
    return file
