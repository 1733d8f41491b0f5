"""Toy models with known numbers, and where the real data is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class TinyNet(nn.Module):
    """Two convolutions with batch norm, in-place ReLU, a linear head: what most classifiers look like."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def make_trained(seed: int = 0) -> TinyNet:
    """A TinyNet whose running statistics are those of uniform noise."""
    torch.manual_seed(seed)
    model = TinyNet()
    with torch.no_grad():
        for _ in range(60):
            model(torch.rand(64, 3, 8, 8))
    return model.eval()


@pytest.fixture
def model() -> TinyNet:
    return make_trained()


@pytest.fixture
def images() -> Tensor:
    return torch.rand(300, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def strange() -> Tensor:
    return 2 + 3 * torch.rand(100, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def count_hooks(model: nn.Module) -> int:
    """How many hooks of any kind there are on all submodules together, and replaced `forward` methods."""
    stores = [store for module in model.modules() for name, store in vars(module).items() if "_hooks" in name]
    return sum(map(len, stores)) + sum("forward" in vars(module) for module in model.modules())


def _folder(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value or not Path(value).is_dir():
        pytest.skip(f"{variable} does not name a folder")
    return Path(value)


@pytest.fixture
def weights_root() -> Path:
    return _folder("NEURALMEAN_WEIGHTS")
