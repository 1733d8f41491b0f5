"""VGG-19 of Simonyan and Zisserman 2015 (ICLR), configuration E, without batch norm, for 32 x 32 images.

Five max-pools leave one pixel of 512 channels, so the two hidden layers have 512 units instead of the paper's 4,096 for
7 x 7 pixels. This is the usual VGG for CIFAR, and the parameters have the names of published weights.
"""

from __future__ import annotations

from torch import Tensor, nn

CONFIGURATION_E = (
    (64, 64),
    (128, 128),
    (256, 256, 256, 256),
    (512, 512, 512, 512),
    (512, 512, 512, 512),
)


class VGG19(nn.Module):
    """Sixteen 3x3 convolutions and three linear layers, with dropout between the latter."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        in_channels = 3
        for stage in CONFIGURATION_E:
            for channels in stage:
                layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.ReLU()]
                in_channels = channels
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, num_classes),
        )
        # With torch's default initialisation, nineteen layers without batch norm do not start to learn.
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        """Map images (N, 3, 32, 32) to logits (N, num_classes)."""
        logits: Tensor = self.classifier(self.features(x).flatten(1))
        return logits
