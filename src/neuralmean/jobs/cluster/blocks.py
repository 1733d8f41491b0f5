"""Datasets of Ray: blocks stay in place, and a chunk names the rows that it covers.

Chunks are counted over the rows of the dataset in order, whatever the blocks are: the number of blocks depends on
the cluster, and the composition of a forward pass must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from neuralmean.jobs.cluster.extras import import_extra
from neuralmean.jobs.cluster.parquet import image_column, images_of, names_of
from neuralmean.jobs.cluster.pieces import Item, stretches


@dataclass(frozen=True)
class BlockRows:
    """Some rows of a dataset, `first` being the number of the first; `slices` are (block, begin, end) that hold them."""

    first: int
    places: tuple[int, ...]  # counted from `first`
    slices: tuple[tuple[Any, int, int], ...]
    column: str | None

    @property
    def names(self) -> list[str]:
        """The value of the column `path` or `__key__`, else `#` and the number of the row."""
        named: list[str] = []
        for table in self._tables():
            own = names_of(table)
            begin = self.first + len(named)
            named.extend(own if own is not None else [f"#{begin + row}" for row in range(table.num_rows)])
        return [named[place] for place in self.places]

    def items(self) -> Iterator[Item]:
        """Yield one image after the other."""
        wanted, begin = set(self.places), 0
        for table in self._tables():
            column = table.column(image_column(table.schema, self.column, "the dataset"))
            for values in column.chunks:
                for place, item in enumerate(images_of(values), begin):
                    if place in wanted:
                        yield item
                begin += len(values)

    def select(self, places: Sequence[int]) -> BlockRows:
        """Return some of the rows."""
        return BlockRows(self.first, tuple(self.places[place] for place in places), self.slices, self.column)

    def describe(self) -> Any:
        """Return the numbers of the rows: the content of a dataset is only known when it is read."""
        return ["dataset", self.column, self.first, list(stretches(self.places))]

    def _tables(self) -> Iterator[Any]:
        ray, pyarrow = import_extra("ray"), import_extra("pyarrow")
        for block, begin, end in self.slices:
            table = ray.get(block)
            if not isinstance(table, pyarrow.Table):
                table = pyarrow.Table.from_pandas(table)
            yield table.slice(begin, end - begin)


def is_dataset(source: object) -> bool:
    """Return whether `source` is a `ray.data.Dataset`, without importing Ray."""
    return any(kind.__module__.startswith("ray.data") and kind.__name__ == "Dataset" for kind in type(source).__mro__)


def list_blocks(dataset: Any, column: str | None, limit: int, start: int = 0) -> Iterator[BlockRows]:
    """Yield the rows of a dataset in pieces of exactly `limit` (except the last), in its own order, as Ray produces them."""
    dataset.context.execution_options.preserve_order = True
    slices: list[tuple[Any, int, int]] = []
    held = 0
    for block, begin, stop in _blocks(dataset):
        while begin < stop:
            end = min(stop, begin + limit - held)
            slices.append((block, begin, end))
            held, begin = held + end - begin, end
            if held == limit:
                yield BlockRows(start, tuple(range(held)), tuple(slices), column)
                start, held, slices = start + held, 0, []
    if held:
        yield BlockRows(start, tuple(range(held)), tuple(slices), column)


def _blocks(dataset: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield each block with the rows of it that belong to the dataset."""
    for bundle in dataset.iter_internal_ref_bundles():
        cuts = getattr(bundle, "slices", None) or [None] * len(bundle.blocks)
        for entry, cut in zip(bundle.blocks, cuts, strict=True):
            # Up to Ray 2.5x an entry was a plain pair.
            block, metadata = entry if isinstance(entry, tuple) else (entry.ref, entry.metadata)
            yield block, *((0, metadata.num_rows) if cut is None else (cut.start_offset, cut.end_offset))
