"""Means of concatenated channels, in a captured graph: the one graph pass of our own.

The layers of a dense network read the concatenation of all that came before. The mean of a concatenation is the concatenation of
the means, so that each activation is read once, however many layers see it. A captured graph has no operations in place: a
tensor stays what it was.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

_aten = torch.ops.aten


def split_means(graph: Graph) -> None:
    """Replace means over the positions of concatenated channels by concatenated means, in place."""
    known: dict[tuple[Node, str], Node] = {}
    for mean in graph.find_nodes(op="call_function", target=_aten.mean.dim):
        whole, dims, *rest = cast(tuple[Any, ...], mean.args)
        if not isinstance(dims, (list, tuple)) or any(dim < 2 for dim in dims) or any(rest):
            continue  # not one that keeps examples and channels, and nothing else
        with graph.inserting_before(mean):
            split = _split(graph, whole, mean, known) if _parts(whole) else known.setdefault((whole, _how(mean)), mean)
        if split is not mean:
            mean.replace_all_uses_with(split)
            graph.erase_node(mean)


def _split(graph: Graph, tensor: Node, mean: Node, known: dict[tuple[Node, str], Node]) -> Node:
    """Return the mean of a tensor, taken as `mean` is: a known one, those of its parts concatenated, or a new one."""
    key = tensor, _how(mean)
    if key not in known:
        parts = [_split(graph, part, mean, known) for part in _parts(tensor)]
        target, args = (_aten.cat.default, (parts, 1)) if parts else (_aten.mean.dim, (tensor, *mean.args[1:]))
        made = known[key] = graph.call_function(target, args, {} if parts else mean.kwargs)
        values = map_arg((made.args, made.kwargs), lambda node: node.meta["val"])
        made.meta["val"] = target(*values[0], **values[1])  # exporters read the shapes
    return known[key]


def _how(mean: Node) -> str:
    return repr((mean.args[1:], mean.kwargs))


def _parts(tensor: Node) -> list[Node]:
    """Return what is concatenated along the channels of a tensor; nothing if it is in one piece."""
    if tensor.target is not _aten.cat.default or tensor.args[1:] != (1,):
        return []
    parts, kinds = list(cast(list[Node], tensor.args[0])), [(tensor.meta["val"].dim(), tensor.meta["val"].dtype)]
    kinds += [(part.meta["val"].dim(), part.meta["val"].dtype) for part in parts]
    return (
        parts if len(set(kinds)) == 1 else []
    )  # an empty tensor of one dimension may be among them, and types may differ
