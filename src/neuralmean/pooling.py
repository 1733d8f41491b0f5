"""Channel means of an ONNX graph as global average pooling, and no larger than they must be.

To a runtime a `ReduceMean` is one operation of many. A `GlobalAveragePool` is part of what convolutional networks are made of:
onnxruntime runs it in the memory layout of its convolutions, where a `ReduceMean` has each activation brought back first.

The mean of tensors side by side is their means side by side, and each is taken once: in a dense network, where every layer sees
all that came before, little is left to be read. To get at them a batch norm, which a mean may as well go through first, is
passed.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


def pool_means(model: ModelProto) -> None:
    """Replace the means over all positions that are joined to one vector, in place; other means stay as they are."""
    from onnx import TensorProto, helper

    graph = model.graph
    kinds = {value.name: value.type.tensor_type for value in (*graph.value_info, *graph.input)}
    # Runtimes pool numbers of single precision only.
    ranks = {name: len(kind.shape.dim) for name, kind in kinds.items() if kind.elem_type == TensorProto.FLOAT}
    axes = _whole_numbers(graph)
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    for index, join in reversed(list(enumerate(graph.node))):  # from the end, as nodes are added behind
        means = [makers[name] for name in join.input if name in makers and uses[name] == 1]
        if (
            not _is_join(join)
            or len(means) < len(join.input)
            or not all(_is_over_positions(mean, ranks, axes) for mean in means)
        ):
            continue
        for mean in means:
            mean.op_type = "GlobalAveragePool"
            del mean.input[1:], mean.attribute[:]
        flat, join.output[0] = join.output[0], f"{join.output[0]}_neuralmean"
        graph.node.insert(index + 1, helper.make_node("Flatten", [join.output[0]], [flat], axis=1))
        for value in [value for value in graph.value_info if value.name in join.input]:
            graph.value_info.remove(value)  # its shape is another now


def split_pools(model: ModelProto) -> None:
    """Pool what was put side by side part by part, each part once, in place."""
    from onnx import GraphProto, helper

    graph = model.graph
    makers = {name: node for node in graph.node for name in node.output}
    pools: dict[str, str] = {}  # what was pooled, and what it became
    nodes: list[NodeProto] = []

    def pool(name: str, into: str | None = None) -> str:
        if into is None and name in pools:
            return pools[name]
        maker, result = makers.get(name), into or f"{name}_neuralmean"
        if _is_join(maker):
            nodes.append(helper.make_node("Concat", [pool(part) for part in maker.input], [result], axis=1))
        elif maker is not None and maker.op_type == "BatchNormalization" and _is_join(makers.get(maker.input[0])):
            norm = helper.make_node("BatchNormalization", [pool(maker.input[0]), *maker.input[1:]], [result])
            norm.attribute.extend(maker.attribute)
            nodes.append(norm)
        else:
            nodes.append(helper.make_node("GlobalAveragePool", [name], [result]))
        return pools.setdefault(name, result)

    for node in graph.node:
        if node.op_type == "GlobalAveragePool":
            pool(node.input[0], into=node.output[0])
        else:
            nodes.append(node)
    made = GraphProto(node=nodes)  # holds copies
    del graph.node[:]
    graph.node.extend(made.node)


def _is_join(node: NodeProto | None) -> TypeGuard[NodeProto]:
    """Whether a node puts channels side by side."""
    return node is not None and node.op_type == "Concat" and node.attribute[0].i == 1


def _is_over_positions(node: NodeProto, ranks: dict[str, int], axes: dict[str, list[int]]) -> bool:
    """Whether a node is the mean over all dimensions behind batch and channels, which it drops."""
    if node.op_type != "ReduceMean" or len(node.input) != 2:
        return False
    rank = ranks.get(node.input[0], 0)
    keeps = next((attribute.i for attribute in node.attribute if attribute.name == "keepdims"), 1)
    over = sorted(axis % rank for axis in axes.get(node.input[1], [])) if rank > 2 else []
    return bool(over) and over == list(range(2, rank)) and not keeps


def _whole_numbers(graph: GraphProto) -> dict[str, list[int]]:
    """Return the constants of a graph that are lists of whole numbers, by name."""
    from onnx import TensorProto, numpy_helper

    lists = (tensor for tensor in graph.initializer if tensor.data_type == TensorProto.INT64 and len(tensor.dims) == 1)
    return {tensor.name: numpy_helper.to_array(tensor).tolist() for tensor in lists}
