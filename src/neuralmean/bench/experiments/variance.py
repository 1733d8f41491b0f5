"""Section 5.7 and appendix: neural variance discrepancy, neural mean discrepancy, and both together."""

from neuralmean.bench.experiments.base import RESIDUAL, cases
from neuralmean.bench.experiments.tables import TableExperiment


class Variance(TableExperiment):
    """NMD, NVD, and both, CIFAR-10 against CIFAR-100."""

    name = "variance"
    title = "Mean, variance, or both"
    reference = "Sec. 5.7, appendix on NVD"
    protocol = "full-access"
    cases = cases(RESIDUAL, "cifar10", ("cifar100",))
    first_only = True
    methods = ("ours-lr", "ours-lr-nvd", "ours-lr-nmd+nvd", "ours-mlp", "ours-mlp-nvd", "ours-mlp-nmd+nvd")
