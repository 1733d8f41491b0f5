"""A TorchScript graph arranged for the processor: weights as its kernels want them, and fewer results to write down.

oneDNN, which torch calls for convolutions, wants weights in blocks. They might change, so torch lays them out anew in every pass:
for one image that takes up to half of the time. In a frozen graph weights are constants, and are laid out once. Linear layers go
to oneDNN too. A ReLU or GELU that alone follows such a layer is part of its kernel, and where a sum or a ReLU is the last to look
at its input, it is written in its place. Results are the same but for their last digits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

# What torch calls these has no types that would help: a graph, its nodes and its values are `Any` here.
_CONVOLUTION, _LINEAR = "mkldnn::_convolution_pointwise", "mkldnn::_linear_pointwise"
_WORTH_IT = 1 << 15  # weights of a linear layer; with fewer, calling oneDNN takes longer than the product
_FOLLOWERS = {"aten::relu": "relu", "aten::relu_": "relu", "aten::gelu": "gelu"}  # and what the kernels call them
# Operations whose result shares no memory with anything: what they make may be written to, and what they read is not kept.
_APART = {
    _CONVOLUTION,
    _LINEAR,
    "aten::add",
    "aten::batch_norm",
    "aten::cat",
    "aten::layer_norm",
    "aten::mean",
    "aten::relu",
    "aten::sum",
}


def can_pack() -> bool:
    """Whether torch was built with the kernels, and may use them."""
    return torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()  # type: ignore[no-untyped-call]


def inputs_of_convolutions(graph: Any) -> list[list[int] | None]:
    """Return the shape of what each convolution of a graph that was just traced looked at; None if that is not known."""
    return [node.inputsAt(0).type().sizes() for node in graph.findAllNodes("aten::_convolution")]


def pack(graph: Any, shapes: Sequence[Sequence[int] | None]) -> None:
    """Arrange a frozen graph, in place.

    Args:
        graph: A `torch._C.Graph` without control flow, in float32, which will run without gradients.
        shapes: Of what each convolution will look at. The blocks depend on it, and those for one row may be very slow with
            several, and the other way round: for these there should be a graph each.
    """
    convolutions = graph.findAllNodes("aten::_convolution")
    if len(convolutions) == len(shapes):  # none was taken out when the graph was frozen
        for node, shape in zip(convolutions, shapes, strict=True):
            if shape is not None and len(shape) == 4:
                _pack_convolution(graph, node, shape)
    for node in graph.findAllNodes("aten::linear"):
        _pack_linear(graph, node)
    _write_in_place(graph)
    torch._C._jit_pass_dce(graph)  # the weights as they were


def _pack_convolution(graph: Any, node: Any, shape: Sequence[int]) -> None:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = list(node.inputs())[:9]
    known = weight.toIValue()
    is_single = shape[2:] == [1, 1]  # a matrix product, which torch does better
    if known is None or known.dtype is not torch.float32 or transposed.toIValue() is not False or is_single:
        return
    values = [value.toIValue() for value in (padding, stride, dilation, groups)]
    packed = torch.ops.mkldnn._reorder_convolution_weight(known, *values, shape)
    _replace(graph, node, _CONVOLUTION, x, packed, [bias, padding, stride, dilation, groups])


def _pack_linear(graph: Any, node: Any) -> None:
    x, weight, bias = node.inputs()
    known = weight.toIValue()
    if known is not None and known.dtype is torch.float32 and known.numel() >= _WORTH_IT:
        _replace(graph, node, _LINEAR, x, torch.ops.mkldnn._reorder_linear_weight(known), [bias])


def _replace(graph: Any, node: Any, kind: str, x: Any, packed: Tensor, others: list[Any]) -> None:
    """Put a layer with packed weights where `node` is, and whatever alone follows it, if the kernel can do that too."""
    uses = [use.user for use in node.output().uses()]
    last = uses[0] if len(uses) == 1 and uses[0].kind() in _FOLLOWERS else node
    name, algorithm = _FOLLOWERS.get(last.kind(), "none"), ""
    if name == "gelu":
        algorithm = list(last.inputs())[1].toIValue()
    graph.setInsertPoint(node)
    put = partial(_put, graph, node)
    weight = put("prim::ConstantMKLDNNTensor", [], lambda made: made.t_("value", packed))
    no_numbers = put("prim::ListConstruct", [], _of_numbers)
    text = [graph.insertConstant(name), no_numbers, graph.insertConstant(algorithm)]
    last.output().replaceAllUsesWith(put(kind, [x, weight, *others, *text]))
    if last is not node:
        last.destroy()
    node.destroy()


def _put(graph: Any, before: Any, kind: str, inputs: list[Any], finish: Callable[[Any], object] | None = None) -> Any:
    """Put an operation before another one, and return its result."""
    made = graph.create(kind, inputs, 1)
    if finish is not None:
        finish(made)
    made.insertBefore(before)
    return made.output()


def _of_numbers(empty_list: Any) -> None:
    empty_list.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))


def _write_in_place(graph: Any) -> None:
    """Have sums and ReLUs write where their input lies, where they are the last to look at it."""
    nodes = list(graph.nodes())
    place = {value.debugName(): index for index, node in enumerate(nodes) for value in node.outputs()}
    free = {value.debugName() for node in nodes if node.kind() in _APART for value in node.outputs()}

    def is_over(value: Any, index: int) -> bool:
        """Whether operation `index` is the last to look at a value, nothing else shares its memory, and it looks once."""
        users = [use.user for use in value.uses()]
        places = [place[user.output().debugName()] if user.kind() in _APART else len(nodes) for user in users]
        return value.debugName() in free and max(places) == index and places.count(index) == 1

    for index, node in enumerate(nodes):
        inputs = list(node.inputs())
        if node.kind() == "aten::relu" and is_over(inputs[0], index):
            made = _put(graph, node, "aten::relu_", inputs)
        elif node.kind() == "aten::add" and is_over(inputs[0], index):
            made = _put(graph, node, "aten::add_", inputs)
        elif node.kind() == "aten::add" and is_over(inputs[1], index) and inputs[2].toIValue() == 1:
            made = _put(graph, node, "aten::add_", [inputs[1], inputs[0], inputs[2]])
        else:
            continue
        node.output().replaceAllUsesWith(made)
        node.destroy()
        place[made.debugName()] = index
        free.add(made.debugName())
