"""Early exit: mean cost of an input, over a plain forward pass, with the ranking and the false alarms that go with it.

Needs NEURALMEAN_DATA, and NEURALMEAN_WEIGHTS for trained weights; without these the model only has the shape of a trained one.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import subjects
from benchmarks.timing import interleave
from neuralmean import Detector
from neuralmean.stats.calibration import Calibration
from neuralmean.stats.metrics import evaluate

SPLITS = 20
RATE = 0.05


def run(*, name: str, scorers: tuple[str, ...], n: int, n_timed: int, seconds: float) -> list[dict[str, Any]]:
    """Return one row for each scorer and OOD set; `n` images of each kind, costs from `n_timed` of them, one at a time."""
    trained = subjects.load_or_shape(name)
    if trained is None:
        return []
    sets = {key: subjects.real_images(trained, key, 2 * n) for key in ("cifar10-train", "cifar10-test", "svhn-train")}
    if any(found is None for found in sets.values()):
        return []
    images = {key: found[0] for key, found in sets.items() if found is not None}
    held_out, test = images["cifar10-test"][:n], images["cifar10-test"][n:]
    strange = subjects.real_images(trained, "svhn-test", n)
    rows = []
    for scorer in scorers:
        options: dict[str, Any] = {"held_out": held_out}
        ood = images["svhn-train"][:n]
        full = Detector(trained.model, scorer=scorer).fit(images["cifar10-train"], ood, **options)
        early = Detector(trained.model, scorer=scorer).fit(images["cifar10-train"], ood, early_exit=True, **options)
        for kind, x in (("ID", test), ("svhn", None if strange is None else strange[0])):
            if x is not None:
                rows.append(_measure(name, scorer, kind, (full, early), test, x, n_timed, seconds))
                if kind == "ID":
                    rows[-1] |= _false_alarms((full, early), images["cifar10-test"])
                shown = {
                    key: value["ratio"] if isinstance(value, dict) and "ratio" in value else value
                    for key, value in rows[-1].items()
                }
                print(shown, flush=True)
    return rows


def _false_alarms(detectors: tuple[Detector, Detector], x: Tensor) -> dict[str, Any]:
    """Return the share of false alarms over splits of ID images in two: one half sets the threshold, the other is flagged."""
    found = {}
    for key, detector in zip(("the full detector", "the cascade"), detectors, strict=True):
        scores, rate = detector.score(x), []
        for seed in range(SPLITS):
            order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
            half, other = scores[order].chunk(2)
            rate.append((other > Calibration.of(half, RATE).threshold).float().mean().item())
        found[f"false alarms of {key}"] = {"mean": statistics.mean(rate), "low": min(rate), "high": max(rate)}
    return found


def _measure(
    name: str,
    scorer: str,
    kind: str,
    detectors: tuple[Detector, Detector],
    usual: Tensor,
    x: Tensor,
    n_timed: int,
    seconds: float,
) -> dict[str, Any]:
    full, early = detectors
    model = full.model
    singles = list(torch.split(x[:n_timed], 1))
    frozen = copy.copy(early).freeze(singles[0])
    with torch.no_grad():
        costs = _mean_costs({"plain": model, "full": full, "early": early, "frozen": frozen}, singles, seconds)
        answers = [early(one) for one in torch.split(x, 1)]
    scores = torch.cat([decision.score for _, decision in answers])
    row: dict[str, Any] = {"model": name, "scorer": scorer, "data": kind, "images": len(x)}
    row["stopped"] = sum(output is None for output, _ in answers) / len(answers)
    row["flagged"] = float((scores > early.threshold).float().mean())
    row["flagged by the full detector"] = float(full.predict(x).is_ood.float().mean())
    if kind != "ID":
        with torch.no_grad():
            usual_scores = torch.cat([early(one)[1].score for one in torch.split(usual, 1)])
        row["auroc"] = evaluate(usual_scores.numpy(), scores.numpy()).auroc
        row["auroc of the full detector"] = evaluate(full.score(usual).numpy(), full.score(x).numpy()).auroc
    row["decisions that differ when frozen"] = sum(
        bool(frozen(one)[1].is_ood.item()) != bool(decision.is_ood.item())
        for one, (_, decision) in zip(singles, answers, strict=False)
    )
    named = {"cost": "early", "cost of the full detector": "full", "cost when frozen": "frozen"}
    return row | {key: costs[candidate] for key, candidate in named.items()}


def _mean_costs(
    candidates: dict[str, Callable[[Tensor], object]], singles: list[Tensor], seconds: float
) -> dict[str, dict[str, float]]:
    """Return the mean seconds of an input, and over those of `plain`.

    Candidates take turns on each input, of which the median counts: a machine whose speed drifts from second to second does
    so for all of them.
    """
    timings = [
        interleave(
            {name: partial(run, one) for name, run in candidates.items()},
            baseline="plain",
            seconds=seconds / len(singles),
            rounds=(5, 20),
        )
        for one in singles
    ]
    means = {name: statistics.mean(timing[name].seconds for timing in timings) for name in candidates}
    return {name: {"seconds": mean, "ratio": mean / means["plain"]} for name, mean in means.items()}
