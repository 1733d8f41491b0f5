"""Batch norm for the time of the training: a network without norms learns in a tenth of the epochs with them.

At the end each norm is folded into the convolution before it. What is kept has the layers of the architecture and no others.
"""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


class _Normed(nn.Sequential):
    """A convolution and the norm that is folded into it later."""


def add_norms(model: nn.Module) -> None:
    """Put a batch norm after each convolution of a model that has no norms, in place; others are left as they are."""
    if any(isinstance(module, _NORMS) for module in model.modules()):
        return
    for name, conv in list(model.named_modules()):
        if isinstance(conv, nn.Conv2d):
            model.set_submodule(name, _Normed(conv, nn.BatchNorm2d(conv.out_channels, device=conv.weight.device)))


def fold_norms(model: nn.Module) -> nn.Module:
    """Return a copy, in evaluation mode, in which the norms that `add_norms` put there are part of the convolutions.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        >>> add_norms(model)
        >>> fold_norms(model)
        Sequential(
          (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
          (1): ReLU()
        )
    """
    folded = copy.deepcopy(model).eval()  # a copy is not compiled either
    for name, module in list(folded.named_modules()):
        if isinstance(module, _Normed):
            folded.set_submodule(name, fuse_conv_bn_eval(*module))
    return folded
