"""DenseNet-BC of Huang et al. 2017 (CVPR) for 32 x 32 images: depth 100, growth 12, reduction 0.5."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class _Bottleneck(nn.Module):
    """bn-relu-conv1x1-bn-relu-conv3x3; its output is concatenated to its input."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, 4 * growth, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.relu(self.bn1(x)))
        out = self.conv2(self.relu(self.bn2(out)))
        return torch.cat([x, out], dim=1)


class _DenseBlock(nn.Module):
    def __init__(self, in_channels: int, layers: int, growth: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*(_Bottleneck(in_channels + i * growth, growth) for i in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class _Transition(nn.Module):
    """bn-relu-conv1x1 that halves the channels, then a 2x2 average pool."""

    def __init__(self, in_channels: int, channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 1, bias=False)
        self.relu = nn.ReLU()
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.pool(self.conv1(self.relu(self.bn1(x))))
        return out


class DenseNet(nn.Module):
    """DenseNet-BC of `depth` 6n + 4 with three blocks."""

    def __init__(self, depth: int = 100, growth: int = 12, num_classes: int = 10) -> None:
        super().__init__()
        layers = (depth - 4) // 6
        start = 2 * growth
        grown = layers * growth
        halved1 = (start + grown) // 2
        halved2 = (halved1 + grown) // 2
        self.conv1 = nn.Conv2d(3, start, 3, padding=1, bias=False)
        self.block1 = _DenseBlock(start, layers, growth)
        self.trans1 = _Transition(start + grown, halved1)
        self.block2 = _DenseBlock(halved1, layers, growth)
        self.trans2 = _Transition(halved1 + grown, halved2)
        self.block3 = _DenseBlock(halved2, layers, growth)
        self.bn1 = nn.BatchNorm2d(halved2 + grown)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(halved2 + grown, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        x = self.trans1(self.block1(self.conv1(x)))  # (N, 108, 16, 16)
        x = self.trans2(self.block2(x))  # (N, 150, 8, 8)
        x = self.relu(self.bn1(self.block3(x)))  # (N, 342, 8, 8)
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits
