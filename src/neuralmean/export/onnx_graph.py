"""An ONNX graph with its names looked up, for the modules that rewrite one. It must not change what a graph computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto

# What stays in blocks of channels if all that goes in is, and the number of which the channels must be a multiple.
_KEEPS_BLOCKS = {
    "Add": 8,
    "AveragePool": 16,
    "BatchNormalization": 8,
    "Concat": 16,
    "GlobalAveragePool": 16,
    "MaxPool": 16,
    "Relu": 8,
}


class Graph:
    """An ONNX graph with what its names stand for."""

    def __init__(self, proto: GraphProto) -> None:
        from onnx import TensorProto, numpy_helper

        self.proto = proto
        kinds = {value.name: value.type.tensor_type for value in (*proto.value_info, *proto.input, *proto.output)}
        # Of single precision only: runtimes pool nothing else. A dimension that is not known is 0.
        self.shapes = {
            name: tuple(dim.dim_value for dim in kind.shape.dim)
            for name, kind in kinds.items()
            if kind.elem_type == TensorProto.FLOAT
        }
        self.makers = {name: node for node in proto.node for name in node.output}
        self.uses = Counter(_names_in(proto))
        self._users = {name: node for node in proto.node for name in node.input}
        self._tensors = {tensor.name: tensor for tensor in proto.initializer}
        self._to_array = numpy_helper.to_array

    def constant(self, name: str) -> NDArray[np.generic] | None:
        """Return the values of a constant; None for what is no constant."""
        return self._to_array(self._tensors[name]) if name in self._tensors else None

    def add_constant(self, name: str, values: NDArray[np.generic]) -> str:
        """Add a constant and return its name."""
        from onnx import numpy_helper

        self.proto.initializer.append(numpy_helper.from_array(values, name))
        self._tensors[name] = self.proto.initializer[-1]
        return name

    def only_user(self, name: str) -> NodeProto | None:
        """Return the node that uses a tensor if nothing else does: no other node, no graph in one, nor is it returned."""
        return self._users.get(name) if self.uses[name] == 1 else None

    def affine(self, norm: NodeProto) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return what a batch norm multiplies channels by and then adds, (C,) each; None if these are no constants."""
        values = [self.constant(name) for name in norm.input[1:]]
        if any(value is None for value in values) or option(norm, "training_mode", 0):
            return None
        gamma, beta, mean, variance = (np.asarray(value, np.float64) for value in values)
        scale = gamma / np.sqrt(variance + option(norm, "epsilon", 1e-5))
        return scale, beta - mean * scale

    def forget(self, names: Iterable[str]) -> None:
        """Drop what is known of the shapes of tensors that have another now."""
        dropped = set(names)
        for value in [value for value in self.proto.value_info if value.name in dropped]:
            self.proto.value_info.remove(value)

    def drop_unused(self) -> None:
        """Remove the constants that nobody uses, of which runtimes warn."""
        used = set(_names_in(self.proto))
        for index in reversed(range(len(self.proto.initializer))):
            if self.proto.initializer[index].name not in used:
                del self.proto.initializer[index]

    def is_over_positions(self, node: NodeProto, *, keeps: bool) -> bool:
        """Whether a node is the mean over all dimensions behind batch and channels, and keeps or drops them."""
        if node.op_type != "ReduceMean" or len(node.input) != 2:
            return False
        axes, rank = self.constant(node.input[1]), len(self.shapes.get(node.input[0], ()))
        kept = option(node, "keepdims", 1)
        over = sorted(int(axis) % rank for axis in axes) if axes is not None and rank > 2 else []
        return bool(over) and over == list(range(2, rank)) and bool(kept) == keeps

    def parts(self, name: str) -> list[str]:
        """Return the tensors that are side by side in one, in order; only itself if it is in one piece."""
        maker = self.makers.get(name)
        if not is_join(maker) or not all(self.channels(part) for part in maker.input):
            return [name]
        return [leaf for part in maker.input for leaf in self.parts(part)]

    def is_blocked(self, name: str) -> bool:
        """Whether a runtime is likely to hold an activation in blocks of channels, the layout of its convolutions.

        onnxruntime does so with what a convolution makes if the channels before and behind it can be cut so, and with what
        ReLUs, norms, additions, pooling and joins make of that.
        """
        return name in self._blocked

    def stays_blocked(self, name: str, kind: str) -> bool:
        """Whether what an operation of some kind makes of an activation is likely to be in blocks too."""
        return self._stay_blocked([name], kind, self._blocked)

    def _stay_blocked(self, names: Iterable[str], kind: str, blocked: set[str]) -> bool:
        size = _KEEPS_BLOCKS.get(kind)
        return size is not None and all(name in blocked and self.channels(name) % size == 0 for name in names)

    def channels(self, name: str) -> int:
        """Return how many channels an activation has; 0 if that is not known."""
        shape = self.shapes.get(name, ())
        return shape[1] if len(shape) > 1 else 0

    @cached_property
    def _blocked(self) -> set[str]:
        blocked: set[str] = set()
        for node in self.proto.node:  # what makes a tensor comes before what uses it
            if node.op_type == "Conv":
                before = self.channels(node.input[0])
                is_blocked = self.channels(node.output[0]) % 8 == 0 and (before % 4 == 0 or before < 8)
            else:
                names = node.input[:1] if node.op_type == "BatchNormalization" else node.input
                is_other = node.op_type == "Concat" and not is_join(node)
                is_blocked = not is_other and self._stay_blocked(names, node.op_type, blocked)
            if is_blocked:
                blocked.add(node.output[0])
        return blocked


