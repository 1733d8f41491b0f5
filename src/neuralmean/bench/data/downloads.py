"""Downloads the official files of a set: checked by their MD5 sums, resumed after an interruption, unpacked safely.

A file is called `<name>.part` until it is complete and verified; an archive is unpacked next to its destination and
moved there in one step. A file under its own name is therefore always complete. Existing files are never overwritten.
"""

from __future__ import annotations

import http.client
import os
import shutil
import stat
import tarfile
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from neuralmean.bench.data.inventory import find, locate, md5_of
from neuralmean.bench.data.registry import dataset
from neuralmean.errors import ArtefactError, InputError

CHUNK = 1 << 18
MAX_BYTES = 4 << 30  # far above the largest release (DTD: 0.6 GB packed)
MAX_MEMBERS = 200_000
Progress = Callable[[int, "int | None"], None]  # bytes received, total bytes if known


def download(name: str, root: Path | str, *, progress: Progress | None = None) -> list[Path]:
    """Download the missing official files of a set into `root`.

    Args:
        name: A set of the paper.
        root: The data folder, created if needed.
        progress: Called with the number of bytes received and the total.

    Returns:
        The files: one path per split.
    """
    found = dataset(name)
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    for source in found.sources:
        wanted = found.counts if source.split is None else [source.split]
        if all(locate(found.name, split, root) for split in wanted):
            continue
        target = root / source.filename
        if not target.exists():
            fetch(source.url, target, md5=source.md5, progress=progress)
        elif md5_of(target) != source.md5:
            raise ArtefactError(
                f"Expected {target.name} to be the official file, but its MD5 sum differs. Remove it and try again."
            )
        if source.filename.endswith(".tar.gz"):
            unpack(target, root)
            target.unlink()
    wrong = [entry for entry in find(root, only=[found.name]) if not entry.ok]
    if wrong:
        raise ArtefactError(f"Expected {found.name!r} to be complete after the download, but got: {wrong[0].check}.")
    return [located.path for split in found.counts if (located := locate(found.name, split, root)) is not None]


def fetch(url: str, target: Path, *, md5: str, progress: Progress | None = None, timeout: float = 30.0) -> Path:
    """Download one file, resuming an earlier attempt.

    Args:
        url: An http or https address.
        target: Path of the file once it is complete and verified.
        md5: The expected MD5 sum.
        progress: Called with the number of bytes received and the total.
        timeout: Seconds to wait for a response.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"Expected an http or https address, but got {url!r}.")
    part = target.with_name(f"{target.name}.part")
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            whole = _receive(url, part, progress, timeout)
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            whole, reason = False, f"{type(error).__name__}: {error}"
        else:
            reason = "the connection ended early"
        if whole:
            break
        # An attempt that received something is worth another one.
        if not part.exists() or part.stat().st_size <= before:
            raise ArtefactError(
                f"Expected to download {url}, but got {reason}. What is here is kept: try again later to go on, or "
                f"download it by hand and put it at {str(target)!r}."
            )
    got = md5_of(part)
    if got != md5:
        part.unlink()
        raise ArtefactError(
            f"Expected {target.name} to have the MD5 sum {md5}, but got {got}. It was removed; try again, and if it "
            "happens twice the file at its address is not the official one."
        )
    part.replace(target)
    return target


def _receive(url: str, part: Path, progress: Progress | None, timeout: float) -> bool:
    """Append the missing bytes of `url` to `part`; return whether the server sent as many as it announced."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "neuralmean", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        # There is nothing after the part: either it is complete, or the check of its sum will fail.
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and start:
            return True
        raise
    with answer:
        resumed = answer.status == http.HTTPStatus.PARTIAL_CONTENT
        if resumed and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            raise http.client.HTTPException(f"another range than requested: {answer.headers.get('Content-Range')}")
        length = answer.headers.get("Content-Length", "")
        here = start if resumed else 0
        total = here + int(length) if length.isdigit() else None
        with part.open("ab" if resumed else "wb") as handle:
            while chunk := answer.read(CHUNK):
                here += len(chunk)
                if here > MAX_BYTES:
                    part.unlink()
                    raise ArtefactError(f"Expected {url} to send at most {MAX_BYTES:,} bytes, but it sends more.")
                handle.write(chunk)
                if progress is not None:
                    progress(here, total)
            handle.flush()
            os.fsync(handle.fileno())
    return total is None or here == total


def unpack(archive: Path, root: Path, *, max_bytes: int = MAX_BYTES) -> list[Path]:
    """Unpack a tar archive into `root`, atomically: plain files and folders only, inside `root`, of bounded size.

    Returns:
        The unpacked top-level files and folders.
    """
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=root) as scratch:
        try:
            _extract(archive, Path(scratch), max_bytes)
        except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
            raise ArtefactError(
                f"Expected {archive.name} to be a tar archive, but it is damaged ({type(error).__name__}: {error}). "
                "Remove it and download it again."
            ) from error
        entries = sorted(Path(scratch).iterdir())
        for entry in entries:
            if (root / entry.name).exists():
                raise ArtefactError(
                    f"Expected no {entry.name!r} in {str(root)!r} to unpack {archive.name} to, but there is one. "
                    "Move it away and try again."
                )
        return [entry.rename(root / entry.name) for entry in entries]


def _extract(archive: Path, folder: Path, max_bytes: int) -> None:
    size = 0
    with tarfile.open(archive, "r:*") as tar:
        for number, member in enumerate(tar):
            path = _safe_path(member, archive)
            size += max(member.size, 0)
            if size > max_bytes or number >= MAX_MEMBERS:
                raise ArtefactError(
                    f"Expected {archive.name} to unpack to at most {max_bytes:,} bytes in {MAX_MEMBERS:,} files, "
                    "but it holds more. It is not the official file; remove it."
                )
            target = folder / path
            if member.isdir():
                target.mkdir(parents=True, exist_ok=True)
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(member)
            if content is None:
                raise tarfile.ReadError(f"no content for {member.name}")
            with content, target.open("xb") as handle:
                shutil.copyfileobj(content, handle, CHUNK)
            target.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IROTH)


def _safe_path(member: tarfile.TarInfo, archive: Path) -> PurePosixPath:
    """Return the member's path below the folder, or raise if it leads elsewhere or is not a plain file."""
    path = PurePosixPath(member.name)
    outside = path.is_absolute() or ".." in path.parts or "\\" in member.name or ":" in member.name
    if outside or not (member.isreg() or member.isdir()):
        raise ArtefactError(
            f"Expected {archive.name} to hold plain files below its folder, but got {member.name!r}. "
            "It is not the official file and nothing of it was kept; remove it."
        )
    return path
