import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from neuralmean.errors import InputError
from neuralmean.stats.metrics import Metrics, bootstrap, evaluate, roc_curve


def _reference_metrics(id_scores, ood_scores):
    """Every figure straight from its definition, one threshold and one pair at a time."""
    pairs = [(0.5 if o == i else float(o > i)) for i in id_scores for o in ood_scores]
    thresholds = [-np.inf, *sorted({*id_scores, *ood_scores})]
    tpr = [np.mean([i <= t for i in id_scores]) for t in thresholds]
    tnr = [np.mean([o > t for o in ood_scores]) for t in thresholds]
    tnr95 = next(n for p, n in zip(tpr, tnr, strict=True) if p * 100 >= 95 - 1e-9)
    accuracy = max((p + n) / 2 for p, n in zip(tpr, tnr, strict=True))
    labels = np.r_[np.zeros(len(id_scores)), np.ones(len(ood_scores))]
    scores = np.r_[id_scores, ood_scores]
    return {
        "auroc": 100 * np.mean(pairs),
        "aupr_id": 100 * sk.average_precision_score(1 - labels, -scores),
        "aupr_ood": 100 * sk.average_precision_score(labels, scores),
        "tnr95": 100 * tnr95,
        "fpr95": 100 - 100 * tnr95,
        "accuracy": 100 * accuracy,
    }


def _figures(result):
    return {name: value for name, value in result.to_dict().items() if name not in ("n_id", "n_ood")}


def test_every_figure_of_a_small_example_is_what_one_gets_by_hand():
    # ID 1 2 3 6, OOD 5 7 8 9. Of 16 pairs only (6, 5) is in the wrong order: 15/16.
    # 95 % of four is all four, so the threshold is 6: OOD above it 7 8 9, TNR95 3/4.
    # Best threshold 3 (TPR 3/4, TNR 1) or 6 (TPR 1, TNR 3/4): accuracy 7/8.
    # AUPR with ID first: 1 2 3 at precision 1, then 5 (OOD), then 6 at 4/5: (1 + 1 + 1 + 0.8) / 4.
    # AUPR with OOD first: 9 8 7 at precision 1, then 6 (ID), then 5 at 4/5: the same.
    result = evaluate([1.0, 2.0, 3.0, 6.0], [5.0, 7.0, 8.0, 9.0])
    expected = {"auroc": 93.75, "aupr_id": 95, "aupr_ood": 95, "tnr95": 75, "fpr95": 25, "accuracy": 87.5}
    assert _figures(result) == pytest.approx(expected)
    assert (result.n_id, result.n_ood) == (4, 4)


def test_ties_count_half_and_are_never_split():
    # Both kinds at 1; one OOD at 2. Pairs: (1,1) half, (1,2) one, twice over: 3/4.
    # Keeping ID means keeping everything at 1: one of two OOD is rejected.
    # AUPR ID: threshold 1 takes 2 ID of 3: 2/3. AUPR OOD: 2 at precision 1, then 1 at 2/4: (1 + 0.5) / 2.
    result = evaluate([1.0, 1.0], [1.0, 2.0])
    expected = {"auroc": 75, "aupr_id": 200 / 3, "aupr_ood": 75, "tnr95": 50, "fpr95": 50, "accuracy": 75}
    assert _figures(result) == pytest.approx(expected)


def test_scores_that_are_all_equal_are_worth_nothing():
    result = evaluate(np.zeros(30), np.zeros(10))
    expected = {"auroc": 50, "aupr_id": 75, "aupr_ood": 25, "tnr95": 0, "fpr95": 100, "accuracy": 50}
    assert _figures(result) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("id_scores", "ood_scores", "auroc", "tnr95", "accuracy"),
    [([1, 2], [3, 4], 100, 100, 100), ([3, 4], [1, 2], 0, 0, 50), ([1], [2], 100, 100, 100)],
    ids=["perfect", "upside_down", "one_each"],
)
def test_the_extremes(id_scores, ood_scores, auroc, tnr95, accuracy):
    result = evaluate(id_scores, ood_scores)
    assert (result.auroc, result.tnr95, result.accuracy) == (auroc, tnr95, accuracy)


