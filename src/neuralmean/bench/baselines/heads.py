"""The linear layer that turns the penultimate feature into logits, for methods that need its weights.

It is found as in the library, by a forward pass of one black image. The returned tensors are copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from neuralmean.bench.models import TrainedModel
from neuralmean.data.batch import Batch
from neuralmean.errors import InputError
from neuralmean.models.layers import unwrap
from neuralmean.recording import find_head


@dataclass(frozen=True)
class LinearHead:
    """Weight (K, F) and bias (K,) of the last linear layer, copied, in float64."""

    weight: Tensor
    bias: Tensor

    def __call__(self, feature: Tensor) -> Tensor:
        """Return the logits (N, K) of features (N, F)."""
        return feature.double() @ self.weight.T + self.bias

    def as_module(self) -> nn.Linear:
        """Return an equal `nn.Linear` in float32."""
        module = nn.Linear(self.weight.shape[1], self.weight.shape[0])
        with torch.no_grad():
            module.weight.copy_(self.weight)
            module.bias.copy_(self.bias)
        return module.requires_grad_(False)


def read_head(trained: TrainedModel) -> LinearHead:
    """Return the linear layer, or 1 x 1 convolution, whose output is the model's output.

    Raises:
        InputError: The model does not end in a linear layer.
    """
    name = find_head(
        trained.model, Batch((trained.preprocess(np.zeros((1, trained.size, trained.size, 3), np.uint8)),))
    )
    head = None if name is None else unwrap(trained.model).get_submodule(name)
    is_like_linear = isinstance(head, nn.Conv2d) and head.groups == 1 and head.kernel_size == (1, 1)
    if not isinstance(head, (nn.Linear, nn.Conv2d)) or not (isinstance(head, nn.Linear) or is_like_linear):
        raise InputError(
            f"Expected {trained.name!r} to end in a linear layer, but it does not. "
            "Use a method that needs no head, such as 'knn'."
        )
    weight = head.weight.detach().flatten(1).cpu().double().clone()
    bias = torch.zeros(len(weight)) if head.bias is None else head.bias.detach().cpu()
    return LinearHead(weight, bias.double().clone())
