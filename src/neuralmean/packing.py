"""A TorchScript graph arranged for the processor: weights as its kernels want them, and fewer results to write down.

oneDNN, which torch calls for convolutions, wants weights in blocks. They might change, so torch lays them out anew in every pass:
for one image that takes up to half of the time. In a frozen graph weights are constants, and are laid out once. Linear layers go
to oneDNN too. A GELU that alone follows a linear layer is part of its kernel (a ReLU is not: oneDNN's makes 0 of NaN, which must
be seen), and where a sum or a ReLU is the last to look at its input, it is written in its place. Results are the same but for
their last digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# What torch calls these has no types that would help: a graph, its nodes and its values are `Any` here.
_CONVOLUTION, _LINEAR = "mkldnn::_convolution_pointwise", "mkldnn::_linear_pointwise"
_WORTH_IT = 1 << 15  # weights of a linear layer; with fewer, calling oneDNN takes longer than the product
# Operations whose result shares no memory with anything: what they make may be written to, and what they read is not kept.
_APART = {
    _CONVOLUTION,
    _LINEAR,
    "aten::add",
    "aten::addcmul",
    "aten::batch_norm",
    "aten::cat",
    "aten::clamp",
    "aten::clamp_min",
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


def pack(graph: Any, shapes: Sequence[Sequence[int] | None], *, in_place: bool = True) -> None:
    """Arrange a frozen graph; the graph itself is changed.

    Args:
        graph: A `torch._C.Graph` without control flow, in float32, which will run without gradients.
        shapes: Of what each convolution will look at. The blocks depend on it, and those for one row may be very slow with
            several, and the other way round: for these there should be a graph each.
        in_place: Whether results may be written over inputs. A sum whose first input is the smaller one then fails.
    """
    convolutions = graph.findAllNodes("aten::_convolution")
    if len(convolutions) == len(shapes):  # none was taken out when the graph was frozen
        for node, shape in zip(convolutions, shapes, strict=True):
            if shape is not None and len(shape) == 4:
                _pack_convolution(graph, node, shape)
    for node in graph.findAllNodes("aten::linear"):
        _pack_linear(graph, node)
    if in_place:
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
    _replace(graph, node, _CONVOLUTION, [x, packed, bias, padding, stride, dilation, groups, "none"])


def _pack_linear(graph: Any, node: Any) -> None:
    x, weight, bias = node.inputs()
    known = weight.toIValue()
    if known is None or known.dtype is not torch.float32 or known.numel() < _WORTH_IT:
        return
    packed, users = torch.ops.mkldnn._reorder_linear_weight(known), [use.user for use in node.output().uses()]
    if len(users) == 1 and users[0].kind() == "aten::gelu":
        gelu = users[0]
        approximation = list(gelu.inputs())[1].toIValue()
        gelu.output().replaceAllUsesWith(node.output())
        gelu.destroy()
        _replace(graph, node, _LINEAR, [x, packed, bias, "gelu"], approximation)
    else:
        _replace(graph, node, _LINEAR, [x, packed, bias, "none"])


def _replace(graph: Any, node: Any, kind: str, inputs: list[Any], algorithm: str = "") -> None:
    """Put an operation of oneDNN's where `node` is; of its inputs, tensors and strings are constants."""
    graph.setInsertPoint(node)
    numbers = graph.create("prim::ListConstruct", [], 1)  # none, for what follows in the kernel
    numbers.output().setType(torch._C.ListType(torch._C.OptionalType(torch._C.NumberType.get())))
    numbers.insertBefore(node)
    values = [_constant(graph, node, one) for one in inputs]
    put(graph, node, kind, [*values, numbers.output(), graph.insertConstant(algorithm)])


def _constant(graph: Any, node: Any, value: Any) -> Any:
    if isinstance(value, Tensor):
        made = graph.create("prim::ConstantMKLDNNTensor", [], 1)
        made.t_("value", value)
        made.insertBefore(node)
        return made.output()
    return graph.insertConstant(value) if isinstance(value, str) else value


def put(graph: Any, node: Any, kind: str, inputs: list[Any]) -> str:
    """Put an operation where `node` is, and return what its result is called."""
    made = graph.create(kind, inputs, 1)
    made.insertBefore(node)
    node.output().replaceAllUsesWith(made.output())
    node.destroy()
    return str(made.output().debugName())


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
        kind, inputs = node.kind(), list(node.inputs())
        if kind in ("aten::relu", "aten::add") and is_over(inputs[0], index):
            free.add(put(graph, node, f"{kind}_", inputs))
        elif kind == "aten::add" and is_over(inputs[1], index) and inputs[2].toIValue() == 1:
            free.add(put(graph, node, "aten::add_", [inputs[1], inputs[0], inputs[2]]))
