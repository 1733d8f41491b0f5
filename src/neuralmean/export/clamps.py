"""Batch norms and the ReLUs behind them as one comparison, in an ONNX graph.

Dense networks normalise before they convolve, where no convolution can take the norm in: norm and ReLU are two operations over
all that came before. With what the norm multiplies a channel by, s, and then adds, b,

    relu(s x + b) = s max(x, -b / s) + b    for s > 0, and with min in place of max for s < 0.

The next convolution takes s into its weights and b into its bias, and a comparison with constants is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from neuralmean.export.onnx_graph import Chain, Graph, option, pads_nothing

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

NEGLIGIBLE = 1e-12
"""A channel with |s| of at most this times |b| is constant: s x is below the last digit of b for any |x| up to 50,000.

The formula holds its digits for every other: single precision has -b / s up to 1e12, and s times that is as exact as b.
"""


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
            _replace(graph, norm, relu, conv, _to_clamp(*affine))
    graph.drop_unused()


@dataclass(frozen=True)
class _Clamp:
    """A norm with its ReLU as `scale * min(max(x, lower), upper) + shift`, (C,) each."""

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]
    scale: NDArray[np.float64]
    shift: NDArray[np.float64]


def _to_clamp(scale: NDArray[np.float64], shift: NDArray[np.float64]) -> _Clamp:
    """Return relu(scale * x + shift) as a comparison; a constant channel is its constant, and its x anything finite."""
    is_constant = np.abs(scale) <= NEGLIGIBLE * np.abs(shift)
    bound = -shift / np.where(is_constant, 1, scale)
    return _Clamp(
        lower=np.select([is_constant, scale > 0], [0, bound], -np.inf),
        upper=np.select([is_constant, scale < 0], [0, bound], np.inf),
        scale=np.where(is_constant, 0, scale),
        shift=np.where(is_constant, np.maximum(shift, 0), shift),
    )


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


def _replace(graph: Graph, norm: NodeProto, relu: NodeProto, conv: NodeProto, clamp: _Clamp) -> None:
    weight, *biases = (np.asarray(graph.constant(name), np.float64) for name in conv.input[1:])
    shape = (-1, *[1] * (weight.ndim - 2))  # (C, 1, 1) for images
    bias = sum(biases) + (weight * clamp.shift.reshape(shape)).sum(axis=tuple(range(1, weight.ndim)))
    name = f"{conv.output[0]}_neuralmean"
    del conv.input[1:]  # and no constant is changed, as others may use it too
    for part, values in (("weight", weight * clamp.scale.reshape(shape)), ("bias", bias)):
        conv.input.append(graph.add_constant(f"{name}_{part}", values.astype(np.float32)))

    chain = Chain(graph, relu)
    source, falls = norm.input[0], bool(np.any(clamp.scale < 0))
    if np.any(clamp.scale > 0) or not falls:
        source = chain.add("Max", [source], clamp.lower.reshape(1, *shape).astype(np.float32))
    if falls:
        chain.add("Min", [source], clamp.upper.reshape(1, *shape).astype(np.float32))
    chain.replace(relu)
    graph.proto.node.remove(norm)
    graph.forget(norm.output)
