"""Runs `nmd` in this process as a shell would start it: real streams, a limit of time, the peak of memory."""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from neuralmean.cli import main
from neuralmean.errors import InputError
from neuralmean.files.atomic import write_atomically
from tests.fuzz.watch import peak, reset_peak

CPU_SECONDS, SECONDS = 20, 120  # of work, and of waiting for whatever it may be (on a busy machine also for a core)


class HangError(BaseException):
    """Not an `Exception`, so that nobody catches it on the way."""


@dataclass(frozen=True)
class Outcome:
    """What a person at the terminal sees, and by how much the memory grew meanwhile (0 where the system does not say)."""

    code: int
    out: str
    err: str
    grown: int


def run(*arguments: str) -> Outcome:
    """`nmd ARGUMENTS`; what is not handled comes through as an exception."""
    streams = [_stream("strict"), _stream("backslashreplace")]  # as Python makes them for a UTF-8 terminal
    before = peak() if reset_peak() else 0
    code: int | str | None = 0
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("default")
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        patch.setattr(sys, "argv", ["nmd", *arguments])
        with _alarm(), _ceiling(), contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            try:
                main()
            except SystemExit as stop:
                code = stop.code
    texts = []
    for stream in streams:
        stream.flush()
        texts.append(stream.buffer.getvalue().decode())  # type: ignore[attr-defined]
    assert isinstance(code, int) or code is None
    return Outcome(code or 0, *texts, max(0, peak() - before) if before else 0)


def _stream(errors: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=errors, write_through=True)


@contextlib.contextmanager
def _alarm():
    def ring(*_):
        raise HangError(f"still at it after {CPU_SECONDS} s of work, or {SECONDS} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    alarms = {signal.SIGALRM: (signal.ITIMER_REAL, SECONDS), signal.SIGPROF: (signal.ITIMER_PROF, CPU_SECONDS)}
    before = {number: signal.signal(number, ring) for number in alarms}
    for timer, seconds in alarms.values():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for number, (timer, _) in alarms.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


@contextlib.contextmanager
def _ceiling():
    """Let an allocation beyond all bounds fail, here and not in somebody else's process."""
    try:
        import resource
    except ImportError:
        yield
        return
    size = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if sys.platform == "linux" else 0
    )
    before = resource.getrlimit(resource.RLIMIT_AS)
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (size + 2 * 2**30, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def tame(patch: pytest.MonkeyPatch) -> None:
    """Put stand-ins where a command that is given nothing wrong would work for minutes, serve for ever or go online."""
    import socket

    from neuralmean import export
    from neuralmean.bench import train
    from neuralmean.cli import demo
    from neuralmean.integrations import mcp
    from neuralmean.service import freezing, launch

    def refuse(*_, **__):
        raise InputError("Expected this to be tried, but it is a test.")

    def offline(*_):
        raise OSError(101, "Network is unreachable")

    def write_nothing(detector, path, **_):
        with write_atomically(path) as file:
            file.write(b"a graph")

    patch.setattr(socket.socket, "connect", offline)
    patch.setattr(launch, "run_server", lambda app, **_: None)
    patch.setattr(freezing, "leave", sys.exit)  # it would end the process of the tests
    patch.setattr(demo, "run", refuse)
    patch.setattr(mcp, "create_server", refuse)
    patch.setattr(train, "train", refuse)
    patch.setattr(export, "to_onnx", write_nothing)
    patch.setattr(export, "to_pt2", write_nothing)
    patch.setitem(sys.modules, "ray", None)


class World:
    """A folder with everything that a command may be given; put back as it was before each call."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._content: dict[Path, bytes] = {}
        self._folders: set[Path] = set()

    def keep(self) -> None:
        """Remember what is in it now."""
        self._content = {path: path.read_bytes() for path in self._files()}
        self._folders = {path for path in self.folder.rglob("*") if path.is_dir()}

    def restore(self) -> None:
        """Remove what was made and undo what was changed."""
        for path in self._files():
            if path not in self._content:
                path.unlink()
        for path in sorted(self.folder.rglob("*"), reverse=True):
            if path.is_dir() and path not in self._folders:
                path.rmdir()
        for path, content in self._content.items():
            if not path.is_file() or path.read_bytes() != content:
                path.unlink(missing_ok=True)
                path.write_bytes(content)

    def _files(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
