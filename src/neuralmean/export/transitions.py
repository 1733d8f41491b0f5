"""Average pooling behind a convolution of one position as a single convolution with a stride, in an ONNX graph.

Dense networks have such a pair between their blocks. The mean of what a convolution makes of a few positions is what it makes of
their mean: with a k-th part of its weights at each of k positions one convolution does both, in as many multiplications as the
first took alone. A runtime that has left the layout of its convolutions by then takes longer for the pooling than for either.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from neuralmean.export.onnx_graph import Chain, Graph, option, pads_nothing

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def stride_poolings(model: ModelProto) -> None:
    """Take average pooling into the convolution of one position before it, in place.

    Only where nobody else looks at what lies between, and not where the runtime holds it in blocks of channels: pooling is quick
    there.
    """
    graph = Graph(model.graph)
    for pool in [node for node in model.graph.node if node.op_type == "AveragePool"]:
        conv = graph.makers.get(pool.input[0])
        kernel = option(pool, "kernel_shape", ())
        if conv is None or not _is_of_one_position(graph, conv) or not _is_in_tiles(pool, kernel):
            continue
        if graph.uses[pool.input[0]] > 1 or graph.is_blocked(conv.output[0]):
            continue
        weight = np.asarray(graph.constant(conv.input[1]), np.float64) / math.prod(kernel)
        spread = np.broadcast_to(weight, (*weight.shape[:2], *kernel)).astype(np.float32)
        chain = Chain(graph, pool)
        group = option(conv, "group", 1)
        source, bias = conv.input[0], list(conv.input[2:])
        name = graph.add_constant(f"{pool.output[0]}_neuralmean_weight", spread)
        chain.add("Conv", [source, name, *bias], group=group, kernel_shape=kernel, strides=kernel)
        chain.replace(pool)
        graph.proto.node.remove(conv)
        graph.forget(conv.output)
    graph.drop_unused()


def _is_of_one_position(graph: Graph, conv: NodeProto) -> bool:
    """Whether a node is a convolution with constant weights that looks at each position by itself."""
    weight = graph.constant(conv.input[1]) if conv.op_type == "Conv" else None
    return (
        weight is not None
        and weight.dtype == np.float32
        and set(weight.shape[2:]) == {1}
        and set(option(conv, "strides", [1])) == {1}
        and pads_nothing(conv)
    )


def _is_in_tiles(pool: NodeProto, kernel: list[int]) -> bool:
    """Whether a node takes the means of tiles that lie side by side and are whole."""
    return (
        option(pool, "strides", [1] * len(kernel)) == kernel
        and set(option(pool, "dilations", [1])) == {1}
        and not option(pool, "ceil_mode", 0)
        and pads_nothing(pool)
    )
