"""Simulations of what the library promises: how often each promise is broken.

    python -m benchmarks guarantees [--runs 10000] [--streams 300] [--only NAME] [--scores found.pt]

Prints a row of a table for each promise and setting: what was promised, and what was measured over the runs. Scores are normal,
normal and rounded to tenths ("ties"), one of four values ("discrete"), or, with `--scores`, real: those of CIFAR-10 test and
CIFAR-100 in the cache of `python -m benchmarks monitor`, drawn with replacement, so that the true rate is known. `make slow`
runs the synthetic ones with 10,000 runs.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from neuralmean import Calibration, Decision, Detector
from neuralmean.monitor.monitor import Monitor

Floats = NDArray[np.float64]
SIZES = (200, 1000, 10_000)


class Source(NamedTuple):
    """Where scores come from.

    Attributes:
        name: What it is called in the table.
        draw: Given a random generator, a number and a shift towards out-of-distribution, returns so many scores.
        share_above: Returns the share of in-distribution scores above a threshold, exactly.
    """

    name: str
    draw: Callable[[np.random.Generator, int, float], Floats]
    share_above: Callable[[float], float]


def _above(threshold: float) -> float:
    return math.erfc(threshold / math.sqrt(2)) / 2


_CUTS = [-0.7, 0.6, 1.7]
SYNTHETIC = (
    Source("normal", lambda random, n, shift: random.normal(shift, 1, n), _above),
    Source("ties", lambda random, n, shift: random.normal(shift, 1, n).round(1), lambda t: _above(round(t, 1) + 0.05)),
    Source(
        "discrete",
        lambda random, n, shift: np.digitize(random.normal(shift, 1, n), _CUTS).astype(np.float64),
        lambda t: _above(_CUTS[int(t)]) if t < len(_CUTS) else 0.0,
    ),
)


def real_source(path: Path) -> Source:
    """Return a source of real scores; anything but a shift of 0 draws those of CIFAR-100."""
    found = torch.load(path, weights_only=True)
    inside, outside = (found[name][0].double().sort().values.numpy() for name in ("cifar10-test", "cifar100-test"))
    return Source(
        "real",
        lambda random, n, shift: random.choice(outside if shift else inside, n),
        lambda threshold: 1 - np.searchsorted(inside, threshold, "right") / len(inside),
    )


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


def confident_rates(runs: int, sources: Sequence[Source] = SYNTHETIC) -> Iterator[Row]:
    """Yield how often the false-alarm rate is larger than asked for, with `confidence=0.95`."""
    for count in SIZES:
        for source in sources:
            random, broken = np.random.default_rng(0), 0
            for _ in range(runs):
                scores = torch.from_numpy(source.draw(random, count, 0.0))
                broken += source.share_above(Calibration.of(scores, 0.05, confidence=0.95).threshold) > 0.05
            yield Row("rate 0.05 holds, 95 % sure", f"{count:,} held out, {source.name}", 0.05, broken / runs, runs)


def false_discoveries(runs: int, sources: Sequence[Source] = SYNTHETIC) -> Iterator[Row]:
    """Yield the mean share of false ones in `select(fdr=0.1)`, and how often `most_false` is too small somewhere."""
    for count in SIZES:
        for source in sources:
            random, shares, broken = np.random.default_rng(2), 0.0, 0
            for _ in range(runs):
                scores = np.concatenate([source.draw(random, 40, 0.0), source.draw(random, 20, 2.5)])
                known = Calibration.of(torch.from_numpy(source.draw(random, count, 0.0)), 0.05)
                decision = Decision(torch.from_numpy(scores), known)
                chosen = decision.select(0.1)
                shares += chosen[:40].sum().item() / max(1, int(chosen.sum()))
                levels = sorted(set(decision.p_value.tolist()))[:30:6]
                broken += any(
                    int((decision.p_value[:40] <= level).sum()) > decision.most_false(level) for level in levels
                )
            setting = f"{count:,} held out, {source.name}"
            yield Row("select(fdr=0.1)", setting, 0.1, shares / runs, runs)
            yield Row("most_false, 95 % sure, any level", setting, 0.05, broken / runs, runs)


def group_rates(runs: int, sources: Sequence[Source] = SYNTHETIC) -> Iterator[Row]:
    """Yield the mean false-alarm rate of each of two groups, one of which scores higher than the other."""
    for count in SIZES:
        for source in sources:
            random, flagged = np.random.default_rng(3), np.zeros(2)
            labels = np.arange(count + 40) % 2
            for _ in range(runs):
                scores = torch.from_numpy(source.draw(random, count + 40, 0.0) + 2 * labels)
                calibration = Calibration.of(scores[:count], 0.05, groups=labels[:count].tolist())
                decision = Decision(scores[count:], calibration, groups=tuple(map(str, labels[count:])))
                flags = decision.is_ood.numpy()
                flagged += [flags[labels[count:] == group].mean() for group in (0, 1)]
            for group in (0, 1):
                rate = flagged[group] / runs
                yield Row(f"rate 0.05 of group {group}", f"{count:,} held out, {source.name}", 0.05, rate, runs)


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


def quiet_streams(runs: int, sources: Sequence[Source] = SYNTHETIC) -> Iterator[Row]:
    """Yield how many streams of independent scores without a change raise an alarm: of a tenth of the runs, as each is long."""
    detector, length, rate, runs = _detector(), 500, 0.1, math.ceil(runs / 10)
    for count in SIZES:
        for source in sources:
            random, alarms = np.random.default_rng(4), 0
            for run in range(runs):
                values = source.draw(random, count + length, 0.0)
                alarms += _watch(detector, values[:count], values[count:], run, rate)
            setting = f"{length:,} items, {count:,} held out, {source.name}"
            yield Row("no false alarm, ever", setting, rate, alarms / runs, runs)


def correlated_streams(runs: int, length: int = 4500, rate: float = 0.01) -> Iterator[Row]:
    """Yield how many AR(1) streams without a change raise an alarm."""
    detector = _detector()
    for rho in (0.5, 0.9, 0.99):
        random, alarms = np.random.default_rng(5), 0
        for run in range(runs):
            alarms += _watch(detector, random.normal(size=1000), _autoregressive(random, length, rho), run, rate)
        yield Row("no false alarm, ever", f"{length:,} items, AR(1) with {rho}", rate, alarms / runs, runs)


def _autoregressive(random: np.random.Generator, length: int, rho: float) -> Floats:
    stream: Floats = random.normal(size=length)
    for i in range(1, length):
        stream[i] = rho * stream[i - 1] + math.sqrt(1 - rho**2) * stream[i]
    return stream


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=300, help="correlated ones, of each correlation")
    parser.add_argument("--only", default="", help="of the simulations whose name has this in it")
    parser.add_argument("--scores", type=Path, metavar="found.pt", help="real scores, rather than synthetic ones")
    arguments = parser.parse_args()
    sources = SYNTHETIC if arguments.scores is None else (real_source(arguments.scores),)
    print("| promise | setting | promised | measured | runs | |\n|---|---|---|---|---|---|")
    for simulate in (confident_rates, false_discoveries, group_rates, quiet_streams):
        if arguments.only in simulate.__name__:
            for row in simulate(arguments.runs, sources):
                print(row, flush=True)
    if arguments.only in correlated_streams.__name__ and arguments.scores is None:
        for row in correlated_streams(arguments.streams):
            print(row, flush=True)


if __name__ == "__main__":
    main()
