"""Every promise over 10,000 simulated draws, and 300 correlated streams: none may be broken more often than it says."""

import numpy as np
import pytest

guarantees = pytest.importorskip("benchmarks.guarantees", reason="needs the benchmarks folder")


@pytest.mark.slow
@pytest.mark.parametrize("simulate", ["confident_rates", "false_discoveries", "group_rates", "quiet_streams"])
def test_no_promise_is_broken_more_often_than_it_says(simulate):
    rows = list(getattr(guarantees, simulate)(10_000))
    assert [str(row) for row in rows if not row.is_kept] == []


@pytest.mark.slow
def test_correlated_streams_raise_no_more_alarms_than_promised():
    assert [str(row) for row in guarantees.correlated_streams(300) if not row.is_kept] == []


def test_a_broken_promise_is_called_so():
    assert guarantees.Row("", "", 0.05, 0.056, 10_000).is_kept
    assert not guarantees.Row("", "", 0.05, 0.058, 10_000).is_kept
    assert "BROKEN" in str(guarantees.Row("", "", 0.05, 0.058, 10_000))
    row = next(guarantees.confident_rates(50))
    assert row.is_kept


def test_the_share_above_a_threshold_is_that_of_the_draws():
    random = np.random.default_rng(0)
    for source in guarantees.SYNTHETIC:
        draws = source.draw(random, 200_000, 0.0)
        for threshold in (draws[0], draws[1], draws.max()):
            assert source.share_above(threshold) == pytest.approx((draws > threshold).mean(), abs=0.005)
