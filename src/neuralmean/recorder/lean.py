"""Layers without the Python around their kernels.

A batch norm of torch asks itself a dozen questions before it calls its kernel. In evaluation mode, with an input of a known
shape, all the answers are known: calling the kernel at once saves about as much time as one channel mean takes. Other
layers look their weights up in roundabout ways. The result is the same, bit for bit.

An activation that is larger than the processor's caches is normalised a few inputs at a time, and each few are summed up while
they are still near: it comes from main memory once rather than twice.

Functions here take a layer's own attributes, `vars(layer)`, which are near the processor when a layer is called, and all layers
of a kind share one function: whatever else there were for each layer would have to come from far away in every pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attributes = dict[str, Any]  # of a layer
Lean = Callable[[Attributes, Tensor], Tensor | None]  # None where the layer itself has to be called
InSteps = Callable[[Attributes, Tensor, int, tuple[int, ...], Tensor], Tensor | None]

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def lean_forward(module: nn.Module) -> Lean | None:
    """Return what a layer does in evaluation mode; None for a layer that is not one of a few of torch's own.

    Example:
        >>> layer, x = nn.BatchNorm2d(3).eval(), torch.rand(2, 3, 4, 4)
        >>> forward = lean_forward(layer)
        >>> torch.equal(forward(vars(layer), x), layer(x))
        True
    """
    return _LEAN.get(type(module))  # a subclass may do anything


def lean_in_steps(module: nn.Module) -> InSteps | None:
    """Return what a `BatchNorm2d` does in evaluation mode and without gradients, summing its input up on the way.

    It takes the rows of a step, the dimensions to sum over and where the sums go. None for any other layer.

    Example:
        >>> layer, x, sums = nn.BatchNorm2d(3).eval(), torch.rand(5, 3, 4, 4), torch.empty(5, 3)
        >>> with torch.no_grad():
        ...     output = lean_in_steps(layer)(vars(layer), x, 2, (2, 3), sums)
        >>> torch.equal(output, layer(x)), torch.equal(sums, x.sum((2, 3)))
        (True, True)
    """
    return _batch_norm_in_steps if type(module) is nn.BatchNorm2d else None


# All look their tensors up, whichever they are by then.


def _batch_norm(own: Attributes, x: Tensor) -> Tensor | None:
    parameters, buffers = own["_parameters"], own["_buffers"]
    mean, variance = buffers["running_mean"], buffers["running_var"]
    if mean is None or variance is None:  # normalises each batch by itself
        return None
    cudnn = torch._C._get_cudnn_enabled()
    return torch.batch_norm(x, parameters["weight"], parameters["bias"], mean, variance, False, 0.0, own["eps"], cudnn)


def _batch_norm_in_steps(own: Attributes, x: Tensor, step: int, dims: tuple[int, ...], sums: Tensor) -> Tensor | None:
    parameters, buffers = own["_parameters"], own["_buffers"]
    mean, variance = buffers["running_mean"], buffers["running_var"]
    is_in_order = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    if mean is None or variance is None or not is_in_order:
        return None
    output, unused = torch.empty_like(x), x.new_empty(0)
    for rows, normed, summed in zip(*(torch.split(whole, step) for whole in (x, output, sums)), strict=True):
        torch.native_batch_norm(
            rows,
            parameters["weight"],
            parameters["bias"],
            mean,
            variance,
            False,
            0.0,
            own["eps"],
            out=(normed, unused, unused),
        )
        torch.sum(rows, dims, out=summed)
    return output


def _layer_norm(own: Attributes, x: Tensor) -> Tensor:
    parameters = own["_parameters"]
    return torch.layer_norm(x, own["normalized_shape"], parameters["weight"], parameters["bias"], own["eps"])


def _convolution(kernel: Callable[..., Tensor]) -> Lean:
    def forward(own: Attributes, x: Tensor) -> Tensor | None:
        parameters = own["_parameters"]
        weight = parameters.get("weight")
        if weight is None or own["padding_mode"] != "zeros":
            return None
        return kernel(x, weight, parameters["bias"], own["stride"], own["padding"], own["dilation"], own["groups"])

    return forward


def _linear(own: Attributes, x: Tensor) -> Tensor | None:
    parameters = own["_parameters"]
    weight = parameters.get("weight")
    return None if weight is None else F.linear(x, weight, parameters["bias"])  # some wrappers keep it elsewhere


def _relu(own: Attributes, x: Tensor) -> Tensor:
    return torch.relu_(x) if own["inplace"] else torch.relu(x)


def _gelu(own: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=own["approximate"])


def _nothing(_own: Attributes, x: Tensor) -> Tensor:
    return x


_LEAN: dict[type[nn.Module], Lean] = {
    **dict.fromkeys(BATCH_NORMS, cast(Lean, _batch_norm)),
    nn.Conv1d: _convolution(torch.conv1d),
    nn.Conv2d: _convolution(torch.conv2d),
    nn.Conv3d: _convolution(torch.conv3d),
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
    nn.ReLU: _relu,
    nn.GELU: _gelu,
    nn.Dropout: _nothing,
    nn.Identity: _nothing,
}
