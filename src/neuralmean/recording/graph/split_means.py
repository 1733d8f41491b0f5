"""Means of channels side by side, in a graph that torch's compiler is about to compile.

The layers of a dense network see all that came before, side by side. The mean of tensors side by side is their means side by
side: with this each activation is read once, however many layers see it. The graph has no operations in place any more by
then, so that a tensor is what it was.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node

_aten = torch.ops.aten


def split_means(graph: Graph) -> None:
    """Take the means over positions of tensors that are side by side one by one, in place."""
    known: dict[tuple[Node, str], Node] = {}
    for mean in graph.find_nodes(op="call_function", target=_aten.mean.dim):
        whole = cast(Node, mean.args[0])
        if not _is_over_positions(mean):
            continue
        if not _parts(whole):
            known.setdefault((whole, _how(mean)), mean)
            continue
        with graph.inserting_before(mean):
            mean.replace_all_uses_with(_split(graph, whole, mean, known))
        graph.erase_node(mean)


def _split(graph: Graph, tensor: Node, mean: Node, known: dict[tuple[Node, str], Node]) -> Node:
    """Return the mean of a tensor, taken as `mean` is: a known one, those of its parts side by side, or a new one."""
    key = tensor, _how(mean)
    if key not in known:
        parts = [_split(graph, part, mean, known) for part in _parts(tensor)]
        known[key] = (
            graph.call_function(_aten.cat.default, (parts, 1))
            if parts
            else graph.call_function(_aten.mean.dim, (tensor, *mean.args[1:]), mean.kwargs)
        )
    return known[key]


def _how(mean: Node) -> str:
    return repr((mean.args[1:], mean.kwargs))


def _is_over_positions(mean: Node) -> bool:
    """Whether a mean keeps examples and channels, and nothing else."""
    _, dims, *rest = cast(tuple[Any, ...], mean.args)
    return isinstance(dims, (list, tuple)) and all(dim >= 2 for dim in dims) and not any(rest)


def _parts(tensor: Node) -> list[Node]:
    """Return what is side by side in a tensor, along the channels; nothing if it is in one piece."""
    if tensor.target is not _aten.cat.default or tensor.args[1:] != (1,):
        return []
    parts = list(cast(list[Node], tensor.args[0]))
    # Nothing at all, of one dimension, may be beside anything; and types may differ.
    return parts if all(_kind(part) == _kind(tensor) for part in parts) else []


def _kind(tensor: Node) -> tuple[int, torch.dtype]:
    value = tensor.meta["val"]
    return value.dim(), value.dtype
