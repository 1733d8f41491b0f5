"""How long the logistic scorer takes to fit, beside sklearn's LogisticRegressionCV on the same rows and cores.

    python benchmarks/logistic.py                  2,000 rows x 2,032 columns (ResNet-56), three times
    python benchmarks/logistic.py --full           also 20,000 rows x 8,512 columns (ResNet-34), once: sklearn needs long
    python benchmarks/logistic.py --out FILE.json  also write the rows as JSON
    python benchmarks/logistic.py --cpu-time --threads 1      processor time, for a machine that others use too

The rows are made up, with what makes real vectors hard: the eigenvalues of their correlation matrix fall like those of
ResNet-56 on CIFAR-10 and CIFAR-100 (264, 54, 4.3, 0.1 at number 1, 11, 51, 301 of 2,032), and part of the difference
between the two kinds lies in directions of little variance. Both sides do the same work from the same float32 rows:
standardise, ten penalties by five folds, refit. The runs alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from neuralmean.scorers.logistic import LogisticScorer

TEST_ROWS = 4000
clock: Callable[[], float] = time.perf_counter  # `--cpu-time` puts time.process_time here


def make_rows(count: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return rows (count, columns) and which are out-of-distribution, bool (count,)."""
    from scipy.fft import dct

    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(columns)
    spread = (1 + number / 10) ** -1.15  # square root of the eigenvalues, up to a factor
    weight = torch.randn(columns, generator=torch.Generator().manual_seed(7)) * (1 + number) ** -0.4
    weight *= 3 / weight.norm()
    latent = torch.randn(count, columns, generator=generator)
    is_ood = torch.rand(count, generator=generator) < torch.sigmoid(latent @ weight)
    signs = torch.randint(0, 2, (columns,), generator=torch.Generator().manual_seed(8)) * 2 - 1
    mixed = dct((latent.mul_(spread * signs)).numpy(), norm="ortho", axis=1, overwrite_x=True)
    return torch.from_numpy(np.ascontiguousarray(mixed, dtype=np.float32)), is_ood


def auroc(scores: np.ndarray[Any, Any], is_ood: Tensor) -> float:
    """Return the AUROC in percent."""
    from sklearn.metrics import roc_auc_score

    return 100 * float(roc_auc_score(is_ood.numpy(), scores))


def run_ours(rows: Tensor, is_ood: Tensor, test: Tensor) -> tuple[float, float, np.ndarray[Any, Any]]:
    """Return seconds, chosen C and test scores."""
    inliers, outliers = rows[~is_ood], rows[is_ood]
    start = clock()
    scorer = LogisticScorer().fit(inliers, outliers)
    return clock() - start, scorer.penalty_.item(), scorer.score(test).numpy()


def run_sklearn(rows: Tensor, is_ood: Tensor, test: Tensor) -> tuple[float, float, np.ndarray[Any, Any]]:
    """Return seconds, chosen C and test scores."""
    from sklearn.linear_model import LogisticRegressionCV
    from sklearn.preprocessing import StandardScaler

    order = torch.argsort(is_ood.int(), stable=True)  # inliers first, as ours gets them
    ordered, labels = rows[order].numpy(), is_ood[order].numpy()
    start = clock()
    scaler = StandardScaler().fit(ordered)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed defaults, and problems that did not converge
        model = LogisticRegressionCV(scoring="accuracy").fit(scaler.transform(ordered), labels)
    seconds = clock() - start
    return seconds, float(np.ravel(model.C_)[0]), scaler.transform(test.numpy()) @ model.coef_[0]


def compare(count: int, columns: int, repeats: int) -> dict[str, float]:
    """Fit with both, alternating, and return medians of the seconds with what came out."""
    rows, is_ood = make_rows(count, columns)
    test, test_is_ood = make_rows(TEST_ROWS, columns, seed=1)
    seconds: dict[str, list[float]] = {"ours": [], "sklearn": []}
    result: dict[str, float] = {"rows": count, "columns": columns, "repeats": repeats}
    for _ in range(repeats):
        for name, run in (("ours", run_ours), ("sklearn", run_sklearn)):
            took, penalty, scores = run(rows, is_ood, test)
            seconds[name].append(took)
            result[f"{name}_C"], result[f"{name}_auroc"] = penalty, auroc(scores, test_is_ood)
    for name, values in seconds.items():
        result[f"{name}_seconds"] = statistics.median(values)
        result[f"{name}_slowest"], result[f"{name}_fastest"] = max(values), min(values)
    result["ratio"] = result["sklearn_seconds"] / result["ours_seconds"]
    return result


def main() -> None:
    """Run the sizes asked for and print one line for each."""
    parser = argparse.ArgumentParser(description="Fit time of the logistic scorer beside sklearn's.")
    parser.add_argument("--full", action="store_true", help="also 20,000 x 8,512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="count processor time; use with --threads 1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    global clock
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    sizes = [(2000, 2032, 3)] + ([(20000, 8512, 1)] if options.full else [])
    print("    rows  columns    sklearn s       ours s   ratio  AUROC sklearn / ours        C sklearn / ours")
    results = []
    for count, columns, repeats in sizes:
        with threadpool_limits(options.threads):
            row = compare(count, columns, repeats)
        results.append(row)
        print(
            f"{count:8,} {columns:8,} {row['sklearn_seconds']:12.1f} {row['ours_seconds']:12.2f} {row['ratio']:7.1f}"
            f"         {row['sklearn_auroc']:6.2f} / {row['ours_auroc']:6.2f}"
            f"   {row['sklearn_C']:14.4g} / {row['ours_C']:.4g}",
            flush=True,
        )
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
