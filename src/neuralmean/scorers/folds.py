"""Folds of rows, so that measurements use rows that were not learnt from."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

FOLDS = 5
ONE_FOLD_FROM = 5000  # rows from which a single fold is enough to measure on


def folds(count: int, *, seed: int = 0, whole: bool = False) -> Iterator[Tensor]:
    """Yield the held-out rows of each fold, bool (N,): each row once, or a fifth of many rows unless `whole`.

    Example:
        >>> torch.stack(list(folds(7))).sum(dim=0).tolist()
        [1, 1, 1, 1, 1, 1, 1]
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    for fold in range(1 if count >= ONE_FOLD_FROM and not whole else FOLDS):
        apart = torch.zeros(count, dtype=torch.bool)
        apart[order[fold::FOLDS]] = True
        if bool(apart.any()):
            yield apart
