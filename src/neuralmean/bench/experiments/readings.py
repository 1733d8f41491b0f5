"""The paper's figures that were not reproduced, under every reading that its text allows.

Each reading changes one thing. Zero-shot: where channel means are read, whether they are standardised or signed, the
number of permuted blocks, the number of ID images. Kernels: the bandwidth, the number of ID images, whether values are
normalised. NMD, NVD and both: the classifier and the number of images of each kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from neuralmean.bench.baselines import DeepKernel, Method, NeuralMean
from neuralmean.bench.baselines.cntk import Cntk
from neuralmean.bench.baselines.readings import Place, Reading, Values
from neuralmean.bench.baselines.scntk import Scntk
from neuralmean.bench.experiments.base import RESIDUAL, Case, Experiment, cases
from neuralmean.bench.experiments.sample_size import judged_sets
from neuralmean.bench.experiments.workbench import Workbench, summarise
from neuralmean.bench.protocols import Draw, EvalSet, FitSet
from neuralmean.stats.discrepancy import Statistic

BLOCKS = (2, 4, 8, 16)  # along each side of an image
USUAL = 2000  # ID images
COUNTS = (500, USUAL, 5000)
BANDWIDTHS = (0.1, 0.25, 0.5, 1.0, 2.0)  # of the median distance between inliers
STATISTICS: dict[Statistic, str] = {"mean": "NMD", "variance": "NVD", "both": "NMD and NVD"}
HEAVY = 500  # test images of each set for kernels of pixels
KERNEL_IMAGES = (25, 100, 200)  # ID images in the sum of a tangent kernel
FULL_ACCESS_FROM = "cifar100"


@dataclass(frozen=True)
class Variant:
    """One reading: its name, the method, and the data to fit on."""

    setting: str
    make: Callable[[], Method]
    method: str = "ours-lr"
    blocks: int = 4
    images: int | None = None  # number of ID images; None for 2,000, or all if there are fewer
    full_access: bool = False  # test on the OOD images of this set only


class Readings(Experiment):
    """Ours-LR without OOD images, kernels, and NMD, NVD and both, under every reading."""

    name = "readings"
    title = "Ambiguities in the paper's text"
    reference = "Table 6 (zero-shot), Table 1 (kernels), Sec. 5.7 (NMD, NVD, both)"
    cases = cases(RESIDUAL, "cifar10", ("svhn", "cifar100"))
    first_only = True
    methods = ("ours-lr", "ours-mlp", "dk", "cntk", "scntk")

    def run(self, bench: Workbench, case: Case) -> None:
        """Measure every reading on every OOD set, except for existing rows."""
        inside, outside = judged_sets(bench, case)
        most = max(COUNTS) if bench.limit is None else min(max(COUNTS), bench.limit)
        inliers = FitSet.of(bench.inputs.fit_part(case.id).limit(most), apart_from=[inside, *outside])
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        near = FitSet.of(bench.inputs.fit_part(FULL_ACCESS_FROM).limit(most), apart_from=[inside, *outside])
        wanted = bench.methods(self.methods)
        for variant in variants():
            if variant.method not in wanted or (variant.images or 0) > most:
                continue
            count = min(variant.images or USUAL, len(inliers))  # 5,000, minus duplicates of test images
            chosen = inliers.draw(count, seed=bench.seed)
            if variant.full_access:
                draw = Draw("full-access", chosen, near.draw(min(count, len(near)), seed=bench.seed), bench.seed)
            else:
                crafted = chosen.crafted(seed=bench.seed, blocks=variant.blocks)
                draw = Draw("zero-shot", chosen, crafted, bench.seed)
            self._measure(bench, facts, variant, draw, inside, outside)

    def _measure(
        self,
        bench: Workbench,
        facts: dict[str, Any],
        variant: Variant,
        draw: Draw,
        inside: EvalSet,
        outside: Sequence[EvalSet],
    ) -> None:
        """Add the missing rows of one reading."""
        if variant.full_access:
            outside = [one for one in outside if one.name == FULL_ACCESS_FROM]
        if variant.make().heavy:
            inside, *outside = (EvalSet(one.source.limit(HEAVY)) for one in (inside, *outside))
        trained = bench.inputs.trained(facts["model"], facts["id"])
        rows = [
            bench.blank(facts, one.name, variant.method, [draw], [inside, one], trained, setting=variant.setting)
            for one in outside
        ]
        if rows and any(map(bench.is_open, rows)):
            scored = bench.trial(variant.make, trained, draw, [inside, *outside])
            bench.results.add(
                *(
                    {**row, **summarise([(scored[0], other)], seed=bench.seed)}
                    for row, other in zip(rows, scored[1:], strict=True)
                )
            )


def variants() -> Iterator[Variant]:
    """Yield every reading, starting with the one in use."""
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
            if images != USUAL:
                name = f"before the norm, standardised, {values}; {images} ID images"
                yield Variant(name, lambda v=values: Reading("before", True, v), images=images)  # type: ignore[misc]
    for share in BANDWIDTHS:
        yield Variant(f"DK, bandwidth {share:g} x median distance", lambda s=share: DeepKernel(s), "dk")  # type: ignore[misc]
    yield Variant("DK, likeliest bandwidth", DeepKernel, "dk")
    for name, kernel in (("cntk", Cntk), ("scntk", Scntk)):
        for count in KERNEL_IMAGES:
            setting = f"{kernel.title}, {count} ID images"
            yield Variant(setting, lambda k=kernel, n=count: k(n), name)  # type: ignore[misc]
        setting = f"{kernel.title}, 100 ID images, normalised"
        yield Variant(setting, lambda k=kernel: k(100, normalised=True), name)  # type: ignore[misc]
    for scorer, title, name in (("logistic", "LR", "ours-lr"), ("mlp", "MLP", "ours-mlp")):
        for statistic, shown in STATISTICS.items():
            for images in COUNTS:
                setting = f"{shown}, {title}, {images} images of each kind"
                make = lambda k=scorer, s=statistic: NeuralMean(k, statistic=s)  # noqa: E731
                yield Variant(setting, make, name, images=images, full_access=True)
