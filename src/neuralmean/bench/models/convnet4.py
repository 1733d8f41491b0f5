"""ConvNet-4: the small network of the paper's table of statistical methods (appendix, "Architecture of ConvNet")."""

from __future__ import annotations

from torch import Tensor, nn


class ConvNet4(nn.Module):
    """Four convolutions of 300 channels without padding or bias, batch norm and ReLU after each, average pool, `fc`."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 300, 4, stride=1, bias=False)
        self.bn1 = nn.BatchNorm2d(300)
        self.conv2 = nn.Conv2d(300, 300, 4, stride=2, bias=False)
        self.bn2 = nn.BatchNorm2d(300)
        self.conv3 = nn.Conv2d(300, 300, 4, stride=2, bias=False)
        self.bn3 = nn.BatchNorm2d(300)
        self.conv4 = nn.Conv2d(300, 300, 3, stride=2, bias=False)
        self.bn4 = nn.BatchNorm2d(300)
        self.relu = nn.ReLU()
        self.pool = nn.AvgPool2d(2)
        self.fc = nn.Linear(300, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        x = self.relu(self.bn1(self.conv1(x)))  # (N, 300, 29, 29)
        x = self.relu(self.bn2(self.conv2(x)))  # (N, 300, 13, 13)
        x = self.relu(self.bn3(self.conv3(x)))  # (N, 300, 5, 5)
        x = self.relu(self.bn4(self.conv4(x)))  # (N, 300, 2, 2)
        logits: Tensor = self.fc(self.pool(x).flatten(1))
        return logits
