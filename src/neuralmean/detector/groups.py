"""Groups of inputs, each with a false-alarm rate of its own: labels that come with the inputs, or the model's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from neuralmean.errors import InputError

PREDICTED = "predicted"
Groups: TypeAlias = "Sequence[object] | str"


def predicted_labels(output: Tensor | None) -> list[str]:
    """Return the predicted class of each input as a label, given the model's output (N, K).

    Example:
        >>> import torch
        >>> predicted_labels(torch.tensor([[0.1, 2.0, 0.3], [4.0, 0.0, 0.0]]))
        ['1', '0']
    """
    if output is None or output.dim() != 2 or output.shape[1] < 2:
        shape = None if output is None else tuple(output.shape)
        raise InputError(
            f"Expected a model with an output of shape (N, classes) for groups by prediction, but got {shape}. "
            "Pass labels as `groups` instead."
        )
    return [str(label) for label in output.argmax(dim=1).tolist()]
