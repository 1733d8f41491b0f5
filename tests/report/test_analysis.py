from __future__ import annotations

import numpy as np
import pytest
import torch

from neuralmean.recording.observer import ChannelStats
from neuralmean.report import analysis
from neuralmean.report.analysis import auroc, auroc_by_depth, batch_scores, compare, histogram, weight_by_layer, wilson
from neuralmean.report.gather import gather
from neuralmean.stats import metrics
from tests.report.conftest import make_detector, noise

RANDOM = np.random.default_rng(0)


def _reference_auroc(inside, outside):
    pairs = [(o > i) + 0.5 * (o == i) for i in inside for o in outside]
    return 100 * sum(pairs) / len(pairs)


def test_auroc_counts_pairs_and_ties_half():
    inside, outside = RANDOM.integers(0, 6, 30).astype(float), RANDOM.integers(2, 9, 20).astype(float)
    assert auroc(inside, outside) == pytest.approx(_reference_auroc(inside, outside))
    assert auroc(inside, outside) == pytest.approx(metrics.evaluate(inside, outside).auroc)


def test_depth_adds_layers_up_from_the_input():
    inside = torch.tensor([[1.0, 0.0, 9.0], [2.0, 1.0, 9.0]])
    outside = torch.tensor([[1.5, 3.0, 0.0], [0.5, 3.0, 0.0]])
    # One layer: 1.5 beats 1 only, 0.5 beats none. Two: 4.5 and 3.5 beat 1 and 3. The third column is no layer.
    assert auroc_by_depth(inside, outside, 2).tolist() == [25.0, 100.0]
    assert auroc_by_depth(None, outside, 2) is None


def test_shares_of_every_set_add_up_to_one_whatever_lies_outside():
    sets = [RANDOM.normal(0, 1, 500), RANDOM.normal(3, 1, 300), np.append(RANDOM.normal(2, 1, 99), 1e6)]
    found = histogram(sets, 1.7)
    assert [shares.sum() for shares in found.shares] == pytest.approx([1, 1, 1])
    assert found.above[2] == pytest.approx(0.01)
    assert found.edges[-1] < 100


def test_the_threshold_is_an_edge_so_that_bars_are_flagged_as_a_whole():
    sets, threshold = [RANDOM.normal(0, 1, 500), RANDOM.normal(3, 1, 300)], 1.234
    found = histogram(sets, threshold)
    assert threshold in found.edges
    over = found.edges[:-1] >= threshold
    for scores, shares in zip(sets, found.shares, strict=True):
        assert shares[over].sum() == pytest.approx((scores > threshold).mean())


def test_a_score_at_the_threshold_is_kept():
    found = histogram([np.array([0.0, 1.0, 2.0, 2.0]), np.array([2.0, 3.0])], 2.0)
    assert found.shares[1][found.edges[:-1] >= 2.0].sum() == 0.5


def test_scores_that_are_all_equal_can_be_binned():
    found = histogram([np.full(20, 5.0), np.full(10, 5.0)], 5.0)
    assert found.shares[0].sum() == pytest.approx(1)


def test_id_scores_far_above_the_threshold_can_be_binned():
    found = histogram([np.full(20, 5.0), np.full(10, 6.0)], 0.1)
    assert found.edges[0] <= 0.1 <= found.edges[-1]
    assert [shares[found.edges[:-1] >= 0.1].sum() for shares in found.shares] == pytest.approx([1, 1])


def _reference_wilson(share, n):
    """The shares for which the share seen is 1.96 standard errors away, found by trying all."""
    tried = np.linspace(0, 1, 1_000_001)
    inside = tried[np.abs(share - tried) <= 1.959964 * np.sqrt(tried * (1 - tried) / n)]
    return 100 * inside.min(), 100 * inside.max()


@pytest.mark.parametrize(("share", "n"), [(0.05, 400), (0.0, 30), (1.0, 30), (0.5, 7)])
def test_wilson_is_where_the_normal_test_would_not_reject(share, n):
    interval = wilson(share, n)
    assert (interval.low, interval.high) == pytest.approx(_reference_wilson(share, n), abs=2e-4)


@pytest.mark.parametrize(
    "options", [{"scorer": "average"}, {"scorer": "logistic"}, {}, {"scorer": "average", "statistic": "both"}], ids=str
)
def test_batches_score_as_the_detector_scores_them(options):
    detector, images = make_detector(**options), noise(8, 1, high=2.0)
    rows = gather(detector, images, name="x").sample
    scores = batch_scores(detector, rows, size=8, batches=3)
    assert scores == pytest.approx([detector.score_batch(images)] * 3, rel=1e-4, abs=1e-5)


def test_batches_share_no_image_while_there_are_enough(monkeypatch):
    detector = make_detector(scorer="average")
    seen = []
    monkeypatch.setattr(type(detector), "score_pooled", lambda self, rows: seen.append(rows.means[:, 0]) or 0.0)
    rows = ChannelStats(torch.arange(12.0).unsqueeze(1).expand(12, 10))
    batch_scores(detector, rows, size=4, batches=3)
    assert sorted(torch.cat(seen).tolist()) == list(range(12))


def test_a_comparison_holds_the_library_s_own_figures(detector):
    inside, outside = gather(detector, noise(90, 2), name="in"), gather(detector, noise(70, 3, high=1.4), name="out")
    found = compare(detector, inside, outside)
    assert found.figures == metrics.evaluate(inside.scores, outside.scores)
    assert found.intervals == metrics.bootstrap(inside.scores, outside.scores, resamples=300)
    assert list(found.by_batch) == [1, 2, 4, 8, 16, 32]
    assert found.by_batch[1][0] == found.figures.auroc


def test_few_images_leave_the_large_batches_out(detector):
    inside, outside = gather(detector, noise(90, 2), name="in"), gather(detector, noise(17, 3), name="out")
    assert list(compare(detector, inside, outside).by_batch) == [1, 2, 4, 8]


def test_the_excess_adds_up_to_the_difference_of_the_mean_scores(detector):
    inside, outside = gather(detector, noise(90, 2), name="in"), gather(detector, noise(70, 3, high=1.4), name="out")
    total = analysis.excess_by_part(inside, outside).sum()
    assert total == pytest.approx(outside.scores.mean() - inside.scores.mean(), abs=1e-4)


def test_importance_is_the_mean_magnitude_of_a_layer_s_weights():
    detector = make_detector(scorer="logistic")
    weight = detector.scorer.weight_.abs()
    assert weight_by_layer(detector) == pytest.approx([weight[:4].mean().item(), weight[4:].mean().item()], rel=1e-5)


def test_only_logistic_scorers_have_an_importance(detector):
    assert weight_by_layer(detector) is None


def test_one_absurd_score_does_not_flatten_the_histogram():
    from neuralmean.report.analysis import histogram

    usual = np.random.default_rng(0).normal(0, 1, 500)
    inside = np.append(usual, 1e6)
    found = histogram([inside, usual + 4], threshold=2.0)
    assert found.edges[-1] < 30
    assert int((found.shares[0] > 0).sum()) > 10
    assert found.above[0] == pytest.approx(1 / 501)
