"""Channel means of an ONNX graph as global average pooling.

To a runtime a `ReduceMean` is one operation of many. A `GlobalAveragePool` is part of what convolutional networks are made of:
onnxruntime runs it in the memory layout of its convolutions, where a `ReduceMean` has each activation brought back first.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


def pool_means(model: ModelProto) -> None:
    """Replace the means over all positions that are joined to one vector, in place; other means stay as they are."""
    from onnx import helper

    graph = model.graph
    ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in (*graph.value_info, *graph.input)}
    axes = _whole_numbers(graph)
    makers = {name: node for node in graph.node for name in node.output}
    uses = Counter(name for node in graph.node for name in node.input)
    uses.update(value.name for value in graph.output)
    for index, join in reversed(list(enumerate(graph.node))):  # from the end, as nodes are added behind
        means = [makers[name] for name in join.input if name in makers and uses[name] == 1]
        if (
            join.op_type != "Concat"
            or join.attribute[0].i != 1
            or len(means) < len(join.input)
            or not all(_is_over_positions(mean, ranks, axes) for mean in means)
        ):
            continue
        for mean in means:
            mean.op_type = "GlobalAveragePool"
            del mean.input[1:], mean.attribute[:]
        flat, join.output[0] = join.output[0], f"{join.output[0]}_pooled"
        graph.node.insert(index + 1, helper.make_node("Flatten", [join.output[0]], [flat], axis=1))
        for value in [value for value in graph.value_info if value.name in join.input]:
            graph.value_info.remove(value)  # its shape is another now


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
