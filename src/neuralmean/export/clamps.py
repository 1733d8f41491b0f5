"""Batch norms and the ReLUs behind them as one comparison, in an ONNX graph.

See `neuralmean.export.clamping` for the numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from neuralmean.export.clamping import Clamp, to_clamp
from neuralmean.export.onnx_graph import Chain, Graph, option, pads_nothing

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def clamp_norms(model: ModelProto) -> None:
    """Replace norms in front of a ReLU in front of a convolution by comparisons, in place.

    Only where nobody else looks at what norm and ReLU make, and the convolution pads nothing: a constant that is added before it
    is one behind it only then. Not where the runtime holds the activation in blocks of channels: it runs norm and ReLU as one
    operation there, and would leave the blocks for a comparison. To be called when means are pooled, as these look at norms.
    """
    graph = Graph(model.graph)
    for norm in [node for node in model.graph.node if node.op_type == "BatchNormalization"]:
        relu = graph.only_user(norm.output[0])
        conv = graph.only_user(relu.output[0]) if relu is not None and relu.op_type == "Relu" else None
        affine = graph.affine(norm)
        if relu is None or conv is None or affine is None or len(norm.output) > 1:
            continue
        if _takes_constants(graph, conv, relu.output[0]) and not graph.is_blocked(norm.input[0]):
            _replace(graph, norm, relu, conv, to_clamp(*affine))
    graph.drop_unused()


def _takes_constants(graph: Graph, conv: NodeProto, name: str) -> bool:
    """Whether a node is a convolution of a tensor that can take in what is multiplied by and added to each channel."""
    rank = len(graph.shapes.get(name, ()))
    return (
        conv.op_type == "Conv"
        and conv.input[0] == name
        and rank > 2
        and option(conv, "group", 1) == 1
        and pads_nothing(conv)
        and all(graph.constant(constant) is not None for constant in conv.input[1:])
    )


def _replace(graph: Graph, norm: NodeProto, relu: NodeProto, conv: NodeProto, clamp: Clamp) -> None:
    weight, *biases = (np.asarray(graph.constant(name), np.float64) for name in conv.input[1:])
    shape = (1, -1, *[1] * (weight.ndim - 2))  # (1, C, 1, 1) for images
    name = f"{conv.output[0]}_neuralmean"
    del conv.input[1:]  # and no constant is changed, as others may use it too
    for part, values in zip(("weight", "bias"), clamp.into(weight, biases[0] if biases else None), strict=True):
        conv.input.append(graph.add_constant(f"{name}_{part}", values.astype(np.float32)))

    chain = Chain(graph, relu)
    source = norm.input[0]
    if clamp.rises or not clamp.falls:
        source = chain.add("Max", [source], clamp.lower.reshape(shape).astype(np.float32))
    if clamp.falls:
        chain.add("Min", [source], clamp.upper.reshape(shape).astype(np.float32))
    chain.replace(relu)
    graph.proto.node.remove(norm)
    graph.forget(norm.output)
