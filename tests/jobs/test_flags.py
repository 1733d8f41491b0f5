"""The summary of a scoring run: a bound on false flags, and lists with a bounded share of them."""

import numpy as np
import torch

from neuralmean.detector.decision import Decision
from neuralmean.jobs import Tally, describe_flags, select_rows
from neuralmean.jobs.rows import ScoreRow
from neuralmean.stats.calibration import Calibration


def _decision():
    random = np.random.default_rng(0)
    scores = torch.from_numpy(np.concatenate([random.normal(size=200), random.normal(5, 1, size=40)]))
    return Decision(scores, Calibration.of(torch.from_numpy(random.normal(size=999)), 0.05))


def _rows(decision):
    columns = decision.score.tolist(), decision.p_value.tolist(), decision.is_ood.tolist(), decision.kind
    return [ScoreRow(str(i), *row) for i, row in enumerate(zip(*columns, strict=True))]


def test_the_bound_in_the_summary_is_that_of_the_decision():
    decision, tally = _decision(), Tally()
    list(tally.count(_rows(decision)))
    expected = f"at most {decision.most_false()} of these {int(decision.is_ood.sum())} flags are false, 95 % sure"
    assert describe_flags(tally, decision.calibration) == expected
    assert describe_flags(Tally(), decision.calibration) is None


def test_a_bound_that_says_nothing_is_put_in_words():
    decision, tally = _decision()[:100], Tally()  # in-distribution inputs only
    list(tally.count(_rows(decision)))
    flagged = int(decision.is_ood.sum())
    assert 0 < flagged == decision.most_false()
    assert describe_flags(tally, decision.calibration) == f"too few to exclude that all {flagged} flags are false"


def test_a_selection_of_rows_is_that_of_the_decision():
    decision = _decision()
    rows = _rows(decision)
    chosen = list(select_rows(lambda: rows, 0.1))
    assert [row.is_ood for row in chosen] == decision.select(0.1).tolist()
    assert 30 < sum(row.is_ood for row in chosen) < 50
    assert list(select_rows(lambda: rows, None)) == rows
    assert list(select_rows(list, 0.1)) == []
    typical = [row._replace(p_value=0.9) for row in rows]
    assert not any(row.is_ood for row in select_rows(lambda: typical, 0.1))
