"""ResNet-18 and -34 of He et al. 2016 with the usual stem for 32 x 32 images, and the encoder trained by MoCo.

The stem is one 3x3 convolution of stride 1 and no max-pool, as in most papers on OOD detection. Parameters have
torchvision's names, so weights of CIFAR models from torchvision or timm can be loaded.
"""

from __future__ import annotations

from torch import Tensor, nn

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions in parallel with an identity, or a 1x1 convolution if the shape changes."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.downsample: nn.Module | None = None
        if stride != 1 or in_channels != channels:
            projection = nn.Conv2d(in_channels, channels, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        shortcut = x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out + shortcut)
        return added


class ResNetEncoder(nn.Module):
    """ResNet without a class head: images (N, 3, 32, 32) to pooled features (N, 512)."""

    width = 512

    def __init__(self, depth: int) -> None:
        super().__init__()
        blocks = BLOCKS[depth]
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1 = _stage(64, 64, blocks[0], stride=1)
        self.layer2 = _stage(64, 128, blocks[1], stride=2)
        self.layer3 = _stage(128, 256, blocks[2], stride=2)
        self.layer4 = _stage(256, 512, blocks[3], stride=2)

    def encode(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to pooled features (N, 512)."""
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))  # (N, 512, 4, 4)
        return x.mean(dim=(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to pooled features (N, 512)."""
        return self.encode(x)


class ResNet(ResNetEncoder):
    """ResNet of depth 18 or 34 with a class head `fc`."""

    def __init__(self, depth: int, num_classes: int = 10) -> None:
        super().__init__(depth)
        self.fc = nn.Linear(self.width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        logits: Tensor = self.fc(self.encode(x))
        return logits


def _stage(in_channels: int, channels: int, blocks: int, stride: int) -> nn.Sequential:
    first = _BasicBlock(in_channels, channels, stride)
    return nn.Sequential(first, *(_BasicBlock(channels, channels, 1) for _ in range(blocks - 1)))
