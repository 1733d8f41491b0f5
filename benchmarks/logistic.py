"""How long the logistic scorer takes to fit, beside sklearn's LogisticRegressionCV on the same rows and cores.

    python benchmarks/logistic.py                  2,000 rows x 2,032 columns (ResNet-56), three times
    python benchmarks/logistic.py --full           also 20,000 rows x 8,512 columns (ResNet-34), once: sklearn needs long,
                                                   and is stopped after 12 times as long as ours took
    python benchmarks/logistic.py --out FILE.json  also write the rows as JSON
    python benchmarks/logistic.py --cpu-time --threads 1      processor time, for a machine that others use too

The rows are made up, with what makes real vectors hard: the eigenvalues of their correlation matrix fall like those of
ResNet-56 on CIFAR-10 and CIFAR-100 (264, 54, 4.3, 0.1 at number 1, 11, 51, 301 of 2,032), and part of the difference
between the two kinds lies in directions of little variance. Both sides do the same work from the same float32 rows:
standardise, ten penalties by five folds, refit. The runs alternate. Where sklearn was stopped, the ratio is the least
that it can be, and its AUROC is that of one fit with the penalty that ours chose, run until it has converged.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
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
PATIENCE = 12
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


def run_sklearn(
    rows: Tensor, is_ood: Tensor, test: Tensor, penalty: float | None = None
) -> tuple[float, float, np.ndarray[Any, Any]]:
    """Return seconds, chosen C and test scores; with `penalty` there is nothing to choose."""
    from sklearn.linear_model import LogisticRegression, LogisticRegressionCV
    from sklearn.preprocessing import StandardScaler

    order = torch.argsort(is_ood.int(), stable=True)  # inliers first, as ours gets them
    ordered, labels = rows[order].numpy(), is_ood[order].numpy()
    start = clock()
    scaler = StandardScaler().fit(ordered)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # renamed defaults, and problems that did not converge
        # A single fit runs to its end: after the usual 100 steps it is not there yet.
        one = {"C": penalty, "max_iter": 10_000}
        model = LogisticRegressionCV(scoring="accuracy") if penalty is None else LogisticRegression(**one)
        model.fit(scaler.transform(ordered), labels)
    seconds = clock() - start
    chosen = float(np.ravel(model.C_)[0]) if penalty is None else penalty
    return seconds, chosen, scaler.transform(test.numpy()) @ model.coef_[0]


def compare_at_most(count: int, columns: int, threads: int) -> dict[str, float]:
    """Fit once with both; sklearn in a process of its own that is stopped after `PATIENCE` times as long as ours."""
    rows, is_ood = make_rows(count, columns)
    test, test_is_ood = make_rows(TEST_ROWS, columns, seed=1)
    took, penalty, scores = run_ours(rows, is_ood, test)
    result: dict[str, float] = {"rows": count, "columns": columns, "repeats": 1, "ours_seconds": took}
    result |= {"ours_C": penalty, "ours_auroc": auroc(scores, test_is_ood)}
    del rows, test
    theirs = _sklearn_apart(count, columns, threads, None, PATIENCE * took)
    if theirs is None:
        alone = _sklearn_apart(count, columns, threads, penalty, 2 * PATIENCE * took)
        found = float("nan") if alone is None else alone["auroc"]
        theirs = {"seconds": PATIENCE * took, "C": float("nan"), "auroc": found}
        result["stopped"] = 1
    result |= {f"sklearn_{key}": value for key, value in theirs.items()}
    result["ratio"] = result["sklearn_seconds"] / took
    return result


def _sklearn_apart(
    count: int, columns: int, threads: int, penalty: float | None, seconds: float
) -> dict[str, float] | None:
    """Return seconds, penalty and AUROC of sklearn, or None if it took longer than `seconds`; making rows is not counted."""
    command = [sys.executable, __file__, "--threads", str(threads), "--sklearn-alone", str(count), str(columns)]
    command += [] if penalty is None else ["--penalty", repr(penalty)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        stop = threading.Timer(seconds, process.kill)
        lines: list[str] = []
        for line in process.stdout or ():
            if not lines:
                stop.start()  # the first line says that the rows are there
            lines.append(line)
        stop.cancel()
    found: dict[str, float] | None = json.loads(lines[1]) if len(lines) > 1 else None
    return found


def sklearn_alone(count: int, columns: int, penalty: float | None) -> None:
    """Do sklearn's part of `compare_at_most`, in the process that it is in."""
    rows, is_ood = make_rows(count, columns)
    test, test_is_ood = make_rows(TEST_ROWS, columns, seed=1)
    print("ready", flush=True)
    took, chosen, scores = run_sklearn(rows, is_ood, test, penalty)
    print(json.dumps({"seconds": took, "C": chosen, "auroc": auroc(scores, test_is_ood)}), flush=True)


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
    parser.add_argument("--sklearn-alone", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--penalty", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    global clock
    clock = time.process_time if options.cpu_time else time.perf_counter
    torch.set_num_threads(options.threads)
    if options.sklearn_alone is not None:
        with threadpool_limits(options.threads):
            count, columns = options.sklearn_alone
            sklearn_alone(count, columns, options.penalty)
        return
    sizes = [(2000, 2032, 3)] + ([(20000, 8512, 1)] if options.full else [])
    print("    rows  columns    sklearn s       ours s   ratio  AUROC sklearn / ours        C sklearn / ours")
    results = []
    for count, columns, repeats in sizes:
        with threadpool_limits(options.threads):
            row = compare(count, columns, repeats) if repeats > 1 else compare_at_most(count, columns, options.threads)
        results.append(row)
        print(
            f"{count:8,} {columns:8,} {row['sklearn_seconds']:12.1f} {row['ours_seconds']:12.2f} "
            f"{'>' if 'stopped' in row else ' '}{row['ratio']:6.1f}"
            f"         {row['sklearn_auroc']:6.2f} / {row['ours_auroc']:6.2f}"
            f"   {row['sklearn_C']:14.4g} / {row['ours_C']:.4g}",
            flush=True,
        )
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
