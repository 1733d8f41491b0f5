"""Figure 3: the average magnitude of NMD for mini-batches of 1 to 32 images, nothing fitted."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from neuralmean.bench.experiments.base import RESIDUAL, Case, Experiment, cases
from neuralmean.bench.experiments.workbench import Workbench
from neuralmean.bench.features import Features
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.protocols import EvalSet
from neuralmean.bench.results import make_row
from neuralmean.models.fingerprint import fingerprint
from neuralmean.models.layers import unwrap
from neuralmean.scorers import AverageScorer
from neuralmean.stats import metrics
from neuralmean.stats.discrepancy import neural_mean_discrepancy

BATCHES = 100  # mini-batches per set, as in the paper's figure
SIZES = (1, 2, 4, 8, 16, 32)


class BatchSize(Experiment):
    """Ours-Avg on mini-batches: CIFAR-10 against SVHN (far) and CIFAR-100 (near)."""

    name = "batch-size"
    title = "Scores of mini-batches, 1 to 32 images"
    reference = "Figure 3"
    cases = cases(RESIDUAL, "cifar10", ("svhn", "cifar100"))
    first_only = True
    methods = ("ours-avg",)

    def run(self, bench: Workbench, case: Case) -> None:
        """Score 100 mini-batches of each size from the ID and each OOD test set."""
        trained = bench.inputs.trained(case.model, case.id)
        reference = batchnorm_means(trained)
        for name in case.present(bench.inputs):
            measure(bench, self.name, case, trained, name, reference=reference, sizes=SIZES, seed=bench.seed)


def batchnorm_means(trained: TrainedModel) -> Tensor:
    """The running means of all batch norms, shape (D,), whether the model was trained or not."""
    modules = unwrap(trained.model).modules()
    return torch.cat([m.running_mean for m in modules if isinstance(getattr(m, "running_mean", None), Tensor)])  # type: ignore[misc]


def batch_scores(means: Tensor, reference: Tensor, *, size: int, batches: int = BATCHES, seed: int = 0) -> Tensor:
    r"""Ours-Avg of random mini-batches, shape (batches,); higher = more OOD.

    .. math::
        s(I) = \frac{1}{C} \sum_c \left| \frac{1}{|I|} \sum_{x \in I} \mu[f_c(x)] - \mu[f_c(D_{tr})] \right|

    (Dong et al., CVPR 2022, Eq. 3 to 5 and Sec. 3.2.) No image is in two mini-batches if there are enough images.

    Args:
        means: Channel means of the images, shape (N, D).
        reference: Training means, shape (D,).
        size: Images in a mini-batch, at most N.
        batches: Number of mini-batches.
        seed: Seed of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    rounds = -(-batches // max(1, len(means) // size))
    orders = [torch.randperm(len(means), generator=generator)[: len(means) // size * size] for _ in range(rounds)]
    rows = torch.cat(orders)[: batches * size].reshape(batches, size)
    pooled = torch.stack([means[batch].mean(dim=0) for batch in rows])
    return AverageScorer().score(neural_mean_discrepancy(pooled, reference))


def measure(
    bench: Workbench,
    experiment: str,
    case: Case,
    trained: TrainedModel,
    ood: str,
    *,
    reference: Tensor,
    sizes: Sequence[int],
    kind: str = "",
    seed: int,
) -> None:
    """Add one row for each batch size, including the scores of the mini-batches."""
    inside, outside = (bench.judge_set(name, case.model) for name in (case.id, ood))
    read = bench.reader(trained)
    for size in sizes:
        row = _blank(bench, experiment, case, trained, inside, outside, size=size, kind=kind, seed=seed)
        if size > min(len(inside), len(outside)) or not bench.is_open(row):
            continue
        features: list[Features] = [read(one.source, variance=False) for one in (inside, outside)]
        begun = time.perf_counter()
        scores = [batch_scores(one.means, reference, size=size, seed=seed) for one in features]
        passes = sum(one.seconds * BATCHES * size / len(one) for one in features)
        figures = metrics.evaluate(scores[0].numpy(), scores[1].numpy())
        row.update(
            auroc=round(figures.auroc, 3),
            tnr95=round(figures.tnr95, 3),
            accuracy=round(figures.accuracy, 3),
            seconds=round(time.perf_counter() - begun + passes, 3),
            id_scores=[round(value, 6) for value in scores[0].tolist()],
            ood_scores=[round(value, 6) for value in scores[1].tolist()],
        )
        bench.results.add(row)


def _blank(
    bench: Workbench,
    experiment: str,
    case: Case,
    trained: TrainedModel,
    inside: EvalSet,
    outside: EvalSet,
    *,
    size: int,
    kind: str,
    seed: int,
) -> dict[str, Any]:
    inputs = [fingerprint(trained.model), inside.digest(), outside.digest(), BATCHES]
    columns = {
        "experiment": experiment,
        "model": case.model,
        "id": case.id,
        "ood": outside.name,
        "method": "ours-avg",
        "protocol": "zero-shot",
        "auroc": None,
        "tnr95": None,
        "accuracy": None,
        "n_id": BATCHES,
        "n_ood": BATCHES,
        "seed": seed,
        "seconds": None,
    }
    return make_row(
        columns,
        setting=f"batch {size}{kind}",
        batch_size=size,
        kind=kind.removeprefix(", ") or "trained",
        limit=bench.limit,
        inputs=hashlib.sha256(repr(inputs).encode()).hexdigest()[:16],
    )