@pytest.mark.parametrize(("n", "kept"), [(20, 19), (19, 19), (100, 95), (101, 96), (7, 7)])
def test_at_least_95_percent_of_id_is_kept_and_not_one_more_than_needed(n, kept):
    id_scores = np.arange(n, dtype=float)
    # One OOD score just above each ID score: those above the threshold are the ones at the dropped places and at the
    # threshold itself.
    assert evaluate(id_scores, id_scores + 0.5).tnr95 == pytest.approx(100 * (n - kept + 1) / n)


few_values = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=25)


@settings(max_examples=150, deadline=None)
@given(few_values, few_values)
def test_every_figure_agrees_with_its_definition_with_many_ties(id_scores, ood_scores):
    assert _figures(evaluate(id_scores, ood_scores)) == pytest.approx(_reference_metrics(id_scores, ood_scores))


def test_every_figure_agrees_with_sklearn_on_many_scores():
    generator = np.random.default_rng(1)
    id_scores, ood_scores = generator.normal(size=3000).round(2), generator.normal(1.2, 1.5, size=1700).round(2)
    labels = np.r_[np.zeros(3000), np.ones(1700)]
    scores = np.r_[id_scores, ood_scores]
    fpr, tpr, _ = sk.roc_curve(1 - labels, -scores, drop_intermediate=False)
    result = evaluate(id_scores, ood_scores)
    assert result.auroc == pytest.approx(100 * sk.roc_auc_score(labels, scores), abs=1e-10)
    assert result.fpr95 == pytest.approx(100 * fpr[tpr >= 0.95].min(), abs=1e-10)
    assert result.accuracy == pytest.approx(100 * np.max((tpr + 1 - fpr) / 2), abs=1e-10)
    assert result.aupr_id == pytest.approx(100 * sk.average_precision_score(1 - labels, -scores), abs=1e-9)
    assert result.aupr_ood == pytest.approx(100 * sk.average_precision_score(labels, scores), abs=1e-9)


def test_figures_depend_on_the_order_of_scores_only():
    generator = np.random.default_rng(2)
    id_scores, ood_scores = generator.normal(size=50), generator.normal(1, size=70)
    squashed = evaluate(np.tanh(id_scores), np.tanh(ood_scores))
    assert squashed == evaluate(id_scores[::-1], ood_scores)


def test_lists_arrays_and_tensors_are_the_same():
    assert evaluate(torch.tensor([1.0, 2.0]), torch.tensor([1.5])) == evaluate([1, 2], np.array([1.5], np.float32))


def test_infinite_scores_are_the_most_and_least_unusual():
    assert evaluate([-np.inf, 0.0], [0.0, np.inf]).auroc == pytest.approx(87.5)


def test_large_sets_do_not_overflow():
    n = 300_000
    assert evaluate(np.arange(n), np.arange(n) + n).auroc == 100.0


def test_a_dictionary_holds_every_field():
    result = evaluate([1, 2], [3])
    assert Metrics(**result.to_dict()) == result


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "Expected `id_scores` to be a row of at least one score, but got shape (0,)."),
        ([[1.0]], "Expected `id_scores` to be a row of at least one score, but got shape (1, 1)."),
        ([1.0, np.nan], "Expected `id_scores` to hold numbers, but got 1 NaN."),
    ],
    ids=["empty", "matrix", "nan"],
)
@pytest.mark.parametrize("function", [evaluate, bootstrap, roc_curve])
def test_scores_that_cannot_be_used_are_refused(function, bad, message):
    with pytest.raises(InputError, match=re.escape(message)):
        function(bad, [1.0])
    with pytest.raises(InputError, match=re.escape(message.replace("id_scores", "ood_scores"))):
        function([1.0], bad)


def _reference_bootstrap(id_scores, ood_scores, resamples, seed):
    """Resample the scores themselves and evaluate each resample anew."""
    generator = np.random.default_rng(seed)
    rows = []
    for _ in range(resamples):
        drawn_id = np.sort(id_scores)[generator.integers(len(id_scores), size=len(id_scores))]
        drawn_ood = np.sort(ood_scores)[generator.integers(len(ood_scores), size=len(ood_scores))]
        rows.append(_figures(evaluate(drawn_id, drawn_ood)))
    return {name: np.quantile([row[name] for row in rows], [0.05, 0.95]) for name in rows[0]}


