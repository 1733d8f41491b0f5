"""Delay to alarm and false alarms of `Monitor` on real images.

    python -m benchmarks monitor --weights resnet56-cifar10.safetensors --data DIR --cache DIR [--cases near far] [--runs N]

DIR of the data holds cifar10-train, cifar10-test, cifar100-test and svhn-test as `.npz` with `images`. The model runs once over
the images; the fitted detector, scores and vectors are kept in the cache. Each run splits CIFAR-10 test anew, at random, into
held-out images and a stream, which a monitor sees four at a time (32 at a time in `pure`).

- pure:   streams of CIFAR-10 test alone; how many raise an alarm, against what was promised
- near:   the stream turns wholly to CIFAR-100 at item 2,000 (`--turn`)
- far:    the same with SVHN
- mixed:  from item 2,000 on every twentieth item, on average, is SVHN
- frozen: from item 2,000 on every item is the one before it again

A line of JSON for each case, then a table.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from neuralmean import Calibration, Decision, Detector
from neuralmean.bench import models
from neuralmean.monitor.monitor import Monitor
from neuralmean.stats.held_out_profile import HeldOutProfile

SETS = ("cifar10-test", "cifar100-test", "svhn-test")
Found = dict[str, tuple[Tensor, Tensor]]  # scores and vectors of each set


class Case(NamedTuple):
    """One kind of stream."""

    name: str
    runs: int
    after: int  # items after the turn, at most
    step: int = 4  # items at a time


CASES = {
    "near": Case("turns to CIFAR-100", 41, 300),
    "far": Case("turns to SVHN", 41, 300),
    "mixed": Case("turns to 5 % SVHN", 41, 2500),
    "frozen": Case("the camera freezes", 12, 40),
    "pure": Case("CIFAR-10 alone", 300, 2500, 32),
}


class Run(NamedTuple):
    """What happened on one stream; items are counted from the turn."""

    alarm_at: int | None
    by: str | None
    inside: bool  # whether the turn lies in the interval that the alarm gives
    seconds: float
    items: int


def observe(arguments: argparse.Namespace) -> tuple[Detector, Found]:
    """Fit the detector and return scores and vectors of every set, from the cache where there is one."""
    trained = models.load(arguments.model, arguments.weights)
    kept, vectors = arguments.cache / "detector.nmd", arguments.cache / "found.pt"
    if vectors.exists():
        return Detector.load(kept, trained.model), torch.load(vectors, weights_only=True)
    arguments.cache.mkdir(parents=True, exist_ok=True)
    train = _images(arguments.data, "cifar10-train")
    order = np.random.default_rng(0).permutation(len(train))[: arguments.fit]
    detector = Detector(trained.model, scorer=arguments.scorer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the calibration is replaced in every run
        detector.fit(trained.preprocess(train[np.sort(order)]))
    found = {}
    for name in SETS:
        images = _images(arguments.data, name)
        most = arguments.limit if name == "cifar10-test" else arguments.outside
        images = images[np.sort(np.random.default_rng(1).permutation(len(images))[:most])]
        parts = [_observe(detector, trained.preprocess(images[i : i + 128])) for i in range(0, len(images), 128)]
        scores, vectors_ = zip(*parts, strict=True)
        found[name] = (torch.cat(scores), torch.cat(vectors_))
    detector.save(kept)
    torch.save(found, vectors)
    return detector, found


def _observe(detector: Detector, x: Tensor) -> tuple[Tensor, Tensor]:
    seen = next(detector.observe_each(x, batch_size=len(x)))
    return seen.score, cast(Tensor, seen.vectors).half()


def _images(folder: Path, name: str) -> np.ndarray:
    images: np.ndarray = np.load(folder / f"{name}.npz")["images"]
    return images


def stream(found: Found, case: str, run: int, held_out: int, turn: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return scores and vectors, those held out and those of the stream, of one run."""
    generator = torch.Generator().manual_seed(run)
    scores, vectors = found["cifar10-test"]
    order = torch.randperm(len(scores), generator=generator)
    rest = order[held_out : held_out + turn + CASES[case].after]
    shown, turned = scores[rest].clone(), vectors[rest].clone()
    places = torch.arange(turn, len(rest))
    if case == "frozen":
        shown[places], turned[places] = scores[rest[turn - 1]], vectors[rest[turn - 1]]
    elif case != "pure":
        other_scores, other_vectors = found["cifar100-test" if case == "near" else "svhn-test"]
        if case == "mixed":
            places = places[torch.rand(len(places), generator=generator) < 0.05]
        picks = torch.randint(len(other_scores), (len(places),), generator=generator)
        shown[places], turned[places] = other_scores[picks], other_vectors[picks]
    known = order[:held_out]
    return scores[known], vectors[known], shown, turned


