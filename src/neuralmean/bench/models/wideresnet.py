"""Wide residual networks of Zagoruyko and Komodakis 2016 (BMVC): pre-activation blocks, `width` times the channels.

Parameters have the names of the weights published with the papers on outlier exposure and energy, hence one in camel
case. There is no dropout: it is off at test time, and the trainer does not use it.
"""

from __future__ import annotations

from torch import Tensor, nn


class _PreActivationBlock(nn.Module):
    """bn-relu-conv3x3-bn-relu-conv3x3 in parallel with an identity, or a 1x1 convolution if the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_channels)
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.relu = nn.ReLU()
        self.convShortcut: nn.Module | None = None
        if in_channels != channels:
            self.convShortcut = nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = self.relu(self.bn1(x))
        # The projection sees the normalised input, as in the authors' code; the identity does not.
        shortcut = x if self.convShortcut is None else self.convShortcut(activated)
        out = self.conv2(self.relu(self.bn2(self.conv1(activated))))
        added: Tensor = out + shortcut
        return added


class _Stage(nn.Module):
    def __init__(self, in_channels: int, channels: int, blocks: int, stride: int) -> None:
        super().__init__()
        first = _PreActivationBlock(in_channels, channels, stride)
        self.layer = nn.Sequential(first, *(_PreActivationBlock(channels, channels, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


class WideResNet(nn.Module):
    """WideResNet-`depth`-`width` for 32 x 32 images; the paper's tables use 40-2."""

    def __init__(self, depth: int, width: int, num_classes: int = 10) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.block1 = _Stage(16, 16 * width, blocks, stride=1)
        self.block2 = _Stage(16 * width, 32 * width, blocks, stride=2)
        self.block3 = _Stage(32 * width, 64 * width, blocks, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * width)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(64 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        x = self.block3(self.block2(self.block1(self.conv1(x))))  # (N, 64 width, 8, 8)
        x = self.relu(self.bn1(x))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits
