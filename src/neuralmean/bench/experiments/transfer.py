"""Table 2: learn from CIFAR-100, test on other OOD sets, across models."""

from neuralmean.bench.experiments.base import cases
from neuralmean.bench.experiments.tables import TableExperiment

_MODELS = (
    "resnet34",
    "moco-resnet34",
    "vgg19",
    "vit",
    "densenet100",
    "resnet56",
    "resnet44",
    "resnet32",
    "resnet20",
    "resnet18",
    "resnet110",
    "wideresnet40-2",
    "wideresnet28-10",
)


class Transfer(TableExperiment):
    """Methods learn from CIFAR-100 and are tested on unseen OOD sets."""

    name = "transfer"
    title = "Learn from CIFAR-100, test on unseen OOD sets"
    reference = "Table 2"
    protocol = "transfer"
    cases = cases(
        _MODELS,
        "cifar10",
        ("lsun-crop", "svhn", "textures", "imagenet-crop", "imagenet-resize", "lsun-resize", "isun"),
        learns_from=("cifar100",),
    )
    methods = ("msp", "energy", "odin", "mahalanobis", "oe", "energy-ft", "ours-lr", "ours-mlp", "typicality", "guided")
