r"""Batch norms read at their output, for graphs whose runtime folds them into the convolution before.

A runtime folds a batch norm only if nobody else looks at what goes in. What comes out is an affine map of that, channel by
channel, and so is its mean:

.. math::
    \mu_{out} = \gamma (\mu_{in} - m) / \sqrt{v + \epsilon} + \beta
    \quad\Rightarrow\quad
    \mu_{in} = \mu_{out} \sqrt{v + \epsilon} / \gamma + m - \beta \sqrt{v + \epsilon} / \gamma

A layer with a channel whose :math:`\gamma` is so small that this would lose digits is read at its input as ever.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from neuralmean.layers import Layer

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_LARGEST = 100.0  # shift over scale of a channel: two digits are lost, and five are left


@dataclass(frozen=True)
class Behind:
    """Where layers are read, and how the means of their inputs follow: `mean * factor + offset`."""

    layers: tuple[Layer, ...]
    factor: Tensor  # (D,)
    offset: Tensor  # (D,)


def read_behind(core: nn.Module, layers: Sequence[Layer], *, left: Collection[str] = ()) -> Behind | None:
    """Return how to read the batch norms of a model in evaluation mode behind them; None if there is none to be read so.

    Args:
        core: The model.
        layers: The watched layers.
        left: Names of layers to be read as ever.

    Example:
        >>> norm = nn.BatchNorm2d(3).eval()
        >>> _ = torch.nn.init.constant_(norm.weight, 4.0), norm.running_mean.fill_(1.0), norm.running_var.fill_(4.0)
        >>> behind = read_behind(nn.Sequential(norm), [Layer("0", "batchnorm", 3)])
        >>> [round(x, 4) for x in (behind.factor[0].item(), behind.offset[0].item())]  # half of it, plus one
        [0.5, 1.0]
    """
    read, factors, offsets = [], [], []
    for layer in layers:
        is_wanted = layer.kind == "batchnorm" and layer.name not in left
        found = _undo(core.get_submodule(layer.name)) if is_wanted else None
        read.append(layer if found is None else replace(layer, kind="convolution"))  # as one: at its output
        factor, offset = (torch.ones(layer.channels), torch.zeros(layer.channels)) if found is None else found
        factors.append(factor)
        offsets.append(offset)
    if tuple(read) == tuple(layers):
        return None
    return Behind(tuple(read), torch.cat(factors), torch.cat(offsets))


def _undo(module: nn.Module) -> tuple[Tensor, Tensor] | None:
    """Return factor and offset, (C,) each, that undo a batch norm; None where that is not possible or not exact enough."""
    if not isinstance(module, _BATCH_NORMS) or type(module) not in _BATCH_NORMS:  # a subclass may do anything
        return None
    mean, variance, gamma, beta = module.running_mean, module.running_var, module.weight, module.bias
    if any(tensor is None for tensor in (mean, variance, gamma, beta)):
        return None
    m, v, g, b = (tensor.detach().double().cpu() for tensor in (mean, variance, gamma, beta))  # type: ignore[union-attr]
    if not bool((b.abs() <= _LARGEST * g.abs()).all()) or bool((g == 0).any()):
        return None
    factor = (v + module.eps).sqrt() / g
    return factor.float(), (m - b * factor).float()
