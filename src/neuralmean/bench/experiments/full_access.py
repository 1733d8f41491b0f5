"""Figure 4: methods that learn from ID and OOD images, CIFAR-10 as ID."""

from neuralmean.bench.baselines import Method
from neuralmean.bench.experiments.base import ALL_OODS, SLOW_MODELS, TABLE_MODELS, cases
from neuralmean.bench.experiments.tables import TableExperiment


class FullAccess(TableExperiment):
    """Methods may learn from the train images of each OOD set."""

    name = "full-access"
    title = "ID and OOD images to learn from"
    reference = "Figure 4"
    protocol = "full-access"
    cases = cases(TABLE_MODELS, "cifar10", ALL_OODS)
    methods = (
        "msp",
        "odin",
        "energy",
        "mahalanobis",
        "oe",
        "energy-ft",
        "acet",
        "good",
        "ours-avg",
        "ours-lr",
        "ours-mlp",
        "typicality",
        "guided",
    )

    def leaves_out(self, method: Method, model: str) -> bool:
        """Whether to skip a method that would be trained once per OOD set on a slow model."""
        return method.fine_tunes and model in SLOW_MODELS
