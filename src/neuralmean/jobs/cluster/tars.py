"""WebDataset tars: which images are in them, and their bytes, without unpacking anything to disk.

The driver reads the headers once; a chunk holds the position of each image in the file, and a worker reads just these
bytes. Only plain `.tar` files: a compressed one cannot be read from the middle.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from neuralmean.data.images import Unreadable
from neuralmean.data.images.decode import EXTENSIONS
from neuralmean.jobs.cluster.pieces import Item

MAX_MEMBER_BYTES = 512 * 2**20
_COMPRESSED = "it is compressed or damaged; unpack it to a plain .tar"


@dataclass(frozen=True)
class Member:
    """One image in a tar: its name and where its bytes are."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True)
class TarMembers:
    """Some images of a tar."""

    path: str
    members: tuple[Member, ...]

    @property
    def names(self) -> list[str]:
        """The path of the tar, a slash, and the name inside it."""
        return [f"{self.path}/{member.name}" for member in self.members]

    def items(self) -> Iterator[Item]:
        """Yield the bytes of one image after the other."""
        try:
            with Path(self.path).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                for member in self.members:
                    yield _read(file, member, size)
        except OSError as error:
            while True:
                yield Unreadable("", f"the system reported: {error.strerror or error}")

    def select(self, places: Sequence[int]) -> TarMembers:
        """Return some of the images."""
        return TarMembers(self.path, tuple(self.members[place] for place in places))

    def describe(self) -> Any:
        """Return the path, names and positions."""
        return ["tar", self.path, *([member.name, member.offset, member.size] for member in self.members)]


def list_members(path: str) -> Iterator[Member | Unreadable]:
    """Yield the images of a tar in order; where it is damaged, yield the reason once and stop. Other members are skipped."""
    try:
        end = 0
        with tarfile.open(path, "r:") as archive:
            while (entry := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined] # otherwise it would keep every header
                end = entry.offset_data + entry.size
                if entry.isreg() and PurePosixPath(entry.name).suffix.lower() in EXTENSIONS:
                    yield Member(entry.name, entry.offset_data, entry.size)
        # Every tar ends with empty blocks. Without them `tarfile` stops silently at whatever is the last whole member.
        if Path(path).stat().st_size < end + 2 * tarfile.BLOCKSIZE:
            yield Unreadable(path, "it was cut short: its end mark is missing")
    except tarfile.TarError:
        yield Unreadable(path, _COMPRESSED)
    except (OSError, ValueError, EOFError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        yield Unreadable(path, f"the system reported: {reason}")


def _read(file: Any, member: Member, size: int) -> Item:
    if member.size > MAX_MEMBER_BYTES:
        return Unreadable("", f"it takes {member.size:,} bytes, more than the limit of {MAX_MEMBER_BYTES:,}")
    if member.offset < 0 or member.offset + member.size > size:
        return Unreadable("", "the tar ends before it does")
    file.seek(member.offset)
    data: bytes = file.read(member.size)
    return data if len(data) == member.size else Unreadable("", "the tar ends before it does")
