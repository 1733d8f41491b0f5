"""Cuts the inputs of all sources into numbered chunks, on which this subpackage is built.

The inputs of chunk 7 depend on the sources alone, never on the number of workers, so each image always shares its
forward pass with the same others and its score is bit for bit the same. A chunk is done or not done; results are
combined in the order of the numbers. Listing is lazy, in constant memory.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from neuralmean.data.images import Unreadable, find_inputs
from neuralmean.data.images.arrays import ArrayFile
from neuralmean.errors import InputError
from neuralmean.jobs.cluster.blocks import is_dataset, list_blocks
from neuralmean.jobs.cluster.extras import import_extra
from neuralmean.jobs.cluster.parquet import list_rows
from neuralmean.jobs.cluster.pieces import ArrayRows, Closed, Files, Piece
from neuralmean.jobs.cluster.tars import TarMembers, list_members

CHUNK_SIZE = 256


@dataclass(frozen=True)
class Chunk:
    """Inputs that are read, scored and recorded together."""

    number: int
    piece: Piece
    size: int

    def __len__(self) -> int:
        return self.size

    @cached_property
    def key(self) -> str:
        """A key that identifies this chunk, also after a restart."""
        text = json.dumps([self.number, self.size, self.piece.describe()])
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()


class Chunks:
    """The chunks of some sources; can be iterated more than once.

    Args:
        sources: Folders, image files, globs, `.npy`/`.npz`, `.parquet` and `.tar` files (also inside folders, also with
            `{000..099}`), in any mixture; or one `ray.data.Dataset`.
        size: Inputs per chunk. Another size may change scores in the last bits.
        column: The column of images in parquet files and datasets; None looks for one.
        sample: Take only this many inputs, chosen at random (seeded) from all; None takes all.
    """

    def __init__(
        self, sources: Any, *, size: int = CHUNK_SIZE, column: str | None = None, sample: int | None = None
    ) -> None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InputError(f"Expected `chunk_size` to be a positive integer, but got {size!r}.")
        if sample is not None and (isinstance(sample, bool) or not isinstance(sample, int) or sample < 1):
            raise InputError(f"Expected the number of rows to sample to be a positive integer, but got {sample!r}.")
        self._size, self._column, self._sample = size, column, sample
        self._dataset = sources if is_dataset(sources) else None
        self._paths: list[str] = []
        if self._dataset is None:
            named = [sources] if isinstance(sources, (str, Path)) else sources
            if not isinstance(named, Sequence) or not all(isinstance(path, (str, Path)) for path in named):
                raise InputError(
                    f"Expected paths or one ray.data.Dataset to read from, but got {type(sources).__name__}. To mix "
                    "datasets, join them with `union`."
                )
            self._paths = [name for path in named for name in _expand_braces(os.fspath(path))]
            find_inputs(self._paths)  # so that a missing path is an error now

    @property
    def is_dataset(self) -> bool:
        """Whether the source is a dataset of Ray, whose blocks only Ray can read."""
        return self._dataset is not None

    def __iter__(self) -> Iterator[Chunk]:
        pieces = self._pieces() if self._sample is None else self._sampled(self._sample)
        for number, (piece, size) in enumerate(pieces):
            yield Chunk(number, piece, size)

    def count(self) -> int:
        """Count the inputs without opening any; lists everything once more."""
        total = self._count_all()
        return total if self._sample is None else min(total, self._sample)

    def _count_all(self) -> int:
        if self._dataset is not None:
            return int(self._dataset.count())
        return sum(size for _, size in self._pieces())

    def _sampled(self, wanted: int) -> Iterator[tuple[Piece, int]]:
        total = self._count_all()
        if total <= wanted:
            yield from self._pieces()
            return
        rows = iter(sorted(random.Random(0).sample(range(total), wanted)))
        row, begin = next(rows, None), 0
        for piece, size in self._pieces():
            places = []
            while row is not None and row < begin + size:
                places.append(row - begin)
                row = next(rows, None)
            begin += size
            if places:
                yield piece.select(places), len(places)

    def _pieces(self) -> Iterator[tuple[Piece, int]]:
        if self._dataset is not None:
            for block in list_blocks(self._dataset, self._column, self._size):
                yield block, len(block.places)
            return
        files: list[str] = []
        for path, kind, reason in self._found():
            if kind == "image":
                files.append(path)
            if files and (len(files) == self._size or kind != "image"):
                yield Files(tuple(files)), len(files)
                files = []
            if kind == "closed":
                yield Closed(Unreadable(path, reason)), 1
            elif kind != "image":
                yield from self._inside(path, kind)
        if files:
            yield Files(tuple(files)), len(files)

    def _found(self) -> Iterator[tuple[str, str, str]]:
        """Yield path, kind and reason of everything to read, in order."""
        for source in find_inputs(self._paths):
            container = {".parquet": "parquet", ".tar": "tar"}.get(Path(source.path).suffix.lower())
            if container is not None and source.kind != "unreadable" and not Path(source.path).name.startswith("."):
                yield source.path, container, ""
            elif source.kind == "unreadable":
                yield source.path, "closed", source.reason
            elif source.kind != "skipped":
                yield source.path, source.kind, ""

    def _inside(self, path: str, kind: str) -> Iterator[tuple[Piece, int]]:
        if kind == "array":
            yield from self._array(path)
        elif kind == "tar":
            yield from self._tar(path)
        else:
            for part in list_rows(path, self._column, self._size):
                yield (Closed(part), 1) if isinstance(part, Unreadable) else (part, len(part.rows))

    def _array(self, path: str) -> Iterator[tuple[Piece, int]]:
        try:
            with ArrayFile(path) as file:
                total = len(file)
        except InputError as error:
            yield Closed(Unreadable(path, str(error))), 1
            return
        for begin in range(0, total, self._size):
            rows = tuple(range(begin, min(begin + self._size, total)))
            yield ArrayRows(path, rows), len(rows)

    def _tar(self, path: str) -> Iterator[tuple[Piece, int]]:
        listed = list_members(path)
        while part := list(islice(listed, self._size)):
            members = tuple(member for member in part if not isinstance(member, Unreadable))
            if members:
                yield TarMembers(path, members), len(members)
            for note in part:
                if isinstance(note, Unreadable):
                    yield Closed(note), 1


def _expand_braces(name: str) -> list[str]:
    """`data-{000..003}.tar` as WebDataset writes it; a name without braces, or of an existing file, stays unchanged."""
    if "{" not in name or os.path.lexists(name):
        return [name]
    return list(import_extra("braceexpand").braceexpand(name))
