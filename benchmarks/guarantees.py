"""Simulations of what the library promises: how often each promise is broken.

    python benchmarks/guarantees.py [--runs 10000] [--streams 300] [--only TEXT]

Prints a row of a table for each promise and setting: what was promised, and what was measured over the runs. Scores are
normal, rounded to tenths ("ties"), or one of four values ("discrete"). `make slow` runs the same with 10,000 runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from neuralmean import Calibration, Decision, Detector
from neuralmean.monitor.monitor import Monitor

Floats = NDArray[np.float64]
SIZES = (200, 1000, 10_000)
SHAPES: dict[str, Callable[[Floats], Floats]] = {
    "normal": lambda values: values,
    "ties": lambda values: values.round(1),
    "discrete": lambda values: np.digitize(values, [-0.7, 0.6, 1.7]).astype(np.float64),
}


class Row(NamedTuple):
    """What was promised in one setting, and what was measured."""

    promise: str
    setting: str
    promised: float
    measured: float
    runs: int

    @property
    def is_kept(self) -> bool:
        """Whether the measured share is no more than chance explains, at three binomial deviations."""
        return self.measured <= self.promised + 3 * math.sqrt(self.promised * (1 - self.promised) / self.runs)

    def __str__(self) -> str:
        kept = "kept" if self.is_kept else "BROKEN"
        return f"| {self.promise} | {self.setting} | {self.promised:g} | {self.measured:.4f} | {self.runs:,} | {kept} |"


def confident_rates(runs: int) -> Iterator[Row]:
    """Yield how often the false-alarm rate is larger than asked for, with `confidence=0.95`."""
    for count in SIZES:
        for name, shape in SHAPES.items():
            random, fresh = np.random.default_rng(0), np.sort(shape(np.random.default_rng(1).normal(size=1_000_000)))
            broken = 0
            for _ in range(runs):
                calibration = Calibration.of(torch.from_numpy(shape(random.normal(size=count))), 0.05, confidence=0.95)
                above = len(fresh) - np.searchsorted(fresh, calibration.threshold, "right")
                broken += bool(above / len(fresh) > 0.05 + 0.0005)  # the rate itself is known to a million draws
            yield Row("rate 0.05 holds, 95 % sure", f"{count:,} held out, {name}", 0.05, broken / runs, runs)


def _batches(runs: int, count: int, shape: Callable[[Floats], Floats], n_in: int, n_out: int) -> Iterator[Decision]:
    random = np.random.default_rng(2)
    for _ in range(runs):
        values = shape(np.concatenate([random.normal(size=count + n_in), random.normal(2.5, 1, size=n_out)]))
        scores = torch.from_numpy(values)
        yield Decision(scores[count:], Calibration.of(scores[:count], 0.05))


def false_discoveries(runs: int) -> Iterator[Row]:
    """Yield the mean share of false ones in `select(fdr=0.1)`, and how often `most_false` is too small somewhere."""
    for count in SIZES:
        for name, shape in SHAPES.items():
            shares, broken = 0.0, 0
            for decision in _batches(runs, count, shape, 40, 20):
                chosen = decision.select(0.1)
                shares += chosen[:40].sum().item() / max(1, int(chosen.sum()))
                levels = sorted(set(decision.p_value.tolist()))[:30:6]
                broken += any(
                    int((decision.p_value[:40] <= level).sum()) > decision.most_false(level) for level in levels
                )
            setting = f"{count:,} held out, {name}"
            yield Row("select(fdr=0.1)", setting, 0.1, shares / runs, runs)
            yield Row("most_false, 95 % sure, any level", setting, 0.05, broken / runs, runs)


def group_rates(runs: int) -> Iterator[Row]:
    """Yield the mean false-alarm rate of each of two groups, one of which scores higher than the other."""
    for count in SIZES:
        for name, shape in SHAPES.items():
            random, flagged = np.random.default_rng(3), np.zeros(2)
            for _ in range(runs):
                labels = np.arange(count + 40) % 2
                scores = torch.from_numpy(shape(random.normal(size=count + 40) + 2 * labels))
                calibration = Calibration.of(scores[:count], 0.05, groups=labels[:count].tolist())
                decision = Decision(scores[count:], calibration, groups=tuple(map(str, labels[count:])))
                flags = decision.is_ood.numpy()
                flagged += [flags[labels[count:] == group].mean() for group in (0, 1)]
            for group in (0, 1):
                rate = flagged[group] / runs
                yield Row(f"rate 0.05 of group {group}", f"{count:,} held out, {name}", 0.05, rate, runs)


def _detector() -> Detector:
    torch.manual_seed(0)
    images, model = torch.rand(64, 3, 8, 8), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    model(images)
    return Detector(model, scorer="average").calibrate(images)


def _watch(detector: Detector, held_out: Floats, stream: Floats, seed: int, rate: float) -> bool:
    calibration = Calibration.of(torch.from_numpy(held_out), 0.05)
    detector.adopt(replace(detector.learnt, calibration=calibration, profile=None))
    monitor = Monitor(detector, false_alarm_rate=rate, seed=seed)
    return monitor.update(Decision(torch.from_numpy(stream), calibration))


def quiet_streams(runs: int, length: int = 500, rate: float = 0.1) -> Iterator[Row]:
    """Yield how many streams without a change raise an alarm."""
    detector = _detector()
    for count in SIZES[:2]:
        for name, shape in SHAPES.items():
            random, alarms = np.random.default_rng(4), 0
            for run in range(runs):
                values = shape(random.normal(size=count + length))
                alarms += _watch(detector, values[:count], values[count:], run, rate)
            yield Row(
                "no false alarm, ever", f"{length:,} items, {count:,} held out, {name}", rate, alarms / runs, runs
            )


def correlated_streams(runs: int, length: int = 4500, rate: float = 0.01) -> Iterator[Row]:
    """Yield how many AR(1) streams without a change raise an alarm."""
    detector = _detector()
    for rho in (0.5, 0.9, 0.99):
        random, alarms = np.random.default_rng(5), 0
        for run in range(runs):
            noise, stream = random.normal(size=length), np.empty(length)
            stream[0] = noise[0]
            for i in range(1, length):
                stream[i] = rho * stream[i - 1] + math.sqrt(1 - rho**2) * noise[i]
            alarms += _watch(detector, random.normal(size=1000), stream, run, rate)
        yield Row("no false alarm, ever", f"{length:,} items, AR(1) with {rho}", rate, alarms / runs, runs)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--only", default="", help="of the simulations whose name has this in it")
    arguments = parser.parse_args()
    print("| promise | setting | promised | measured | runs | |\n|---|---|---|---|---|---|")
    for simulate in (confident_rates, false_discoveries, group_rates, quiet_streams, correlated_streams):
        if arguments.only in simulate.__name__:
            for row in simulate(arguments.streams if simulate is correlated_streams else arguments.runs):
                print(row, flush=True)


if __name__ == "__main__":
    main()
