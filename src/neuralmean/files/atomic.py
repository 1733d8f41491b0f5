"""Atomic file writes, and locks between processes.

This library writes every result with `write_atomically`: a reader of the path sees the old file or the new one, never a
part of it, even after `kill -9`, a full disk or a power cut. `locked` serialises processes.
"""

from __future__ import annotations

import errno
import glob
import os
import secrets
import stat
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, TextIO, overload

from neuralmean.errors import ArtefactError, InputError

__all__ = ["DISK_FULL", "check_target", "locked", "remove_leftovers", "write_atomically"]

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OF_THE_DISK = (*DISK_FULL, errno.EIO)


@overload
def write_atomically(path: str | Path, mode: Literal["wb"] = ...) -> AbstractContextManager[BinaryIO]: ...
@overload
def write_atomically(path: str | Path, mode: Literal["w"]) -> AbstractContextManager[TextIO]: ...
def write_atomically(path: str | Path, mode: Literal["wb", "w"] = "wb") -> AbstractContextManager[Any]:
    """Open a file for writing that replaces `path` only if the block ends without an error.

    The bytes are written to a hidden file in the same folder and synchronised to disk before it replaces `path` in one
    step. If the block raises, the hidden file is removed and `path` is unchanged. A symbolic link is followed, the
    permissions of an existing file are kept, and a device or a pipe (`/dev/stdout`) is written to directly.

    Args:
        path: The file to write.
        mode: `"wb"` for bytes, `"w"` for UTF-8 text, written without newline translation, as `csv` requires.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with write_atomically(folder / "scores.txt", "w") as handle:
        ...     _ = handle.write("1.5")
        >>> (folder / "scores.txt").read_text()
        '1.5'
    """
    if mode not in ("wb", "w"):
        raise InputError(f"Expected `mode` to be 'wb' or 'w', but got {mode!r}.")
    return _write_atomically(Path(path), mode)


def check_target(path: str | Path) -> None:
    """Raise early what `write_atomically` would raise later: no such folder, a folder of that name, no permission."""
    path = Path(path)
    mode, folder = _existing_mode(path), Path(os.path.realpath(path)).parent
    if mode is None and not folder.is_dir():
        raise ArtefactError(_explain(path, OSError(errno.ENOENT, "")))
    if (mode is None or stat.S_ISREG(mode)) and not os.access(folder, os.W_OK):
        raise ArtefactError(_explain(path, OSError(errno.EACCES, "")))


@contextmanager
def _write_atomically(path: Path, mode: Literal["wb", "w"]) -> Generator[IO[Any]]:
    permissions = _existing_mode(path)
    if permissions is not None and not stat.S_ISREG(permissions):
        with _open_special(path, mode) as handle:
            yield handle
        return
    # Not opened by `tempfile`, so that the process's umask sets the permissions, as for any other file.
    try:
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f"{_hidden(target)}{secrets.token_hex(6)}.nmd-tmp")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    except OSError as error:
        raise ArtefactError(_explain(path, error)) from error
    try:
        with _open_descriptor(descriptor, mode) as handle:
            if permissions is not None:  # before it has content that others may not read
                with suppress(OSError):
                    os.chmod(descriptor if os.chmod in os.supports_fd else temporary, stat.S_IMODE(permissions))  # noqa: PTH101
            yield handle
            handle.flush()
            os.fsync(descriptor)
        _replace(temporary, target, path)
    except OSError as error:
        _remove(temporary)
        # The block may raise an unrelated OSError, about another file or a connection.
        if error.errno in _OF_THE_DISK and error.filename is None:
            raise ArtefactError(_explain(path, error)) from error
        raise
    except BaseException:
        _remove(temporary)
        raise
    _sync_folder(target.parent)


def remove_leftovers(path: str | Path) -> None:
    """Delete the unfinished files of killed writers of `path`; nothing may be writing it now."""
    target = Path(os.path.realpath(path))
    for leftover in target.parent.glob(f"{glob.escape(_hidden(target))}{'?' * 12}.nmd-tmp"):
        _remove(leftover)


