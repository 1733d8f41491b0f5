"""Groups of inputs, each with a false-alarm rate of its own: labels that come with the inputs, the model's prediction, or lengths.

The mean over few tokens scatters more than that over many, so inputs of token models are compared with those of about their length.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from torch import Tensor

from neuralmean.data.batch import Batch
from neuralmean.errors import InputError

PREDICTED = "predicted"
LENGTH = "length"
GROUPED_BY = ("given", PREDICTED, LENGTH)
_MOST_RANGES = 8
_RANGE = re.compile(r"(\d+) tokens or more")
Groups: TypeAlias = "Sequence[object] | str"


def lengths_of(batch: Batch) -> list[int] | None:
    """Return how many tokens each input has, padding left out; None for inputs that are no tokens.

    Example:
        >>> import torch
        >>> lengths_of(Batch((), {"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}))
        [2, 3]
    """
    mask = batch.mask
    if mask is not None:
        return [int(count) for count in (mask != 0).sum(dim=1).tolist()]
    x = batch.first if batch.images is None else None
    if x is None or x.dim() != 2 or x.is_floating_point():
        return None
    return [x.shape[1]] * len(x)


def length_ranges(lengths: Sequence[int], needed: int) -> list[int]:
    """Return where each range of lengths begins, so that the ranges have about as many examples each.

    Args:
        lengths: Of the held-out examples.
        needed: How many examples a range needs at the least.

    Example:
        >>> length_ranges([*range(1, 41)] * 20, 19)
        [0, 11, 21, 31]
    """
    ordered = sorted(lengths)
    count = max(1, min(_MOST_RANGES, len(ordered) // max(200, 4 * needed)))
    starts = {ordered[len(ordered) * part // count] for part in range(1, count)}
    return [0, *sorted(start for start in starts if start > ordered[0])]


def length_labels(lengths: Iterable[int], starts: Sequence[int]) -> list[str]:
    """Return the label of the range of each length.

    Example:
        >>> length_labels([3, 11, 500], [0, 11])
        ['0 tokens or more', '11 tokens or more', '11 tokens or more']
    """
    return [f"{starts[max(0, bisect_right(starts, length) - 1)]} tokens or more" for length in lengths]


def starts_of(names: Iterable[str]) -> list[int]:
    """Return where the ranges with these labels begin."""
    found = [_RANGE.fullmatch(name) for name in names]
    if not found or None in found:
        raise InputError("Expected groups that are ranges of lengths, but got others.")
    return sorted(int(match[1]) for match in found if match)


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
