"""Own code next to the library that could replace it: `python -m benchmarks.own_code` prints the figures of decision record 6."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from neuralmean.data.images import pool
from neuralmean.stats.metrics import bootstrap, evaluate


def seconds(action: Callable[[], object], turns: int = 5) -> float:
    """Return the median time of an action, after one call that does not count."""
    action()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return median(times)


def compare_metrics(size: int = 10_000, resamples: int = 20) -> None:
    """Print the time of a bootstrap resample: five figures of ours, AUROC alone of scikit-learn."""
    from sklearn.metrics import roc_auc_score

    random = np.random.default_rng(0)
    inside, outside = random.normal(0, 1, size), random.normal(1, 1, size)
    scores, labels = np.concatenate([inside, outside]), np.repeat([0, 1], size)

    def peer() -> None:
        for _ in range(resamples):
            rows = np.concatenate([random.integers(0, size, size), size + random.integers(0, size, size)])
            roc_auc_score(labels[rows], scores[rows])

    ours = seconds(lambda: bootstrap(inside, outside, resamples=resamples, aupr=False)) / resamples
    theirs = seconds(peer) / resamples
    difference = abs(evaluate(inside, outside).auroc / 100 - roc_auc_score(labels, scores))
    print(f"metrics, one resample of 2 x {size:,} scores: {1e3 * ours:.2f} ms; scikit-learn {1e3 * theirs:.2f} ms")
    print(f"metrics, difference of AUROC from scikit-learn: {difference:.1g}")


def measure_start(code: str, *arguments: str) -> tuple[float, float]:
    """Return seconds and MB of a new process that runs `code`, the median of three."""
    # Not `ru_maxrss`: it begins with the peak of the process that started this one. Linux only.
    report = "\nprint(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmRSS')))"
    times, sizes = [], []
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", code + report, *arguments], capture_output=True, text=True, check=True
        )
        times.append(time.perf_counter() - start)
        sizes.append(float(done.stdout.split()[-1]) / 1024)
    return median(times), median(sizes)


def compare_workers() -> None:
    """Print what a decoding process takes to start: ours without torch, and one of torch's DataLoader (spawned)."""
    boot = pool._BOOT.replace(
        "from neuralmean.data.images.worker import main; main()", "import neuralmean.data.images.worker"
    )
    own = measure_start(boot, str(pool._PACKAGE), *filter(None, sys.path))
    peer = measure_start("import torch.utils.data, PIL.Image")
    for name, (start, size) in {"own worker": own, "DataLoader worker (imports torch)": peer}.items():
        print(f"image pool, {name}: starts in {start:.2f} s, holds {size:.0f} MB")


if __name__ == "__main__":
    compare_metrics()
    compare_workers()
