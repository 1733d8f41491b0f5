"""Batch norms that no convolution takes in, and means of tensors side by side, in a frozen TorchScript graph.

Dense networks, and residual ones that normalise first, have norms in front of their convolutions. torch works out anew in every
pass what such a norm multiplies and adds; here that is done once. Where a ReLU and a convolution follow that pads nothing, norm
and ReLU are a comparison (see `clamping`). And the mean of tensors side by side is their means side by side: each activation of a
dense network is read once, however many layers see it. Results are the same but for their last digits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuralmean.clamping import Clamp, Numbers, to_clamp
from neuralmean.packing import put

# As in `packing`, a graph, its nodes and its values are `Any`: what torch calls these has no types that would help.
_NORM, _RELUS = "aten::batch_norm", ("aten::relu", "aten::relu_")
_KEEP_RANK = {
    *_RELUS,
    "aten::add",
    "aten::add_",
    "aten::avg_pool2d",
    "aten::clamp",
    "aten::clamp_min",
    "aten::max_pool2d",
}


def norms_left(graph: Any, prefix: str) -> frozenset[str]:
    """Return the names of the layers whose batch norms are still in a graph, of a module whose names begin with `prefix`."""
    places = (node.scopeName().rpartition("/")[2] for node in graph.findAllNodes(_NORM))
    return frozenset(place.removeprefix(prefix) for place in places if place.startswith(prefix))


def arrange_norms(graph: Any) -> None:
    """Arrange the norms and means of a frozen graph without control flow; the graph itself is changed."""
    _split_means(graph)
    for norm in graph.findAllNodes(_NORM):
        affine = _affine(norm)
        if affine is None:
            continue
        relu = _only_user(norm, _RELUS)
        conv = None if relu is None else _only_user(relu, ("aten::_convolution",))
        if conv is not None and _takes_constants(conv, relu) and not _is_written_to(norm.inputsAt(0)):
            _to_comparison(graph, norm, relu, conv, to_clamp(*affine))
        else:
            scale, shift = (_constant(graph, norm, _for_images(values)) for values in affine)
            put(graph, norm, "aten::addcmul", [shift, norm.inputsAt(0), scale, _constant(graph, norm, 1)])
    torch._C._jit_pass_dce(graph)


def _affine(norm: Any) -> tuple[Numbers, Numbers] | None:
    """Return what a norm in evaluation mode multiplies images by and then adds, (C,) each; None if that is not fixed."""
    known = [value.toIValue() for value in norm.inputs()]
    weight, bias, mean, variance = (_numbers(value) for value in known[1:5])
    if mean is None or variance is None or known[5] is not False or _rank(norm.inputsAt(0)) != 4:
        return None
    scale = (1.0 if weight is None else weight) / np.sqrt(variance + known[7])
    return scale, (0.0 if bias is None else bias) - mean * scale


def _numbers(value: Any) -> Numbers | None:
    return value.double().numpy() if isinstance(value, Tensor) else None


def _rank(value: Any) -> int | None:
    """Return how many dimensions a tensor has: those of what made it, where that says it."""
    node = value.node()
    if node.kind() == "aten::_convolution":
        weight = node.inputsAt(1).toIValue()
        return weight.dim() if isinstance(weight, Tensor) else None
    if node.kind() == "aten::cat":
        return _rank(next(node.inputsAt(0).node().inputs()))
    if node.kind() in _KEEP_RANK:
        return _rank(node.inputsAt(0))
    return None


def _only_user(node: Any, kinds: Iterable[str]) -> Any:
    """Return the one node that looks at what `node` makes, if there is just one and it is of these kinds."""
    uses = node.output().uses()
    return uses[0].user if len(uses) == 1 and uses[0].user.kind() in kinds else None


def _is_written_to(value: Any) -> bool:
    """Whether somebody changes a tensor in place, who might come before or behind what is put somewhere else here."""
    return any(use.user.kind().endswith("_") for use in value.uses())


def _takes_constants(conv: Any, relu: Any) -> bool:
    """Whether a convolution can take in what is multiplied by and added to each channel of what a ReLU makes."""
    x, weight, bias, _, padding, _, transposed, _, groups = list(conv.inputs())[:9]
    known = weight.toIValue()
    return (
        x.debugName() == relu.output().debugName()
        and isinstance(known, Tensor)
        and (isinstance(bias.toIValue(), Tensor) or str(bias.type()) == "NoneType")
        and not any(padding.toIValue() or [1])
        and transposed.toIValue() is False
        and groups.toIValue() == 1
    )


def _to_comparison(graph: Any, norm: Any, relu: Any, conv: Any, clamp: Clamp) -> None:
    weight, bias = clamp.into(*(_numbers(conv.inputsAt(place).toIValue()) for place in (1, 2)))  # type: ignore[arg-type]
    for place, values in ((1, weight), (2, bias)):
        conv.replaceInput(place, _constant(graph, conv, torch.from_numpy(values).float()))
    bounds = (clamp.lower, clamp.upper) if clamp.falls else (clamp.lower,)
    inputs = [norm.inputsAt(0), *(_constant(graph, relu, _for_images(values)) for values in bounds)]
    put(graph, relu, "aten::clamp" if clamp.falls else "aten::clamp_min", inputs)
    norm.destroy()


def _for_images(values: Numbers) -> Tensor:
    return torch.from_numpy(values).float().reshape(1, -1, 1, 1)


def _constant(graph: Any, node: Any, value: Tensor | int) -> Any:
    graph.setInsertPoint(node)
    return graph.insertConstant(value)


def _split_means(graph: Any) -> None:
    """Take means over positions of tensors that are side by side one by one."""
    known: dict[tuple[str, int | None], Any] = {}
    for mean in graph.findAllNodes("aten::mean"):
        how = [value.toIValue() for value in mean.inputs()][1:]
        if how[:-1] == [[2, 3], False]:
            mean.output().replaceAllUsesWith(_mean_of(graph, mean.inputsAt(0), mean, known))


def _mean_of(graph: Any, value: Any, mean: Any, known: dict[tuple[str, int | None], Any]) -> Any:
    """Return the mean of a tensor, taken as `mean` is: a known one, those of its parts side by side, or a new one."""
    key = value.debugName(), mean.inputsAt(3).toIValue()  # of which type it is
    if key not in known:
        parts = [_mean_of(graph, part, mean, known) for part in _side_by_side(value)]
        if parts:
            sides = graph.create("prim::ListConstruct", parts, 1)
            sides.output().setType(torch._C.ListType(torch._C.TensorType.get()))
            sides.insertBefore(mean)
            made = graph.create("aten::cat", [sides.output(), value.node().inputsAt(1)], 1)
        else:
            made = graph.create("aten::mean", [value, *list(mean.inputs())[1:]], 1)
        made.insertBefore(mean)
        known[key] = made.output()
    return known[key]


def _side_by_side(value: Any) -> list[Any]:
    """Return what is side by side in a tensor, along the channels; nothing if it is in one piece."""
    node = value.node()
    if node.kind() != "aten::cat" or node.inputsAt(1).toIValue() != 1:
        return []
    parts = node.inputsAt(0).node()
    found = list(parts.inputs()) if parts.kind() == "prim::ListConstruct" else []
    return [] if any(map(_is_written_to, found)) else found