class Chain:
    """New nodes in place of an old one.

    Args:
        graph: Where they go.
        node: The old one; names are made from its output's.
    """

    def __init__(self, graph: Graph, node: NodeProto) -> None:
        self._graph = graph
        self._name = node.output[0]
        self._nodes: list[NodeProto] = []

    @property
    def end(self) -> str:
        """The output of the newest node."""
        return str(self._nodes[-1].output[0])

    def add(self, kind: str, inputs: Sequence[str], constant: NDArray[np.generic] | None = None, **options: Any) -> str:
        """Add a node, whose last input may be a constant, and return the name of its output."""
        from onnx import helper

        name = f"{self._name}_neuralmean_{len(self._nodes)}"
        if constant is not None:
            inputs = [*inputs, self._graph.add_constant(f"{name}_constant", constant)]
        self._nodes.append(helper.make_node(kind, inputs, [name], **options))
        return name

    def replace(self, node: NodeProto) -> None:
        """Put the new nodes where the old one was; the newest gives what it gave."""
        self._nodes[-1].output[0] = node.output[0]
        nodes = self._graph.proto.node
        index = next(index for index, other in enumerate(nodes) if other == node)
        nodes.remove(node)
        for added in reversed(self._nodes):
            nodes.insert(index, added)


def is_join(node: NodeProto | None) -> TypeGuard[NodeProto]:
    """Whether a node puts channels side by side."""
    return node is not None and node.op_type == "Concat" and node.attribute[0].i == 1


def option(node: NodeProto, name: str, default: Any) -> Any:
    """Return an attribute of a node."""
    from onnx import helper

    return next((helper.get_attribute_value(item) for item in node.attribute if item.name == name), default)


def pads_nothing(node: NodeProto) -> bool:
    """Whether a convolution or pooling looks at nothing but what there is."""
    return option(node, "auto_pad", b"NOTSET") in (b"NOTSET", b"VALID") and not any(option(node, "pads", ()))


def _names_in(graph: GraphProto) -> Iterator[str]:
    """Yield what the nodes of a graph and of the graphs in it use, and what it returns."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _names_in(inner)
    yield from (value.name for value in graph.output)