def _hidden(target: Path) -> str:
    """Return the prefix of a target's unfinished files, cut to fit into the 255 bytes of a file name."""
    return f".{target.name[:50]}."


def _open_descriptor(descriptor: int, mode: Literal["wb", "w"]) -> IO[Any]:
    try:
        if mode == "wb":
            return os.fdopen(descriptor, "wb")
        return os.fdopen(descriptor, "w", encoding="utf-8", newline="")
    except BaseException:
        os.close(descriptor)
        raise


def _open_special(path: Path, mode: Literal["wb", "w"]) -> IO[Any]:
    try:
        return path.open(mode) if mode == "wb" else path.open(mode, encoding="utf-8", newline="")
    except OSError as error:
        raise ArtefactError(_explain(path, error)) from error


def _existing_mode(path: Path) -> int | None:
    """Return file type and permissions of the file at `path`; None if there is none."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except ValueError:
        raise ArtefactError(
            f"Expected the path of a file to write, but got {str(path)[:300]!r}. Choose another."
        ) from None
    except OSError as error:
        raise ArtefactError(_explain(path, error)) from error
    if stat.S_ISDIR(mode):
        raise ArtefactError(f"Expected {str(path)!r} to be a file to write, but it is a folder. Name a file inside it.")
    return mode


def _replace(temporary: Path, target: Path, path: Path) -> None:
    try:
        temporary.replace(target)
    except OSError as error:
        _remove(temporary)
        raise ArtefactError(_explain(path, error)) from error


def _remove(temporary: Path) -> None:
    with suppress(OSError):
        temporary.unlink()


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power cut if the system supports it (Windows and some network drives do not)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _explain(path: Path, error: OSError) -> str:
    folder = str(path.parent)
    cures = {
        errno.ENOENT: f"there is no folder {folder!r}. Create it first.",
        errno.ENOTDIR: f"{folder!r} is not a folder. Choose another path.",
        errno.EACCES: f"the folder {folder!r} may not be written to. Choose another path or change its permissions.",
        errno.EPERM: f"the folder {folder!r} may not be written to. Choose another path or change its permissions.",
        errno.EROFS: f"the folder {folder!r} is on a read-only disk. Choose another path.",
        errno.ENAMETOOLONG: "its name is too long. Choose a shorter one.",
    }
    if error.errno in DISK_FULL:
        why = "the disk is full. Free some space or choose another path; what was there before is unchanged."
    else:
        why = cures.get(error.errno or 0, f"the system reported: {error.strerror or error}.")
    return f"Expected to write {str(path)!r}, but {why}"


@contextmanager
def locked(path: str | Path, *, wait: bool = True) -> Generator[bool]:
    """Hold an exclusive lock on `path` inside the block; the system releases it when the process ends for any reason.

    Args:
        path: A separate file for the lock; created if missing, and never deleted.
        wait: Whether to wait for another process. If not, the block always runs, and gets whether it holds the lock.

    Raises:
        ArtefactError: The file cannot be created.
    """
    path = Path(path)
    try:
        handle = path.open("a+b")
    except OSError as error:
        raise ArtefactError(_explain(path, error)) from error
    with handle:
        held = _lock(handle, wait)
        try:
            yield held
        finally:
            if held:
                _unlock(handle)


if sys.platform == "win32":
    import msvcrt

    def _lock(handle: IO[bytes], wait: bool) -> bool:
        handle.seek(0)
        try:
            msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        except OSError:
            if wait:
                raise
            return False
        return True

    def _unlock(handle: IO[bytes]) -> None:
        handle.seek(0)
        msvcrt.locking(handle.fileno(), msvcrt.LK_UNLCK, 1)

else:
    import fcntl

    def _lock(handle: IO[bytes], wait: bool) -> bool:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _unlock(handle: IO[bytes]) -> None:
        fcntl.flock(handle, fcntl.LOCK_UN)
