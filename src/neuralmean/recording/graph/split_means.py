"""Splits means of concatenated channels in a captured graph: our only graph pass.

The layers of a dense network read the concatenation of all earlier outputs. The mean of a concatenation is the
concatenation of the means, so each activation needs to be averaged only once, however many layers read it. A captured
graph has no in-place operations, so tensors never change.
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
            continue  # not a mean over all positions
        with graph.inserting_before(mean):
            split = _split(graph, whole, mean, known) if _parts(whole) else known.setdefault((whole, _how(mean)), mean)
        if split is not mean:
            mean.replace_all_uses_with(split)
            graph.erase_node(mean)


def _split(graph: Graph, tensor: Node, mean: Node, known: dict[tuple[Node, str], Node]) -> Node:
    """Return the mean of a tensor as a node like `mean`: a known node, the concatenated means of its parts, or a new node."""
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
    """Return the tensors that a tensor concatenates along the channels; empty if it is not a concatenation."""
    if tensor.target is not _aten.cat.default or tensor.args[1:] != (1,):
        return []
    parts, kinds = list(cast(list[Node], tensor.args[0])), [(tensor.meta["val"].dim(), tensor.meta["val"].dtype)]
    kinds += [(part.meta["val"].dim(), part.meta["val"].dtype) for part in parts]
    return (
        parts if len(set(kinds)) == 1 else []
    )  # there may be an empty one-dimensional tensor among them, and types may differ
