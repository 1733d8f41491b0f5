"""How fast `nmd score` is beside the bare model, and how much memory it takes.

    python -m benchmarks.command --weights resnet56-cifar10.safetensors --images cifar10-test.npz

Writes small PNGs, scores 1,000 and 10,000 of them with the command, and runs the model alone on the same images from
memory. Speed of the command is that of the images beyond the first 1,000, so that its start-up does not count; the
figure with start-up is printed beside it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from neuralmean.bench import models
from neuralmean.models import allocator as memory

_COMMAND = [sys.executable, "-c", "from neuralmean.cli import main; main()"]


def run_command(*args: str) -> tuple[float, int]:
    """Run `nmd ARGS` and return its seconds and its peak memory in MB."""
    start = time.perf_counter()
    process = subprocess.Popen([*_COMMAND, *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:  # what `wait4` says of it begins with the peak of this process
        peak = max(peak, memory.peak(process.pid) or 0)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"nmd {' '.join(args)} failed")
    return time.perf_counter() - start, peak // 2**20


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--images", required=True)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--freeze", action="store_true", help="score with the frozen detector")
    options = parser.parse_args()
    images = np.load(options.images)["images"][: options.count]
    trained = models.load("resnet56", options.weights)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few, many = folder / "few", folder / "many"
        for target, part in ((few, images[:1000]), (many, images)):
            target.mkdir()
            for index, image in enumerate(part):
                Image.fromarray(image).save(target / f"{index:05d}.png")
        saved, fit = str(folder / "m.nmd"), ("--weights", options.weights, "--id", str(few), "--out")
        run_command("fit", "bench:resnet56", *fit, saved)
        ratios = []
        for _ in range(options.repeat):
            start = time.perf_counter()
            with torch.no_grad():
                for first in range(0, len(images), 64):
                    trained.model(trained.preprocess(images[first : first + 64]))
            bare = len(images) / (time.perf_counter() - start)
            more = ["--freeze"] if options.freeze else []
            short, small = run_command("score", saved, str(few), "--out", str(folder / "a.csv"), *more)
            long, large = run_command("score", saved, str(many), "--out", str(folder / "b.csv"), *more)
            steady, whole = (len(images) - 1000) / (long - short), len(images) / long
            ratios.append(steady / bare)
            print(
                f"bare {bare:.0f} images/s; nmd score {steady:.0f} (with start-up {whole:.0f}): ratio {ratios[-1]:.2f}"
            )
            print(f"peak memory for 1,000 / {len(images):,} images: {small} / {large} MB")
    print(f"best of {len(ratios)}: {max(ratios):.2f}")


if __name__ == "__main__":
    main()
