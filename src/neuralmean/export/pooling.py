"""Channel means of an ONNX graph as global average pooling, and as little of it as does.

To a runtime a `ReduceMean` is one operation of many. A `GlobalAveragePool` is part of what convolutional networks are made of:
onnxruntime runs it in the memory layout of its convolutions, where a `ReduceMean` has each activation brought back first.

The mean of tensors side by side is their means side by side. In a dense network, where every layer sees all that came before,
the last activation of a block therefore holds the means of all others, and is the only one to be pooled. To get at them a
batch norm, which a mean may as well go through afterwards, is passed, unless it is part of the convolution before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from neuralmean.export.onnx_graph import Chain, Graph, is_join

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto


def pool_means(model: ModelProto) -> None:
    """Take the means over all positions of a graph by pooling, in place; other means stay as they are.

    Means that are joined to one vector are taken together, each activation once.
    """
    graph = Graph(model.graph)
    for join in [node for node in model.graph.node if is_join(node)]:
        means = [graph.makers[name] for name in join.input if name in graph.makers and graph.uses[name] == 1]
        if len(means) == len(join.input) and all(graph.is_over_positions(mean, keeps=False) for mean in means):
            _pool_together(graph, join, means)
    for mean in [node for node in model.graph.node if node.op_type == "ReduceMean"]:
        # A mean over the last of three dimensions may be anything, as part of a layer norm.
        if len(graph.shapes.get(mean.input[0], ())) < 4:
            continue
        if graph.is_over_positions(mean, keeps=True):
            _to_pool(mean, mean.input[0])
        elif graph.is_over_positions(mean, keeps=False):
            chain = Chain(graph, mean)
            chain.add("GlobalAveragePool", [mean.input[0]])
            chain.add("Flatten", [chain.end], axis=1)
            chain.replace(mean)
    graph.drop_unused()


@dataclass(frozen=True)
class _Read:
    """A mean as the mean of `source`, times `scale`, plus `shift`, (C,) each."""

    source: str
    scale: NDArray[np.float64]
    shift: NDArray[np.float64]


def _pool_together(graph: Graph, join: NodeProto, means: list[NodeProto]) -> None:
    """Replace means, their join, and the constants they are then multiplied by and added to."""
    if not all(graph.channels(mean.input[0]) for mean in means):
        return
    reads = [_through_norm(graph, mean.input[0]) for mean in means]
    pooled = _choose(graph, [read.source for read in reads])
    pools: dict[str, str] = {}
    for mean, read in zip(means, reads, strict=True):
        if read.source in pooled and read.source not in pools:
            _to_pool(mean, read.source)
            pools[read.source] = mean.output[0]
        else:
            graph.proto.node.remove(mean)
    graph.forget(name for mean in means for name in mean.output)

    scale, shift = (np.concatenate([getattr(read, name) for read in reads]) for name in ("scale", "shift"))
    last, scale, shift = _take_in(graph, join, scale, shift)
    chain = Chain(graph, last)
    are_blocked = {
        name: graph.stays_blocked(name, "GlobalAveragePool") for name in pooled
    }  # one that is not leads all out
    groups = [[name for name in pooled if are_blocked[name] == blocked] for blocked in (True, False)]
    joined = [chain.add("Concat", [pools[name] for name in group], axis=1) for group in groups if group]
    joined = [chain.add("Concat", joined, axis=1)] if len(joined) > 1 else joined
    starts = _starts(graph, [name for group in groups for name in group])
    ranges = [(starts[part], graph.channels(part)) for read in reads for part in graph.parts(read.source)]
    wanted = np.concatenate([np.arange(start, start + length) for start, length in ranges])
    total = sum(map(graph.channels, pooled))
    if wanted.tolist() != list(range(total)):
        size = math.gcd(*(number for pair in ranges for number in pair))  # channels are moved in pieces of that many
        joined = [chain.add("Reshape", joined, np.array([0, total // size, size]))]
        joined = [chain.add("Gather", joined, wanted[::size] // size, axis=1)]
    chain.add("Flatten", joined, axis=1)
    if np.any(scale != 1):
        chain.add("Mul", [chain.end], scale.astype(np.float32))
    if np.any(shift != 0):
        chain.add("Add", [chain.end], shift.astype(np.float32))
    chain.replace(last)


def _choose(graph: Graph, sources: list[str]) -> list[str]:
    """Return the activations to be pooled so that each of those asked for is in one of them."""
    order = {name: index for index, node in enumerate(graph.proto.node) for name in node.output}
    covered: set[str] = set()
    pooled: set[str] = set()
    # What holds others comes behind them.
    for name in sorted(set(sources), key=lambda name: order.get(name, -1), reverse=True):
        if not covered.issuperset(graph.parts(name)):
            pooled.add(name)
            covered.update(graph.parts(name))
    return [name for name in dict.fromkeys(sources) if name in pooled]


def _starts(graph: Graph, pooled: list[str]) -> dict[str, int]:
    """Return where the first channel of each part is when activations are joined."""
    starts: dict[str, int] = {}
    start = 0
    for part in (part for name in pooled for part in graph.parts(name)):
        starts.setdefault(part, start)
        start += graph.channels(part)
    return starts


def _through_norm(graph: Graph, name: str) -> _Read:
    """Return how the mean of what a batch norm makes follows from the mean of what goes in, unless a convolution takes it in."""
    norm, channels = graph.makers.get(name), graph.channels(name)
    if norm is not None and norm.op_type == "BatchNormalization":
        before, affine = graph.makers.get(norm.input[0]), graph.affine(norm)
        if affine is not None and (before is None or before.op_type != "Conv"):
            return _Read(norm.input[0], *affine)
    return _Read(name, np.ones(channels), np.zeros(channels))


def _take_in(
    graph: Graph, node: NodeProto, scale: NDArray[np.float64], shift: NDArray[np.float64]
) -> tuple[NodeProto, NDArray[np.float64], NDArray[np.float64]]:
    """Follow a vector while it is only multiplied by constants and added to them; return the last node and what it comes to."""
    while (user := graph.only_user(node.output[0])) is not None:
        if user.op_type not in ("Mul", "Add", "Sub") or user.input[0] != node.output[0]:
            break
        constant = graph.constant(user.input[1])
        if constant is None or constant.shape not in ((), scale.shape):
            break
        value: NDArray[np.float64] = np.asarray(constant, np.float64)
        if user.op_type == "Mul":
            scale, shift = scale * value, shift * value
        else:
            shift = shift + value if user.op_type == "Add" else shift - value
        graph.proto.node.remove(node)
        graph.forget(node.output)
        node = user
    return node, scale, shift


def _to_pool(mean: NodeProto, source: str) -> None:
    mean.op_type = "GlobalAveragePool"
    del mean.input[:], mean.attribute[:]
    mean.input.append(source)
