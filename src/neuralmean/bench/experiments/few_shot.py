"""Figure 6: 25 ID and 25 OOD images to learn from, or 50 ID images for Gram, CIFAR-10 as ID; ten draws."""

from neuralmean.bench import protocols
from neuralmean.bench.baselines import Method
from neuralmean.bench.experiments.base import ALL_OODS, SLOW_MODELS, TABLE_MODELS, cases
from neuralmean.bench.experiments.tables import TableExperiment
from neuralmean.bench.protocols import Draw, FitSet


class FewShot(TableExperiment):
    """Mean and spread over the draws."""

    name = "few-shot"
    title = "25 ID and 25 OOD images to learn from"
    reference = "Figure 6"
    protocol = "few-shot"
    cases = cases(TABLE_MODELS, "cifar10", ALL_OODS)
    methods = ("odin", "mahalanobis", "gram", "energy", "ours-avg", "ours-lr", "ours-mlp", "typicality")

    def leaves_out(self, method: Method, model: str) -> bool:
        """Whether to skip a method that would perturb every image for each draw and OOD set on a slow model."""
        return method.heavy and model in SLOW_MODELS

    def draws_for(self, method: Method, draws: list[Draw], inliers: FitSet) -> list[Draw]:
        """The draws, with more ID images for a method that uses no OOD images (Sec. 5.4)."""
        count = method.few_shot_inliers
        return draws if count is None else protocols.with_inliers(draws, inliers, count)
