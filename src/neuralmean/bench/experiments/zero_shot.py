"""Figure 5 and table 6: methods that learn from ID images only, CIFAR-10 as ID."""

from neuralmean.bench.experiments.base import ALL_OODS, TABLE_MODELS, cases
from neuralmean.bench.experiments.tables import TableExperiment


class ZeroShot(TableExperiment):
    """Methods get no OOD images; Ours-LR and Ours-MLP learn from crafted ones."""

    name = "zero-shot"
    title = "Only ID images to learn from"
    reference = "Figure 5, Table 6"
    protocol = "zero-shot"
    cases = cases(TABLE_MODELS, "cifar10", ALL_OODS)
    methods = (
        "msp",
        "energy",
        "gram",
        "g-odin",
        "1d",
        "knn",
        "vim",
        "react",
        "ash",
        "rmds",
        "gen",
        "fdbd",
        "scale",
        "nac",
        "mahalanobis-id",
        "ours-avg",
        "ours-lr",
        "ours-mlp",
        "typicality",
    )
