"""Layers without the Python around their kernels.

A batch norm of torch asks itself a dozen questions before it calls its kernel. In evaluation mode, with an input of a known
shape, all the answers are known: calling the kernel at once saves about as much time as one channel mean takes. Other
layers look their weights up in roundabout ways. The result is the same, bit for bit.

An activation that is larger than the processor's caches is normalised a few inputs at a time, and each few are summed up while
they are still near: it comes from main memory once rather than twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]
InSteps = Callable[[Tensor, int, tuple[int, ...], Tensor], Tensor]  # input, rows of a step, what to sum over, where to

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def lean_forward(module: nn.Module) -> Forward | None:
    """Return what a layer does in evaluation mode; None for a layer that is not one of a few of torch's own.

    Example:
        >>> layer, x = nn.BatchNorm2d(3).eval(), torch.rand(2, 3, 4, 4)
        >>> forward = lean_forward(layer)
        >>> torch.equal(forward(x), layer(x))
        True
    """
    make = _MAKERS.get(type(module))  # a subclass may do anything
    return None if make is None else make(module)


# All go straight to the tensors, whichever they are by then.


def _batch_norm(module: Any) -> Forward:
    parameters, buffers, cudnn = module._parameters, module._buffers, torch.backends.cudnn.enabled

    def forward(x: Tensor) -> Tensor:
        mean, variance = buffers["running_mean"], buffers["running_var"]
        if mean is None or variance is None:  # normalises each batch by itself
            return cast(Tensor, type(module).forward(module, x))
        return torch.batch_norm(
            x, parameters["weight"], parameters["bias"], mean, variance, False, 0.0, module.eps, cudnn
        )

    return forward


def _layer_norm(module: Any) -> Forward:
    parameters = module._parameters

    def forward(x: Tensor) -> Tensor:
        return torch.layer_norm(x, module.normalized_shape, parameters["weight"], parameters["bias"], module.eps)

    return forward


def _convolution(module: Any) -> Forward:
    parameters, kernel = module._parameters, getattr(torch, type(module).__name__.lower())

    def forward(x: Tensor) -> Tensor:
        weight = parameters.get("weight")
        if weight is None or module.padding_mode != "zeros":
            return cast(Tensor, type(module).forward(module, x))
        return cast(
            Tensor,
            kernel(x, weight, parameters["bias"], module.stride, module.padding, module.dilation, module.groups),
        )

    return forward


def _linear(module: Any) -> Forward:
    parameters = module._parameters

    def forward(x: Tensor) -> Tensor:
        weight = parameters.get("weight")
        if weight is None:  # some wrappers keep it elsewhere
            return cast(Tensor, type(module).forward(module, x))
        return F.linear(x, weight, parameters["bias"])

    return forward


def _dropout(_module: Any) -> Forward:
    return lambda x: x


_MAKERS: dict[type[nn.Module], Callable[[Any], Forward]] = {
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _convolution),
    nn.LayerNorm: _layer_norm,
    nn.Linear: _linear,
    nn.Dropout: _dropout,
}


def lean_in_steps(module: nn.Module) -> InSteps | None:
    """Return what a `BatchNorm2d` does in evaluation mode and without gradients, summing its input up on the way.

    None for any other layer.

    Example:
        >>> layer, x, sums = nn.BatchNorm2d(3).eval(), torch.rand(5, 3, 4, 4), torch.empty(5, 3)
        >>> with torch.no_grad():
        ...     output = lean_in_steps(layer)(x, 2, (2, 3), sums)
        >>> torch.equal(output, layer(x)), torch.equal(sums, x.sum((2, 3)))
        (True, True)
    """
    if type(module) is not nn.BatchNorm2d:
        return None
    own, parameters, buffers = cast(Forward, lean_forward(module)), module._parameters, module._buffers

    def batch_norm(x: Tensor, step: int, dims: tuple[int, ...], sums: Tensor) -> Tensor:
        mean, variance = buffers["running_mean"], buffers["running_var"]
        weight, bias = parameters["weight"], parameters["bias"]
        if mean is None or not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
            torch.sum(x, dims, out=sums)
            return own(x)
        output, unused = torch.empty_like(x), x.new_empty(0)
        for rows, normed, summed in zip(*(torch.split(whole, step) for whole in (x, output, sums)), strict=True):
            out = (normed, unused, unused)
            torch.native_batch_norm(rows, weight, bias, mean, variance, False, 0.0, module.eps, out=out)
            torch.sum(rows, dims, out=summed)
        return output

    return batch_norm
