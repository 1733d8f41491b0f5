"""Additions and ReLUs of residual networks as one operation, in an ONNX graph.

A runtime takes an addition and the ReLU behind it into the convolution before them, unless somebody else looks at what that
convolution makes: a mean, in our graphs. They are two operations of their own then. If the other summand goes through a
convolution that changes nothing, that one takes both in: one operation, and the same numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from neuralmean.export.onnx_graph import Chain, Graph

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def convolve_additions(model: ModelProto) -> None:
    """Put a convolution with ones before additions that no convolution takes in, in place.

    Only before those of two activations in blocks of channels: to bring others there and back takes longer than it saves.
    """
    graph = Graph(model.graph)
    ones: dict[int, str] = {}
    for add in [node for node in model.graph.node if node.op_type == "Add"]:
        if not _is_alone(graph, add):
            continue
        kept, convolved = sorted(add.input, key=lambda name: graph.makers[name].op_type != "Conv")
        channels = graph.channels(convolved)
        if channels not in ones:
            weight = np.ones((channels, 1, 1, 1), np.float32)
            ones[channels] = graph.add_constant(f"{add.output[0]}_neuralmean_ones", weight)
        chain = Chain(graph, add)
        chain.add("Conv", [convolved, ones[channels]], group=channels, kernel_shape=[1, 1])
        chain.add("Add", [kept, chain.end])
        chain.replace(add)


def _is_alone(graph: Graph, add: NodeProto) -> bool:
    """Whether a node adds two activations in blocks for a ReLU, and nothing before it takes it in."""
    user = graph.only_user(add.output[0])
    shapes = [graph.shapes.get(name, ()) for name in add.input]
    return (
        user is not None
        and user.op_type == "Relu"
        and shapes[0] == shapes[1]
        and len(shapes[0]) == 4
        and all(shapes[0][1:])
        and all(graph.is_blocked(name) and not _takes_in(graph, name) for name in add.input)
    )


def _takes_in(graph: Graph, name: str) -> bool:
    """Whether a tensor is made by a convolution, or one with its norm, for one user alone."""
    maker = graph.makers[name]
    while maker.op_type == "BatchNormalization" and graph.uses[name] == 1 and maker.input[0] in graph.makers:
        name = maker.input[0]
        maker = graph.makers[name]
    return maker.op_type == "Conv" and graph.uses[name] == 1
