"""Figures of the paper that do not come out, under every reading that its text allows (zero-shot and kernel tables).

Each reading changes one thing: where channel means are taken, whether they are standardised or signed, the number of
blocks that are permuted, the number of ID images, and the kernel's bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from neuralmean.bench.baselines import DeepKernel, Method
from neuralmean.bench.baselines.readings import Place, Reading, Values
from neuralmean.bench.experiments.base import RESIDUAL, Case, Experiment, cases
from neuralmean.bench.experiments.sample_size import judged_sets
from neuralmean.bench.experiments.workbench import Workbench, summarise
from neuralmean.bench.protocols import Draw, FitSet

BLOCKS = (2, 4, 8, 16)  # along each side of an image
COUNTS = (500, 2000, 5000)
BANDWIDTHS = (0.1, 0.25, 0.5, 1.0, 2.0)  # of the median distance between inliers


@dataclass(frozen=True)
class Variant:
    """One reading: what it is called, the method, and what it is fitted on."""

    setting: str
    make: Callable[[], Method]
    blocks: int = 4
    images: int = 2000


class Readings(Experiment):
    """Ours-LR without OOD images, and DK, under every reading."""

    name = "readings"
    title = "What the text leaves open"
    reference = "Table 6 (zero-shot) and Table 5 (DK)"
    cases = cases(RESIDUAL, "cifar10", ("svhn", "cifar100"))
    first_only = True
    methods = ("ours-lr", "dk")

    def run(self, bench: Workbench, case: Case) -> None:
        """Measure every reading on every OOD set; rows that are there stay."""
        inside, outside = judged_sets(bench, case)
        most = max(COUNTS) if bench.limit is None else min(max(COUNTS), bench.limit)
        inliers = FitSet.of(bench.inputs.fit_part(case.id).limit(most), apart_from=[inside, *outside])
        trained = bench.inputs.trained(case.model, case.id)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        wanted = bench.methods(self.methods)
        for variant in variants():
            method = "dk" if variant.setting.startswith("DK") else "ours-lr"
            if method not in wanted:
                continue
            chosen = inliers.draw(min(variant.images, len(inliers)), seed=bench.seed)
            crafted = chosen.crafted(seed=bench.seed, blocks=variant.blocks)
            draw = Draw("zero-shot", chosen, crafted, bench.seed)
            rows = [
                bench.blank(
                    facts,
                    one.name,
                    method,
                    [draw],
                    [inside, one],
                    trained,
                    setting=variant.setting,
                )
                for one in outside
            ]
            if any(map(bench.is_open, rows)):
                scored = bench.trial(variant.make, trained, draw, [inside, *outside])
                pairs = [(scored[0], scored[place]) for place in range(1, len(scored))]
                bench.results.add(
                    *({**row, **summarise([pair], seed=bench.seed)} for row, pair in zip(rows, pairs, strict=True))
                )


def variants() -> Iterator[Variant]:
    """Yield every reading, the one in use first."""
    places: tuple[Place, ...] = ("before", "after")
    signs: tuple[Values, ...] = ("signed", "absolute")
    for place in places:
        for standardised in (True, False):
            for values in signs:
                name = f"{place} the norm, {'standardised' if standardised else 'raw'}, {values}"
                yield Variant(name, lambda p=place, s=standardised, v=values: Reading(p, s, v))  # type: ignore[misc]
    for values in signs:
        for blocks in BLOCKS:
            if blocks != 4:
                name = f"before the norm, standardised, {values}; {blocks} x {blocks} blocks"
                yield Variant(name, lambda v=values: Reading("before", True, v), blocks=blocks)  # type: ignore[misc]
        for images in COUNTS:
            if images != 2000:
                name = f"before the norm, standardised, {values}; {images} ID images"
                yield Variant(name, lambda v=values: Reading("before", True, v), images=images)  # type: ignore[misc]
    for share in BANDWIDTHS:
        yield Variant(f"DK, bandwidth {share:g} x median distance", lambda s=share: DeepKernel(s))  # type: ignore[misc]
    yield Variant("DK, likeliest bandwidth", DeepKernel)
