"""`python -m benchmarks`: every speed benchmark, one table each, everything in one JSON file, and the plot.

`python -m benchmarks guarantees`, `monitor` and `history` are programs of their own: see `--help` of each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import early_exit, export, fit, guarantees, history, monitor, peers, plot, recording, subjects, timing
from benchmarks.timing import table
from neuralmean.models import allocator as memory

PARTS = ("recording", "export", "peers", "early-exit", "fit")


PROGRAMS = {"guarantees": guarantees.main, "history": history.main, "monitor": monitor.main}


def main() -> int:
    """Run what was asked for and write the results."""
    if len(sys.argv) > 1 and sys.argv[1] in PROGRAMS:
        PROGRAMS[sys.argv.pop(1)]()
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small batches and few images: a minute or two")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--models", nargs="+", default=None, help=f"of {', '.join(subjects.NAMES)}")
    parser.add_argument("--batches", nargs="+", type=int, default=None)
    parser.add_argument("--modes", nargs="+", choices=recording.MODES, default=None)
    parser.add_argument("--seconds", type=float, default=None, help="about how long to measure each combination")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count processor time: for a machine that others use too"
    )
    parser.add_argument(
        "--call-by-call",
        action="store_true",
        help="single inputs take turns at every call, not after seven of them",
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    memory.keep_freed()
    if options.cpu_time:
        timing.clock = time.process_time
    timing.call_by_call = options.call_by_call
    quick = options.quick
    names = tuple(options.models or (("resnet56", "vit") if quick else subjects.NAMES))
    batches = tuple(options.batches or ((1, 8) if quick else (1, 32, 128)))
    modes = tuple(options.modes or (recording.MODES[:2] if quick else recording.MODES))
    seconds = options.seconds or (1.0 if quick else 10.0)
    results: dict[str, Any] = {"machine": _machine(), "quick": quick, "clock": timing.clock.__name__}
    options.out.mkdir(parents=True, exist_ok=True)
    for part in options.only:
        print(f"\n## {part}\n", flush=True)
        results[part] = []
        for row in _run(part, names, batches, modes, seconds, quick):
            results[part].append(row)
            # At once, so that an interruption loses one row.
            (options.out / "speed.json").write_text(json.dumps(results, indent=1) + "\n")
    if "peers" in results and plot.draw(results["peers"], options.out / "cost.png", batch=batches[0]):
        print(f"\nplot: {options.out / 'cost.png'}")
    print(f"\n{_summary(results)}\n\nresults: {options.out / 'speed.json'}")
    return 0


def _run(
    part: str, names: tuple[str, ...], batches: tuple[int, ...], modes: tuple[str, ...], seconds: float, quick: bool
) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    residuals = [name for name in ("resnet56", "resnet34") if name in names] or ["resnet56"]
    try:
        if part == "recording":
            yield from recording.run(names=names, batches=batches, modes=modes, seconds=seconds)
        elif part == "export":
            yield from export.run(names=names, batches=batches, seconds=seconds)
        elif part == "fit":
            yield from fit.run(name=residuals[0], sizes=(500, 1000) if quick else (1000, 5000, 20000, 50000))
        for name in residuals:
            if part == "peers":
                sizes = (200, 100) if quick else (2000, 1000)
                yield from peers.run(
                    name=name, batches=batches[:2], n_fit=sizes[0], n_test=sizes[1], seconds=seconds * 3
                )
            elif part == "early-exit":
                n, timed = (100, 10) if quick else (1000, 100)
                yield from early_exit.run(name=name, scorers=("logistic",), n=n, n_timed=timed, seconds=seconds * 3)
    except ImportError as error:  # an extra that is not installed: the other parts still run
        print(f"{part} was left out: {error}", file=sys.stderr)


def _machine() -> dict[str, Any]:
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "when": time.strftime("%Y-%m-%d"),
    }


def _summary(results: dict[str, Any]) -> str:
    parts = []
    for part in ("recording", "export"):
        key = "recorder" if part == "recording" else "detection"
        rows = [
            {
                **row,
                "ratio": f"{row[key]['ratio']:.3f}",
                "spread": f"{row[key]['ratio_low']:.3f}-{row[key]['ratio_high']:.3f}",
            }
            | {name: f"{row[name]['ratio']:.3f}" if name in row else None for name in ("naive", "frozen")}
            for row in results.get(part) or []
        ]
        if rows:
            parts.append(table(rows, ["model", "mode", "batch", "ratio", "spread", "naive", "frozen"]))
    methods: list[dict[str, Any]] = [
        {"model": row["model"], "method": row["method"]}
        | {key: f"{value['ratio']:.2f}" for key, value in row.items() if key.startswith("batch")}
        | row.get("auroc", {})
        for row in results.get("peers") or []
    ]
    if methods:
        parts.append(table(methods, list(max(methods, key=lambda row: len(list(row))))))
    if results.get("fit"):
        parts.append(
            table(
                results["fit"],
                ["model", "scorer", "images", "seconds", "proportional", "start_mb", "peak_mb", "file_bytes"],
            )
        )
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