def _profile(detector: Detector, vectors: Tensor) -> HeldOutProfile:
    seen = detector.setup.empty_profile()
    seen.add(vectors)
    return seen.profile()


def watch(detector: Detector, found: Found, case: str, run: int, arguments: argparse.Namespace) -> Run:
    """Return what happened on one stream, up to the alarm."""
    held_out, known, scores, vectors = stream(found, case, run, arguments.held_out, arguments.turn)
    calibration = Calibration.of(held_out, 0.05)
    profile = None if arguments.scores_only else _profile(detector, known)
    detector.adopt(replace(detector.learnt, calibration=calibration, source="held_out", profile=profile))
    monitor, seconds, first = Monitor(detector, false_alarm_rate=arguments.rate, seed=run), 0.0, 0
    step = CASES[case].step
    while first < len(scores) and monitor.alarm is None:
        few = slice(first, first + step)
        shown = None if arguments.scores_only else vectors[few].float()
        begin = time.perf_counter()
        monitor.update(Decision(scores[few], calibration), vectors=shown)
        seconds, first = seconds + time.perf_counter() - begin, first + step
    alarm = monitor.alarm
    if alarm is None:
        return Run(None, None, False, seconds, first)
    inside = alarm.since[0] <= arguments.turn + 1 <= alarm.since[1]
    return Run(alarm.item - arguments.turn, alarm.test, inside, seconds, first)


def summarise(case: str, runs: list[Run], rate: float) -> dict[str, Any]:
    """Return the outcome of the streams of one case."""
    is_pure = case == "pure"
    false = [run for run in runs if run.alarm_at is not None and (is_pure or run.alarm_at <= 0)]
    right = [] if is_pure else [run for run in runs if run.alarm_at is not None and run.alarm_at > 0]
    delays = sorted(cast(int, run.alarm_at) for run in right)
    return {
        "case": CASES[case].name, "runs": len(runs), "false_alarms": len(false), "promised": rate,
        "missed": 0 if is_pure else len(runs) - len(false) - len(right),
        "median_delay": delays[len(delays) // 2] if delays else None, "largest_delay": delays[-1] if delays else None,
        "within_20": sum(delay <= 20 for delay in delays), "change_inside_since": sum(run.inside for run in right),
        "by": {name: sum(run.by == name for run in right) for name in ("items", "blocks", "repeats")},
        "microseconds_per_item": round(1e6 * sum(run.seconds for run in runs) / sum(run.items for run in runs), 1),
    }  # fmt: skip


def _row(found: dict[str, Any]) -> str:
    columns = (
        "case",
        "runs",
        "false_alarms",
        "missed",
        "median_delay",
        "largest_delay",
        "within_20",
        "change_inside_since",
    )
    return " | ".join(["", *("-" if found[name] is None else str(found[name]) for name in columns), ""]).strip()


def main() -> None:
    """Run the cases and print one JSON object a line, then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, required=True, help="folder for the detector, scores and vectors")
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--scorer", default=None)
    parser.add_argument("--fit", type=int, default=5000, help="training images to fit on")
    parser.add_argument("--limit", type=int, default=10_000, help="images of CIFAR-10 test")
    parser.add_argument("--outside", type=int, default=10_000, help="images of CIFAR-100 and of SVHN")
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--turn", type=int, default=2000)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, help="of each case, rather than its own number")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--scores-only", action="store_true", help="no vectors: no test on blocks, no layers")
    arguments = parser.parse_args()
    detector, found = observe(arguments)
    rows = []
    for case in arguments.cases:
        count = arguments.runs or CASES[case].runs
        outcome = summarise(
            case, [watch(detector, found, case, run, arguments) for run in range(count)], arguments.rate
        )
        print(json.dumps(outcome), flush=True)
        rows.append(_row(outcome))
    print("\n| stream | runs | false alarms | missed | median delay | largest | within 20 | change inside `since` |")
    print("|---|---|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    main()
