"""Norm layers without the Python around their kernels.

A batch norm of torch asks itself a dozen questions before it calls its kernel. In evaluation mode, with an input of a known
shape, all the answers are known: calling the kernel at once saves about as much time as one channel mean takes. The
result is the same, bit for bit.

An activation that is larger than the processor's caches is normalised a few inputs at a time, and each few are summed up while
they are still near: it comes from main memory once rather than twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], Tensor]
InSteps = Callable[[Tensor, int, tuple[int, ...], Tensor], Tensor]  # input, rows of a step, what to sum over, where to

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def lean_forward(module: nn.Module) -> Forward | None:
    """Return what a norm layer does in evaluation mode; None for a layer that is not one of torch's own norms.

    Example:
        >>> layer, x = nn.BatchNorm2d(3).eval(), torch.rand(2, 3, 4, 4)
        >>> forward = lean_forward(layer)
        >>> torch.equal(forward(x), layer(x))
        True
    """
    parameters, buffers = module._parameters, module._buffers  # straight to the tensors, whichever they are by then
    if type(module) in BATCH_NORMS:
        cudnn = torch.backends.cudnn.enabled

        def batch_norm(x: Tensor) -> Tensor:
            mean, variance = buffers["running_mean"], buffers["running_var"]
            if mean is None or variance is None:  # normalises each batch by itself
                return cast(Tensor, type(module).forward(module, x))
            weight, bias = parameters["weight"], parameters["bias"]
            return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, module.eps, cudnn)  # type: ignore[arg-type]

        return batch_norm
    if type(module) is nn.LayerNorm:

        def layer_norm(x: Tensor) -> Tensor:
            return torch.layer_norm(x, module.normalized_shape, parameters["weight"], parameters["bias"], module.eps)

        return layer_norm
    return None


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
