"""The CIFAR ResNets of He et al. 2016 (CVPR), section 4.2: depth 6n + 2, three stages of 16, 32 and 64 channels."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions in parallel with a shortcut without parameters (option A of the paper)."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.stride = stride
        self.padded_channels = (channels - in_channels) // 2  # on either side

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.stride > 1:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padded_channels, self.padded_channels))
        added: Tensor = self.relu(out + x)
        return added


class CifarResNet(nn.Module):
    """ResNet of depth 6n + 2 for 32 x 32 images; `depth` is 20, 32, 44, 56 or 110."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))  # (N, 64, 8, 8)
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = _BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(_BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))
