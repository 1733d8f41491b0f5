"""Models that are no fixed graph of their input: what they do depends on values, on earlier calls, or on who is watching."""

from __future__ import annotations

import random

import torch
from torch import nn

from tests.conftest import make_trained


class Hostile(nn.Module):
    """A trained model whose output is doubled now and then."""

    def __init__(self):
        super().__init__()
        self.net = make_trained()

    def doubles(self, x):
        raise NotImplementedError

    def forward(self, x):
        y = self.net(x)
        return y * 2 if self.doubles(x) else y


class Equal(Hostile):
    def doubles(self, x):
        return torch.equal(x, x.abs())


class IsNonzero(Hostile):
    def doubles(self, x):
        return torch.is_nonzero((x > 1).any())


class AllClose(Hostile):
    def doubles(self, x):
        return torch.allclose(x, x.abs())


class Chosen(Hostile):
    def doubles(self, x):
        return x[x > 1].shape[0] < 20


class Unique(Hostile):
    def doubles(self, x):
        return torch.unique(x).shape[0] < 20


class Item(Hostile):
    def doubles(self, x):
        return x.sum().item() > 0


class WatchesGradients(Hostile):
    def doubles(self, x):
        return torch.is_grad_enabled()


class WatchesInference(Hostile):
    def doubles(self, x):
        return torch.is_inference_mode_enabled()


class Counts(Hostile):
    """Counts its calls, and does something else from the hundredth on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def doubles(self, x):
        self.calls += 1
        return self.calls >= 100


class CountsInAList(Hostile):
    def __init__(self):
        super().__init__()
        self.seen = []

    def doubles(self, x):
        self.seen.append(len(x))
        return len(self.seen) >= 100


class Gambles(Hostile):
    def forward(self, x):
        return self.net(x) * random.random()


class OneAlone(Hostile):
    """Treats a single input differently: the same graph for all batches, but for those of one."""

    def doubles(self, x):
        return x.shape[0] == 1


VALUES = (Equal, IsNonzero, AllClose, Chosen, Unique, Item)
CALLS = (WatchesGradients, WatchesInference, Counts, CountsInAList, Gambles)
