"""What batch norms divide by, in a graph that torch's compiler is about to compile: worked out once.

The compiler takes the root of a channel's variance, and its reciprocal, anew for every number of an activation, which takes
longer than the rest of the norm. Here that is done ahead, for all norms with much to do. The results are side by side in one
tensor, as the compiler then writes them down. They are the same, bit for bit.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._inductor import config
from torch.fx import Graph, Node

_aten = torch.ops.aten
_MUCH = 1 << 17  # numbers of an activation; with fewer, one more loop takes longer than the roots


def divide_once(graph: Graph) -> None:
    """Work out the divisors of the batch norms ahead of everything else, in place."""
    found = [node for node in graph.find_nodes(op="call_function", target=_aten.reciprocal.default) if _is_scale(node)]
    if len(found) <= config.max_pointwise_cat_inputs:  # the compiler would put these in the loop, too
        return
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        scales = []
        for node in found:
            variance, epsilon = _parts(node)
            root = graph.call_function(
                _aten.sqrt.default, (graph.call_function(_aten.add.Tensor, (variance, epsilon)),)
            )
            scales.append(graph.call_function(_aten.reciprocal.default, (root,)))
        side_by_side, start = graph.call_function(_aten.cat.default, (scales,)), 0
        for node in found:
            end = start + len(_value(node))
            node.replace_all_uses_with(graph.call_function(_aten.slice.Tensor, (side_by_side, 0, start, end)))
            start = end
    for node in found:
        total = cast(Node, cast(Node, node.args[0]).args[0])
        for unused in (node, node.args[0], total):
            if not cast(Node, unused).users:
                graph.erase_node(cast(Node, unused))


def _is_scale(node: Node) -> bool:
    """Whether this is one over the root of a variance that is given, on the way to a large activation."""
    parts = _parts(node)
    if parts is None or not isinstance(parts[0], Node) or parts[0].op != "placeholder" or isinstance(parts[1], Node):
        return False
    value = _value(node)
    return value.dim() == 1 and value.dtype is torch.float32 and value.device.type == "cpu" and _is_used_often(node)


def _parts(node: Node) -> Any:
    """Return variance and epsilon of a divisor, or None if it is none."""
    root = cast(Node, node.args[0])
    if root.target is not _aten.sqrt.default:
        return None
    total = cast(Node, root.args[0])
    return total.args if total.target is _aten.add.Tensor and len(total.args) == 2 and not total.kwargs else None


def _is_used_often(node: Node) -> bool:
    """Whether a divisor meets an activation of many numbers."""
    for user in node.users:
        value = user.meta.get("val")
        if not isinstance(value, Tensor):  # several, or not known
            continue
        count: Any = value.numel()
        if not isinstance(count, int):  # of a compilation for batches of any size: as it was with the one at hand
            count = getattr(count.node, "hint", None) or 0
        is_still_one = count == _value(node).numel()  # on its way: shaped to fit, or multiplied
        if count >= _MUCH or (is_still_one and _is_used_often(user)):
            return True
    return False


def _value(node: Node) -> Tensor:
    return cast(Tensor, node.meta["val"])
