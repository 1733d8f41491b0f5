"""Table 1: statistical methods on ConvNet-4, CIFAR-10 against SVHN and vice versa."""

from neuralmean.bench.experiments.base import Case
from neuralmean.bench.experiments.tables import TableExperiment


class Statistical(TableExperiment):
    """Kernel methods compared with Ours-LR."""

    name = "statistical"
    title = "Statistical methods on ConvNet-4"
    reference = "Table 1"
    protocol = "full-access"
    cases = (Case("convnet4", "cifar10", ("svhn",)), Case("convnet4", "svhn", ("cifar10",)))
    methods = ("dk", "cntk", "scntk", "msp", "energy", "ours-avg", "ours-lr", "typicality")
