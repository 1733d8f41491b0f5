"""Layers without the Python around their kernels.

A layer of torch asks itself a dozen questions before it calls its kernel, and looks its weights up in roundabout ways. In
evaluation mode all the answers are known: calling the kernel at once saves about as much time as one channel mean takes. The
result is the same, bit for bit.

Functions here take a layer's own attributes, `vars(layer)`, which are near the processor when a layer is called, and all layers
of a kind share one function: whatever else there were for each layer would have to come from far away in every pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Attributes = dict[str, Any]  # of a layer
Lean = Callable[[Attributes, Tensor], Tensor | None]  # None where the layer itself has to be called

LARGE = 1 << 23  # numbers in an activation that no cache holds: 32 MB
_STEP = 1 << 21  # numbers of it to be summed up at a time: 8 MB


def lean_forward(module: nn.Module) -> Lean | None:
    """Return what a layer does in evaluation mode; None for a layer that is not one of a few of torch's own.

    Example:
        >>> layer, x = nn.BatchNorm2d(3).eval(), torch.rand(2, 3, 4, 4)
        >>> forward = lean_forward(layer)
        >>> torch.equal(forward(vars(layer), x), layer(x))
        True
    """
    return _LEAN.get(type(module))  # a subclass may do anything


def norm_and_sum(own: Attributes, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return what a `BatchNorm2d` does in evaluation mode with a large input, and the sums of the input, (N, C).

    A few inputs at a time are normalised, and summed up while they are still near: an activation that is larger than the
    processor's caches comes from main memory once rather than twice. Where that cannot be, there are no sums.

    Example:
        >>> layer, x = nn.BatchNorm2d(3).eval(), torch.rand(5, 3, 4, 4)
        >>> with torch.no_grad():
        ...     output, sums = norm_and_sum(vars(layer), x)
        >>> torch.equal(output, layer(x)), torch.equal(sums, x.sum((2, 3)))
        (True, True)
    """
    parameters, buffers = own["_parameters"], own["_buffers"]
    mean, variance = buffers["running_mean"], buffers["running_var"]
    is_plain = x.is_cpu and x.dtype is torch.float32 and x.dim() == 4 and not torch.is_grad_enabled()
    is_in_order = x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)
    if mean is None or variance is None or not is_plain or not is_in_order:
        return _LEAN[nn.BatchNorm2d](own, x), None
    how = (parameters["weight"], parameters["bias"], mean, variance, False, 0.0, own["eps"])
    output, sums, unused = torch.empty_like(x), x.new_empty(x.shape[:2]), x.new_empty(0)
    step = max(1, _STEP * len(x) // x.numel())
    for rows, normed, summed in zip(*(torch.split(whole, step) for whole in (x, output, sums)), strict=True):
        torch.native_batch_norm(rows, *how, out=(normed, unused, unused))
        torch.sum(rows, (2, 3), out=summed)
    return output, sums


# All look their tensors up, whichever they are by then.


def _batch_norm(*dims: int) -> Lean:
    def forward(own: Attributes, x: Tensor) -> Tensor | None:
        parameters, buffers = own["_parameters"], own["_buffers"]
        mean, variance = buffers["running_mean"], buffers["running_var"]
        if mean is None or variance is None or x.dim() not in dims:  # normalises each batch by itself, or complains
            return None
        cudnn = torch._C._get_cudnn_enabled()
        return torch.batch_norm(
            x, parameters["weight"], parameters["bias"], mean, variance, False, 0.0, own["eps"], cudnn
        )

    return forward


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
    nn.BatchNorm1d: _batch_norm(2, 3),
    nn.BatchNorm2d: _batch_norm(4),
    nn.BatchNorm3d: _batch_norm(5),
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
