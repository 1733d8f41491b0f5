"""Checks the numbers and ranks of a state file before they are used: nothing in a file is trusted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuralmean.stats.sequential import OnlineRanks

MOST = 2**53  # of anything that is counted


def whole(value: Any, name: str, highest: int = MOST, lowest: int = 0) -> int:
    """Return a whole number within bounds.

    Raises:
        ValueError: It is something else.
    """
    if type(value) is not int or not lowest <= value <= highest:
        raise ValueError(f"{str(value)[:40]!r} is no {name}")
    return value


def split_ranks(ranks: OnlineRanks) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the state for `join_ranks`: tensors by name, and JSON values."""
    arrays, values = ranks.state()
    return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, values


def join_ranks(tensors: dict[str, Tensor], values: dict[str, Any], fresh: OnlineRanks) -> OnlineRanks:
    """Return the restored ranks, given new ones of the same detector.

    Raises:
        ValueError: Content that no stream could have led to.
    """
    if values["capacity"] != fresh.capacity or type(values["capacity"]) is not int:
        raise ValueError("the ranks have another capacity than those of this detector")
    nothing = torch.empty(0, dtype=torch.float64)  # a tensor without elements is not in the file
    arrays = {name: tensors.get(name, nothing).numpy() for name in ("scores", "ties", "counts")}
    if not ((arrays["ties"] >= 0) & (arrays["ties"] < 1)).all() or arrays["counts"].dtype != np.int64:
        raise ValueError("the ranks are not those of a stream")
    return OnlineRanks.restore(arrays, values)
