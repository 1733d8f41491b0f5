"""How often a fitted detector flags in-distribution images, compared with the requested rate. Not in the paper.

The detector is fitted as a user would, with and without held-out images, and tested on unseen images.
"""

from __future__ import annotations

import warnings
from typing import Any

from neuralmean.bench.data import ImageSet
from neuralmean.bench.experiments.base import Case, Experiment
from neuralmean.bench.experiments.imagenet import PHOTOS, halves
from neuralmean.bench.experiments.inputs import Inputs
from neuralmean.bench.experiments.workbench import Workbench
from neuralmean.bench.models import TrainedModel
from neuralmean.bench.protocols import EvalSet, FitSet, id_only
from neuralmean.bench.results import Row
from neuralmean.detector.detector import Detector
from neuralmean.errors import NeuralMeanWarning
from neuralmean.stats.calibration import examples_needed

RATES = (0.05, 0.01)
FIT, HELD_OUT, JUDGED = 1000, 1000, 2000
OURS = "typicality"


class FalseAlarms(Experiment):
    """The share of unseen ID images that the default detector flags, on every model."""

    name = "false-alarms"
    title = "False alarms, requested and measured"
    reference = "not in the paper, which sets no threshold"
    cases = ()
    methods = (OURS,)

    def runnable(self, inputs: Inputs) -> list[Case]:
        """One case for each model with weights and for each model of photos."""
        found = [
            Case(model, inside, ())
            for model, inside in inputs.weights
            if inputs.wants(model) and inputs.has_set(inside)
        ]
        return found + [Case(model, PHOTOS, ()) for model in inputs.photo_models if inputs.has_set(PHOTOS)]

    def run(self, bench: Workbench, case: Case) -> None:
        """Fit with and without held-out images, and count the alarms at each rate."""
        if OURS not in bench.methods(self.methods):
            return
        trained = bench.inputs.trained(case.model, case.id)
        held_out, judged = _test_parts(bench, case)
        fit = FitSet.of(_at_most(bench, bench.inputs.fit_part(case.id, case.model), FIT), apart_from=[EvalSet(judged)])
        facts = {"experiment": self.name, "model": case.model, "id": case.id}
        for given in (held_out, None):
            rows = [
                bench.blank(
                    facts,
                    case.id,
                    OURS,
                    id_only(fit, seed=bench.seed),
                    [EvalSet(judged)],
                    trained,
                    setting=f"{100 * rate:.0f} % asked, {'without' if given is None else 'with'} held-out images",
                    rate=100 * rate,
                    n_held_out=0 if given is None else len(given),
                )
                for rate in _possible(len(fit) if given is None else len(given))
            ]
            if any(map(bench.is_open, rows)):
                bench.results.add(*_count(rows, trained, fit, given, judged))


def _possible(examples: int) -> list[float]:
    """Return the rates that this many examples can calibrate."""
    return [rate for rate in RATES if examples >= examples_needed(rate)]


def _test_parts(bench: Workbench, case: Case) -> tuple[ImageSet, ImageSet]:
    """Return disjoint images to calibrate with and to test on."""
    held_out, judged = halves(bench.inputs.test_part(case.id, case.model))
    return _at_most(bench, held_out, HELD_OUT), _at_most(bench, judged, JUDGED)


def _at_most(bench: Workbench, images: ImageSet, count: int) -> ImageSet:
    return images.limit(count if bench.limit is None else min(count, bench.limit))


def _count(
    rows: list[Row], trained: TrainedModel, fit: FitSet, held_out: ImageSet | None, judged: ImageSet
) -> list[Row]:
    """Return the rows with their figures, all from one fit, as p-values do not depend on the rate."""
    from scipy.stats import binomtest

    rate = min(row["rate"] for row in rows) / 100
    shown = trained.preprocess(fit.source.images[fit.rows])
    given = None if held_out is None else trained.preprocess(held_out.images)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NeuralMeanWarning)  # few or missing examples are the subject of the experiment
        detector = Detector(trained.model).fit(shown, held_out=given, false_alarm_rate=rate)
    p_values = detector.predict(trained.preprocess(judged.images)).p_value
    filled = []
    for row in rows:
        flagged = int((p_values <= row["rate"] / 100).sum())
        interval = binomtest(flagged, len(p_values)).proportion_ci()
        measured: dict[str, Any] = {
            "flagged": flagged,
            "false_alarms": round(100 * flagged / len(p_values), 3),
            "false_alarms_ci": [round(100 * interval.low, 3), round(100 * interval.high, 3)],
            "as_asked": bool(100 * interval.low <= 2 * row["rate"] and 100 * interval.high >= row["rate"] / 2),
        }
        filled.append({**row, **measured})
    return filled
