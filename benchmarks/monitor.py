"""Delay to alarm and false alarms of `Monitor` on real images.

    python benchmarks/monitor.py --weights resnet56-cifar10.safetensors --data DIR [--limit N] [--cache FILE]

DIR holds cifar10-train, cifar10-test, cifar100-test and svhn-test as `.npz` with `images`. The model runs once over the
images; scores and vectors are cached. Each run splits CIFAR-10 test anew, at random, into held-out images and a stream.

- pure:  streams of CIFAR-10 test alone; how many raise an alarm, against what was promised
- near:  the stream turns wholly to CIFAR-100 at item 2,000 (`--turn`)
- far:   the same with SVHN
- mixed: from item 2,000 on every twentieth item, on average, is SVHN

Layers that moved are counted at the alarm and some items after the turn: smallest, middle and largest number over the runs.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from neuralmean import Calibration, Decision, Detector
from neuralmean.bench import models
from neuralmean.monitor.monitor import Monitor
from neuralmean.stats.held_out_profile import HeldOutProfile

STEP = 4  # items at a time
AFTER = (32, 64, 128)  # items after the turn, when it is asked which layers moved
SETS = ("cifar10-test", "cifar100-test", "svhn-test")


def observe(arguments: argparse.Namespace) -> tuple[Detector, dict[str, tuple[Tensor, Tensor]]]:
    """Fit the detector and return scores and vectors of every set, from the cache where there is one."""
    trained = models.load(arguments.model, arguments.weights)
    if arguments.scores_only and arguments.cache and arguments.cache.exists():
        # Scores come from the cache, so the detector only carries calibrations.
        return Detector(trained.model, scorer="average"), torch.load(arguments.cache, weights_only=True)
    train = _images(arguments.data, "cifar10-train")
    order = np.random.default_rng(0).permutation(len(train))[: arguments.fit]
    detector = Detector(trained.model, scorer=arguments.scorer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the calibration is replaced in every run
        detector.fit(trained.preprocess(train[np.sort(order)]))
    if arguments.cache and arguments.cache.exists():
        return detector, torch.load(arguments.cache, weights_only=True)
    found = {}
    for name in SETS:
        images = _images(arguments.data, name)
        images = images[np.sort(np.random.default_rng(1).permutation(len(images))[: arguments.limit or None])]
        parts = [_observe(detector, trained.preprocess(images[i : i + 128])) for i in range(0, len(images), 128)]
        scores, vectors = zip(*parts, strict=True)
        found[name] = (torch.cat(scores), torch.cat(vectors))
        print(f"{name}: {len(images)} images", flush=True)
    if arguments.cache:
        torch.save(found, arguments.cache)
    return detector, found


def _observe(detector: Detector, x: Tensor) -> tuple[Tensor, Tensor]:
    seen = next(detector.observe_each(x, batch_size=len(x)))
    return seen.score, cast(Tensor, seen.vectors).half()


def _images(folder: Path, name: str) -> np.ndarray:
    images: np.ndarray = np.load(folder / f"{name}.npz")["images"]
    return images


def streams(found: dict[str, tuple[Tensor, Tensor]], case: str, run: int, held_out: int, turn: int) -> Iterator[Tensor]:
    """Yield scores and vectors, those held out and those of the stream, of one run."""
    generator = torch.Generator().manual_seed(run)
    scores, vectors = found["cifar10-test"]
    order = torch.randperm(len(scores), generator=generator)
    yield scores[order[:held_out]]
    yield vectors[order[:held_out]]
    stream, turned = scores[order[held_out:]].clone(), vectors[order[held_out:]].clone()
    if case != "pure":
        other_scores, other_vectors = found["cifar100-test" if case == "near" else "svhn-test"]
        places = torch.arange(turn, len(stream))
        if case == "mixed":
            places = places[torch.rand(len(places), generator=generator) < 0.05]
        picks = torch.randint(len(other_scores), (len(places),), generator=generator)
        stream[places], turned[places] = other_scores[picks], other_vectors[picks]
    yield stream
    yield turned


def _profile(detector: Detector, vectors: Tensor) -> HeldOutProfile:
    seen = detector.setup.empty_profile()
    seen.add(vectors)
    return seen.profile()


def measure(
    detector: Detector, found: dict[str, tuple[Tensor, Tensor]], case: str, runs: int, a: argparse.Namespace
) -> dict[str, Any]:
    """Return the outcome of `runs` streams, each seen four items at a time."""
    delays: list[int | None] = []
    false_alarms, by, seconds, n_items = 0, list[str | None](), 0.0, 0
    named: dict[str, list[int]] = {}
    n_inside = 0  # alarms that say rightly since when
    for run in range(runs):
        held_out, known, scores, vectors = streams(found, case, run, a.held_out, a.turn)
        scores, vectors = scores[: a.length], vectors[: a.length]
        calibration = Calibration.of(held_out, 0.05)
        profile = None if a.without_held_out_vectors or a.scores_only else _profile(detector, known)
        detector.adopt(replace(detector.learnt, calibration=calibration, source="held_out", profile=profile))
        monitor = Monitor(detector, false_alarm_rate=a.rate, seed=run)
        for first in range(0, len(scores), STEP):
            few, was_on = slice(first, first + STEP), monitor.drift
            begin = time.perf_counter()
            shown = None if a.scores_only else vectors[few].float()
            is_on = monitor.update(Decision(scores[few], calibration), vectors=shown)
            seconds, n_items = seconds + time.perf_counter() - begin, n_items + STEP
            since = first + STEP - a.turn
            if case != "pure" and is_on and not was_on:
                named.setdefault("at the alarm", []).append(_n_moved(monitor))
            if is_on and a.scores_only:
                break
            if case != "pure" and since in AFTER:
                named.setdefault(f"{since} items after the turn", []).append(_n_moved(monitor))
        status, alarm = monitor.status(), monitor.alarm
        n_inside += alarm is not None and alarm.since[0] <= a.turn + 1 <= alarm.since[1]
        if status.drift_at is not None and (case == "pure" or status.drift_at <= a.turn):
            false_alarms += 1
        elif case != "pure":
            delays.append(None if status.drift_at is None else status.drift_at - a.turn)
            by.append(status.drift_by)
        if case == "pure":
            named.setdefault("at the end", []).append(_n_moved(monitor))
    seen = sorted(delay for delay in delays if delay is not None)
    return {
        "case": case, "runs": runs, "items": n_items // runs, "false_alarms": false_alarms, "promised": a.rate,
        "missed": delays.count(None), "median_delay": seen[len(seen) // 2] if seen else None,
        "largest_delay": seen[-1] if seen else None, "by": {name: by.count(name) for name in ("items", "blocks", "repeats")},
        "change_inside_since": n_inside,
        "layers": len(detector.layers), "layers_that_moved": {when: _middle(counts) for when, counts in named.items()},
        "microseconds_per_item": round(1e6 * seconds / n_items, 1),
    }  # fmt: skip


def _n_moved(monitor: Monitor) -> int:
    return sum(layer.moved for layer in monitor.status().layers)


def _middle(counts: list[int]) -> list[int]:
    """Return the smallest, the middle and the largest."""
    counts = sorted(counts)
    return [counts[0], counts[len(counts) // 2], counts[-1]]


def main() -> None:
    """Run the cases and print one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--scorer", default=None)
    parser.add_argument("--fit", type=int, default=5000, help="training images to fit on")
    parser.add_argument("--limit", type=int, default=0, help="images of each set; 0 takes all")
    parser.add_argument("--held-out", type=int, default=2000)
    parser.add_argument("--turn", type=int, default=2000)
    parser.add_argument("--length", type=int, default=4500, help="items in a stream")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--pure", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument(
        "--without-held-out-vectors", action="store_true", help="only scores of the held-out images are known"
    )
    parser.add_argument("--scores-only", action="store_true", help="no vectors: no test on blocks, no layers")
    parser.add_argument("--cache", type=Path)
    arguments = parser.parse_args()
    detector, found = observe(arguments)
    for case, runs in (*((case, arguments.runs) for case in ("near", "far", "mixed")), ("pure", arguments.pure)):
        print(json.dumps(measure(detector, found, case, runs, arguments)), flush=True)


if __name__ == "__main__":
    main()
