"""ImageNet models at their own input size, on OpenOOD's sets or on a few photos. Not in the paper.

With ImageNet-1K and the sets of OpenOOD in the data folder, the columns are those of its leaderboard. Otherwise, the
set `imagenet-photos` (one photo per class to fit on, 600 to test on) is compared with other sets and altered versions
of itself. NAC is left out: without OOD images to tune its bins, it is below chance with a thousand images.
"""

from __future__ import annotations

from dataclasses import replace

from neuralmean.bench import protocols
from neuralmean.bench.data import ALTERATIONS, ImageSet, alter
from neuralmean.bench.experiments.base import Case, Experiment
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench
from neuralmean.bench.protocols import EvalSet, FitSet

PHOTOS = "imagenet-photos"
FULL = ("imagenet-1k", "imagenet-200")
NEAR = ("ssb-hard", "ninco")
FAR = ("inaturalist", "textures", "openimage-o")
OUTSIDE = ("svhn", "cifar100", "mnist", "fashion-mnist")
MOST = 1000  # images of each OOD set compared with photos


class ImageNet(Experiment):
    """Every method that learns from ID images alone, on models with many classes and few images per class."""

    name = "imagenet"
    title = "ImageNet models at their own size"
    reference = "not in the paper; OpenOOD's ImageNet table"
    cases = ()
    methods = (
        "msp",
        "energy",
        "gen",
        "react",
        "ash",
        "scale",
        "fdbd",
        "nci",
        "knn",
        "nnguide",
        "she",
        "vim",
        "rmds",
        "mds++",
        "rmds++",
        "mahalanobis-id",
        "ours-avg",
        "typicality",
    )
    by_method = True

    def runnable(self, inputs: Inputs) -> list[Case]:
        """One case for each model of photos: on ImageNet with OpenOOD's sets, otherwise on the few photos."""
        own = tuple(inputs.own_sets)
        full = [name for name in FULL if inputs.has_set(name) and inputs.id_set in (None, name)]
        outside = (*(name for name in (*NEAR, *FAR) if inputs.has_set(name)), *own)
        if full and outside:
            return [Case(model, full[0], outside) for model in inputs.photo_models]
        if not inputs.has_set(PHOTOS):
            return []
        present = (*(name for name in OUTSIDE if inputs.has_set(name)), *own)
        return [Case(model, PHOTOS, (*present, *ALTERATIONS)) for model in inputs.photo_models]

    def run(self, bench: Workbench, case: Case) -> None:
        """Fit every method on the train photos and test it on half of the others."""
        inside, outside = self._judged(bench, case)
        judged = [EvalSet(one if bench.limit is None else one.limit(bench.limit)) for one in (inside, *outside)]
        photos = bench.inputs.fit_part(case.id, case.model)
        inliers = FitSet.of(photos if bench.limit is None else photos.limit(bench.limit), apart_from=judged)
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for method in bench.methods(self.methods):
            bench.compare(facts, method, protocols.id_only(inliers, seed=bench.seed), judged[0], judged[1:])

    def _judged(self, bench: Workbench, case: Case) -> tuple[ImageSet, list[ImageSet]]:
        """Return ID and OOD images to test on: all of OpenOOD's, or parts of the few photos and of the other sets."""
        whole = bench.inputs.test_part(case.id, case.model)
        if case.id != PHOTOS:
            return whole, [bench.inputs.whole(name, case.model) for name in case.oods]
        inside = halves(whole)[1]
        return inside, [
            alter(inside, name) if name in ALTERATIONS else bench.inputs.test_part(name, case.model).limit(MOST)
            for name in case.oods
        ]


def halves(images: ImageSet) -> tuple[ImageSet, ImageSet]:
    """Split test images in two: every second one to calibrate with, the others to test on."""
    held_out, judged = images.take(slice(0, None, 2)), images.take(slice(1, None, 2))
    return replace(held_out, split="held-out"), judged
