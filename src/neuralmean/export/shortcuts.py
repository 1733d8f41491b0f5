"""Shortcuts of residual networks as convolutions, in an ONNX graph.

The residual networks of CIFAR have no weights in their shortcuts: every other position is left out, and channels of zeros are
added. Runtimes keep activations in a layout of their convolutions' and leave it for this, and everything that is added to it
later leaves it too, down to the end of the network. A convolution of one position with ones and zeros does the same, stays in
the layout, and takes the addition in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from neuralmean.export.onnx_graph import Chain, Graph, option

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def convolve_shortcuts(model: ModelProto) -> None:
    """Replace channels of zeros that are added to every n-th position by a convolution, in place."""
    graph = Graph(model.graph)
    for pad in [node for node in model.graph.node if node.op_type == "Pad"]:
        zeros = _added_channels(graph, pad)
        if zeros is None:
            continue
        source, strides, left_out = pad.input[0], [1, 1], []
        while (step := _left_out(graph, source)) is not None:
            node, axis, stride = step
            strides[axis - 2] *= stride
            source = node.input[0]
            left_out.append(node)
        channels = graph.channels(source)
        weight = np.zeros((zeros[0] + channels + zeros[1], channels, 1, 1), np.float32)
        weight[zeros[0] + np.arange(channels), np.arange(channels)] = 1
        chain = Chain(graph, pad)
        chain.add("Conv", [source], weight, kernel_shape=[1, 1], strides=strides)
        chain.replace(pad)
        for node in left_out:
            graph.proto.node.remove(node)
    graph.drop_unused()


def _added_channels(graph: Graph, pad: NodeProto) -> tuple[int, int] | None:
    """Return how many channels of zeros a node adds before and behind an image's; None if it does something else."""
    pads = graph.constant(pad.input[1])
    value = graph.constant(pad.input[2]) if len(pad.input) > 2 and pad.input[2] else np.zeros(())
    if (
        option(pad, "mode", b"constant") != b"constant"
        or pads is None
        or len(pads) != 8
        or value is None
        or np.any(value != 0)
        or len(pad.input) > 3
    ):
        return None
    before, behind = int(pads[1]), int(pads[5])
    is_of_channels = before >= 0 and behind >= 0 and np.count_nonzero(pads) == np.count_nonzero([before, behind])
    return (before, behind) if is_of_channels and graph.channels(pad.input[0]) else None


def _left_out(graph: Graph, name: str) -> tuple[NodeProto, int, int] | None:
    """Return the node that keeps every n-th position of an image, its axis and n, if that is what makes a tensor.

    Only where nobody else looks at the result.
    """
    node = graph.makers.get(name)
    if node is None or node.op_type != "Slice" or graph.uses[name] != 1 or len(node.input) != 5:
        return None
    values = [graph.constant(constant) for constant in node.input[1:]]
    if any(value is None or value.size != 1 for value in values):
        return None
    start, end, axis, step = (int(np.asarray(value).item()) for value in values)
    shape = graph.shapes.get(node.input[0], ())
    is_every = (
        start == 0 and step > 0 and len(shape) == 4 and axis in (2, 3) and end >= shape[axis] > 0 and shape[1] > 0
    )
    return (node, axis, step) if is_every else None
