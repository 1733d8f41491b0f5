"""Time and memory of `fit` by data size, and the size of the saved file."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import subjects
from neuralmean import Detector
from neuralmean.errors import CalibrationWarning
from neuralmean.models import allocator as memory

TURNS = 5
SCORERS = ("average", "logistic", "typicality")
MOST_LEARNT = 20_000  # images; a scorer that learns is not measured on more, to keep the time in bounds


def run(*, name: str, sizes: tuple[int, ...], scorers: tuple[str, ...] = SCORERS) -> list[dict[str, Any]]:
    """Return one row for each scorer and data size; each fit has a process of its own, as memory never goes down again.

    With the first scorer small sizes are measured several times, spread over the run: the speed of most machines drifts while
    the large ones run.
    """
    rows = _measure_all(name, sizes, scorers[0], TURNS)
    for scorer in scorers[1:]:
        rows += _measure_all(name, tuple(size for size in sizes if size <= MOST_LEARNT), scorer, 1)
    return rows


def _measure_all(name: str, sizes: tuple[int, ...], scorer: str, turns: int) -> list[dict[str, Any]]:
    found: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    for turn in range(turns):
        for size in sizes:
            if turn == 0 or size * turns <= max(sizes):
                command = [sys.executable, "-m", "benchmarks.fit", name, str(size), scorer]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[size].append(json.loads(done.stdout.splitlines()[-1]))
    rows: list[dict[str, Any]] = []
    for size, runs in found.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        rows.append(runs[0] | {"seconds": seconds, "runs": len(runs)})
        rows[-1]["proportional"] = seconds / size / (rows[0]["seconds"] / sizes[0])
        print(
            f"{name:12s} fit {scorer:10s} on {size:6d} images: {seconds:8.2f} s (median of {len(runs)}, "
            f"{rows[-1]['proportional']:.2f} of proportional), peak {rows[-1]['peak_mb']:.0f} MB "
            f"({rows[-1]['start_mb']:.0f} MB before the fit), file {rows[-1]['file_bytes'] / 1e6:.2f} MB",
            flush=True,
        )
    return rows


class Stream:
    """Batches of noise that are never all in memory."""

    def __init__(self, size: int, batch: int = 64) -> None:
        self.size, self.batch = size, batch

    def __len__(self) -> int:
        return (self.size + self.batch - 1) // self.batch

    def __iter__(self) -> Iterator[Tensor]:
        for start in range(0, self.size, self.batch):
            yield subjects.images(min(self.batch, self.size - start), seed=start)


def measure(name: str, size: int, scorer: str) -> dict[str, Any]:
    """Fit once in this process and say what it took."""
    model = subjects.build(name)
    detector = Detector(model, scorer=scorer)
    with torch.no_grad():
        model(subjects.images(64))
    before = memory.peak()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        begin = time.perf_counter()
        detector.fit(Stream(size))
        seconds = time.perf_counter() - begin
    with tempfile.TemporaryDirectory() as folder:
        detector.save(Path(folder) / "detector.nmd")
        file_bytes = (Path(folder) / "detector.nmd").stat().st_size
    return {
        "model": name,
        "scorer": scorer,
        "images": size,
        "seconds": seconds,
        "peak_mb": _mb(memory.peak()),
        "start_mb": _mb(before),
        "file_bytes": file_bytes,
    }


def _mb(size: int | None) -> float:
    """Return bytes as MB; NaN where the system does not say."""
    return float("nan") if size is None else size / 1e6


if __name__ == "__main__":
    torch.manual_seed(0)
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