def test_bootstrap_is_the_same_as_resampling_the_scores_themselves():
    generator = np.random.default_rng(3)
    id_scores, ood_scores = generator.normal(size=40).round(1), generator.normal(1, size=25).round(1)
    intervals = bootstrap(id_scores, ood_scores, resamples=50, confidence=0.9, seed=7)
    expected = _reference_bootstrap(id_scores, ood_scores, 50, 7)
    assert intervals.keys() == expected.keys()
    for name, interval in intervals.items():
        assert [interval.low, interval.high] == pytest.approx(expected[name])


def test_bootstrap_without_aupr_gives_the_other_intervals_unchanged():
    generator = np.random.default_rng(3)
    id_scores, ood_scores = generator.normal(size=40), generator.normal(1, size=25)
    every = bootstrap(id_scores, ood_scores, resamples=50)
    some = bootstrap(id_scores, ood_scores, resamples=50, aupr=False)
    assert every.keys() - some.keys() == {"aupr_id", "aupr_ood"}
    assert all(every[name] == some[name] for name in some)


def test_bootstrap_covers_the_truth_as_often_as_it_says():
    # Normal scores one standard deviation apart: the true AUROC is Phi(1 / sqrt 2) = 76.025 %.
    generator = np.random.default_rng(4)
    covered = 0
    for seed in range(100):
        interval = bootstrap(generator.normal(size=150), generator.normal(1, size=150), resamples=150, seed=seed)[
            "auroc"
        ]
        covered += interval.low <= 76.025 <= interval.high
    # 95 of 100 on average; a binomial with p = 0.95 gives fewer than 87 once in 1,500 times.
    assert covered >= 87


def test_bootstrap_repeats_with_its_seed_and_only_then():
    id_scores, ood_scores = np.arange(30.0), np.arange(20.0) + 8.3
    assert bootstrap(id_scores, ood_scores, seed=1) == bootstrap(id_scores, ood_scores, seed=1)
    assert bootstrap(id_scores, ood_scores, seed=1) != bootstrap(id_scores, ood_scores, seed=2)


def test_a_wider_confidence_gives_a_wider_interval():
    id_scores, ood_scores = np.arange(30.0), np.arange(20.0) + 8.3
    narrow, wide = (bootstrap(id_scores, ood_scores, confidence=c)["auroc"] for c in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, -1.0])
def test_a_confidence_out_of_range_is_refused(value):
    message = f"Expected `confidence` to be a float in the (0, 1) range, but got {value!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        bootstrap([1], [2], confidence=value)


def test_no_resamples_are_refused():
    with pytest.raises(InputError, match="Expected `resamples` to be at least 1, but got 0"):
        bootstrap([1], [2], resamples=0)


def test_the_curve_goes_from_nothing_kept_to_all_kept():
    curve = roc_curve([1.0, 2.0], [2.0, 3.0])
    assert curve.thresholds.tolist() == [-np.inf, 1.0, 2.0, 3.0]
    assert curve.id_kept.tolist() == [0.0, 0.5, 1.0, 1.0]
    assert curve.ood_kept.tolist() == [0.0, 0.0, 0.5, 1.0]


def test_the_area_under_the_curve_is_the_auroc():
    generator = np.random.default_rng(5)
    id_scores, ood_scores = generator.normal(size=900).round(1), generator.normal(1, size=400).round(1)
    curve = roc_curve(id_scores, ood_scores)
    area = np.sum(np.diff(curve.ood_kept) * (curve.id_kept[1:] + curve.id_kept[:-1]) / 2)
    assert 100 * area == pytest.approx(evaluate(id_scores, ood_scores).auroc)


def test_a_thinned_curve_keeps_its_ends_and_its_area():
    generator = np.random.default_rng(6)
    id_scores, ood_scores = generator.normal(size=5000), generator.normal(2, size=5000)
    curve = roc_curve(id_scores, ood_scores, max_points=200)
    assert len(curve.thresholds) == len(curve.id_kept) == len(curve.ood_kept) <= 200
    assert (curve.id_kept[0], curve.ood_kept[0], curve.id_kept[-1], curve.ood_kept[-1]) == (0.0, 0.0, 1.0, 1.0)
    area = np.sum(np.diff(curve.ood_kept) * (curve.id_kept[1:] + curve.id_kept[:-1]) / 2)
    assert 100 * area == pytest.approx(evaluate(id_scores, ood_scores).auroc, abs=0.05)


def test_a_curve_of_one_point_is_refused():
    with pytest.raises(InputError, match="Expected `max_points` to be None or at least 2, but got 1"):
        roc_curve([1], [2], max_points=1)
