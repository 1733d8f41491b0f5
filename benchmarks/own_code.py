"""Own code next to the library that could replace it: `python -m benchmarks.own_code` prints the figures of records 6 and 8."""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor

from neuralmean import Detector, Reference
from neuralmean.data.images import pool
from neuralmean.data.progress import showing, track
from neuralmean.data.table import Blocks
from neuralmean.models.spec import resolve
from neuralmean.scorers.statistics import k_means
from neuralmean.stats.metrics import bootstrap, evaluate
from neuralmean.stats.moments import Moments


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


def compare_moments(batches: int = 100, rows: int = 64, channels: int = 2032) -> None:
    """Print the time to stream batches into mean and variance, and the error of both, of data far from zero."""
    from sklearn.preprocessing import StandardScaler

    data = [torch.randn(rows, channels, generator=torch.Generator().manual_seed(i)) + 1e4 for i in range(batches)]
    exact = torch.cat(data).double().var(dim=0, unbiased=False)

    def ours() -> Tensor:
        return Moments.of_blocks(data, channels).variance

    def theirs() -> Tensor:
        scaler = StandardScaler()
        for batch in data:
            scaler.partial_fit(batch.numpy())
        return torch.from_numpy(scaler.var_)

    for name, way in {"own": ours, "scikit-learn's StandardScaler": theirs}.items():
        error = ((way() - exact).abs() / exact).max().item()
        print(f"moments, {name}: {1e3 * seconds(way, 3) / batches:.2f} ms a batch, variance off by {error:.1g} at most")


def peak_of(action: Callable[[], object]) -> float:
    """Return how many MB of memory of its own, without mapped files, an action adds at its peak. Linux only."""

    def now() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

    start, ended, seen = now(), threading.Event(), [0.0]

    def watch() -> None:
        while not ended.wait(0.02):
            seen.append(now() - start)

    thread = threading.Thread(target=watch)
    thread.start()
    action()
    ended.set()
    thread.join()
    return max(seen)


def compare_k_means(rows: int = 100_000, columns: int = 512, clusters: int = 10) -> None:
    """Print time and memory of k-means on a table that lies in a file."""
    from sklearn.cluster import KMeans

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.npy"
        np.save(path, np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32))
        mapped = np.load(path, mmap_mode="r+")
        ways: dict[str, Callable[[], object]] = {
            "own": lambda: k_means(Blocks(torch.from_numpy(mapped)), clusters, iterations=5),
            "scikit-learn's KMeans": lambda: KMeans(clusters, n_init=1, max_iter=5, random_state=0).fit(mapped),
        }
        for name, way in ways.items():
            start = time.perf_counter()
            peak = peak_of(way)
            print(f"k-means, {name}: {peak:.0f} MB for a table of {mapped.nbytes / 1e6:.0f} MB, "
                  f"{time.perf_counter() - start:.1f} s")  # fmt: skip


def compare_progress(work: float = 4.0) -> None:
    """Print how many lines of progress a log file gets during some seconds of work."""
    from rich.console import Console
    from rich.progress import track as rich_track

    def lines_of(run: Callable[[], object], text: io.StringIO) -> int:
        seen: list[int] = []
        thread = threading.Timer(0.9 * work, lambda: seen.append(len(text.getvalue().splitlines())))
        thread.start()
        run()
        thread.join()
        return seen[0]

    def loop(items: object) -> None:
        for _ in items:  # type: ignore[attr-defined]
            time.sleep(work / 40)

    theirs = io.StringIO()
    print(
        "progress, rich:", lines_of(lambda: loop(rich_track(range(40), console=Console(file=theirs))), theirs), "lines"
    )
    with redirect_stderr(io.StringIO()) as text, showing("lines", every=1):
        ours = lines_of(lambda: loop(track(range(40), description="Working")), text)
    print("progress, own, a line a second:", ours, "lines")


def compare_batches(images: int = 256) -> None:
    """Print how many scores change in their last bits when other images share a forward pass, as Ray Data's blocks decide."""
    data = torch.rand(images, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = resolve("bench:resnet20").model
    detector = Detector(model, reference=Reference.from_data(model, None, data), scorer="average").calibrate(data)
    one, other = (torch.cat([detector.score(part) for part in torch.split(data, size)]) for size in (64, 1))
    changed, largest = (one != other).double().mean().item(), (one - other).abs().max().item()
    print(f"passes of 64 images and of one: {100 * changed:.0f} % of the scores differ, by {largest:.1g} at most")


if __name__ == "__main__":
    compare_metrics()
    compare_workers()
    compare_moments()
    compare_k_means()
    compare_progress()
    compare_batches()
