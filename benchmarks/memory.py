"""What it brings to keep freed memory: passes of a model in two processes, one that keeps and one that does not.

    python -m benchmarks.memory

The two take turns, pass by pass, so that both see the same machine. Prints one JSON object a line.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

SUBJECTS = (("densenet100", 64), ("resnet56", 128), ("resnet34", 32), ("convnet4", 128))
TURNS = 9
PASSES = """
import resource, sys, time
from neuralmean.models import allocator as memory
if sys.argv[1] == "keep":
    memory.keep_freed()
import torch
from neuralmean.bench.models import build
model = build(sys.argv[2]).eval().to(memory_format=torch.channels_last)
images = torch.randn(int(sys.argv[3]), 3, 32, 32).contiguous(memory_format=torch.channels_last)
with torch.no_grad():
    model(images)
    for _ in sys.stdin:
        faults, begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        model(images)
        seconds = time.perf_counter() - begin
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, flush=True)
"""


def measure(name: str, batch: int) -> dict[str, object]:
    """Return medians of both processes for one model."""
    ways = ("give back", "keep")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PASSES, way.split()[0], name, str(batch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for way in ways
    ]
    found: dict[str, list[tuple[float, int]]] = {way: [] for way in ways}
    try:
        for turn in range(TURNS + 1):
            for way, process in zip(ways, processes, strict=True):
                assert process.stdin is not None and process.stdout is not None  # noqa: S101, PT018 - pipes, as asked for
                process.stdin.write("\n")
                process.stdin.flush()
                seconds, faults = process.stdout.readline().split()
                if turn:  # the first one warms up
                    found[way].append((float(seconds), int(faults)))
    finally:
        for process in processes:
            process.kill()
    medians = {way: statistics.median(one for one, _ in pairs) for way, pairs in found.items()}
    ratios = [kept[0] / given[0] for given, kept in zip(found["give back"], found["keep"], strict=True)]
    return {
        "model": name,
        "batch": batch,
        **{f"{way}, ms": round(1000 * value, 1) for way, value in medians.items()},
        **{f"{way}, page faults": round(statistics.median(count for _, count in found[way])) for way in ways},
        "ratio": round(statistics.median(ratios), 3),
    }


def main() -> None:
    """Measure every subject."""
    for name, batch in SUBJECTS:
        print(json.dumps(measure(name, batch)), flush=True)


if __name__ == "__main__":
    main()
