"""Readable names of layers: many layers are grouped by the stage of the network."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

FEW = 12  # layers that are named one by one
MOST_STAGES = 9


class Stage(NamedTuple):
    """Neighbouring layers with a common name: those from `start` up to, not including, `end`."""

    name: str
    start: int
    end: int


def stages_of(names: Sequence[str]) -> list[Stage]:
    """Return the stages of a network by its layers' dotted names; an empty list if layers are better named one by one.

    The stages are as fine as possible with at most nine of them, and the part that all names begin with is left out.

    Example:
        >>> names = [f"net.layer{stage}.{block}.bn" for stage in (1, 2) for block in range(8)]
        >>> [tuple(stage) for stage in stages_of(names)]
        [('layer1', 0, 8), ('layer2', 8, 16)]
    """
    if len(names) <= FEW:
        return []
    paths = [name.split(".") for name in names]
    skip = _common(paths)
    best: list[Stage] = []
    for depth in range(skip + 1, max(map(len, paths)) + 1):
        found = _group(paths, skip, depth)
        if len(found) > MOST_STAGES:
            break
        best = found
    return best if len(best) > 1 else []


def _common(paths: Sequence[Sequence[str]]) -> int:
    """Return how many leading parts all paths share."""
    return next((i for i, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), 0)


def _group(paths: Sequence[Sequence[str]], skip: int, depth: int) -> list[Stage]:
    found, start = [], 0
    for key, members in groupby(".".join(path[skip:depth]) for path in paths):
        end = start + len(list(members))
        found.append(Stage(key, start, end))
        start = end
    return found
