"""Table 3 (appendix): CIFAR-100 and SVHN as ID, OOD images to learn from."""

from neuralmean.bench.experiments.base import Case
from neuralmean.bench.experiments.tables import TableExperiment


class MoreDatasets(TableExperiment):
    """Other ID sets, full access."""

    name = "more-datasets"
    title = "Other ID sets"
    reference = "Table 3 (appendix)"
    protocol = "full-access"
    cases = (
        Case("resnet34", "cifar100", ("svhn", "lsun-crop", "imagenet-crop")),
        Case("resnet34", "svhn", ("cifar10", "lsun-resize", "imagenet-resize")),
        Case("densenet100", "cifar100", ("svhn", "lsun-crop", "imagenet-crop")),
    )
    methods = ("msp", "odin", "mahalanobis", "energy", "ours-avg", "ours-lr", "ours-mlp", "typicality")
