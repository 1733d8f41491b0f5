from __future__ import annotations

import json
import math
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuralmean.detector.decision import Decision
from neuralmean.errors import CalibrationError, CalibrationWarning, InputError
from neuralmean.stats.calibration import (
    MAX_SCORES,
    Calibration,
    _largest_rank,
    check_enough,
    check_rate,
    examples_for_twice,
    examples_needed,
    likely_rates,
)


def _reference_p_value(calibration_scores, score):
    """Counted one by one: how many scores, the new one among them, are at least as large."""
    return (1 + sum(other >= score for other in calibration_scores)) / (len(calibration_scores) + 1)


@pytest.fixture(autouse=True)
def nothing_remembered():
    """No answer of an earlier test is given again, least of all to a mutant of the function."""
    examples_needed.cache_clear()
    _largest_rank.cache_clear()


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 20), min_size=19, max_size=60), st.integers(-1, 21), st.sampled_from([0.05, 0.1, 0.25]))
def test_p_value_and_threshold_agree_also_with_ties(scores, score, rate):
    calibration = Calibration.of(torch.tensor(scores, dtype=torch.float32), rate)
    p_value = calibration.p_value(torch.tensor([float(score)])).item()
    assert p_value == pytest.approx(_reference_p_value(scores, score))
    assert (score > calibration.threshold) == (p_value <= rate)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.05, 0.07, 0.1, 0.15, 0.3])
@pytest.mark.parametrize("n", [19, 99, 199, 999, 1999, 9999])
@pytest.mark.parametrize("confidence", [None, 0.9])
def test_is_ood_is_the_p_value_at_most_the_level_also_as_python_floats(n, rate, confidence):
    if n < examples_needed(rate, confidence):
        pytest.skip("too few for the rate")
    decision = Decision(torch.arange(-1.0, n + 2), Calibration.of(torch.arange(float(n)), rate, confidence=confidence))
    assert decision.p_value.dtype == torch.float64
    rows = json.loads(json.dumps([decision.p_value.tolist(), decision.is_ood.tolist()]))
    assert [p_value <= decision.level for p_value in rows[0]] == rows[1]
    assert rows[1] == (decision.score > decision.threshold).tolist()
    if confidence is None:  # as many as the exact fractions say: none too many, none too few
        assert sum(rows[1]) == int(Fraction(repr(rate)) * (n + 1)) + 1


def _reference_rank(n, rate, confidence):
    """The largest j for which at least j of n Bernoulli trials succeed with the confidence, in exact fractions."""
    p, tail, best = Fraction(repr(rate)), Fraction(1), 0
    for j in range(1, n + 1):
        tail -= math.comb(n, j - 1) * p ** (j - 1) * (1 - p) ** (n - j + 1)
        if tail < Fraction(repr(confidence)):
            break
        best = j
    return best


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", [20, 59, 100, 458])
def test_the_level_with_confidence_is_that_of_exact_binomials(n, rate, confidence):
    wanted = _reference_rank(n, rate, confidence)
    assert (n >= examples_needed(rate, confidence)) == (wanted >= 1)
    if wanted:
        calibration = Calibration.of(torch.arange(float(n)), rate, confidence=confidence)
        assert calibration.level == wanted / (n + 1)
        assert calibration.threshold == n - wanted


def test_a_tiny_rate_with_confidence_is_counted_without_a_table_of_that_length():
    assert examples_needed(1e-12, 0.95) == pytest.approx(math.log(20) * 1e12, rel=1e-9)
    with pytest.raises(CalibrationError, match="Expected at least 29957322"):
        Calibration.of(torch.randn(20), 1e-7, confidence=0.95)


@pytest.mark.parametrize("rate", [1e-3, 0.01, 0.05, 0.3, 0.5, 0.7])
@pytest.mark.parametrize("confidence", [0.1, 0.5, 0.75, 0.9375, 0.95, 0.999])
def test_the_number_needed_with_confidence_is_that_of_exact_fractions(rate, confidence):
    p, failing = Fraction(repr(rate)), 1 - Fraction(repr(confidence))
    needed = examples_needed(rate, confidence)
    assert (1 - p) ** needed <= failing
    assert needed == 1 or (1 - p) ** (needed - 1) > failing


def test_the_number_needed_with_confidence_is_said():
    message = (
        "Expected at least 59 held-out examples for a false-alarm rate of 0.05 that holds with a confidence of 0.95, "
        "but got 58. Pass more, or ask for a rate of at least 0.0503."
    )
    with pytest.raises(CalibrationError, match=re.escape(message)):
        Calibration.of(torch.randn(58), 0.05, confidence=0.95)
    with pytest.raises(InputError, match=re.escape("Expected `confidence` to be a number in the (0, 1) range")):
        Calibration.of(torch.randn(580), 0.05, confidence=95)


@pytest.mark.parametrize("n", [100, 500])
@pytest.mark.parametrize("ties", [False, True], ids=["continuous", "ties"])
def test_with_confidence_the_rate_is_exceeded_as_seldom_as_promised(n, ties):
    """Uniform scores, for which the false-alarm rate of a threshold is known; tied ones go in steps of 1/50."""
    generator = torch.Generator().manual_seed(n)
    broken = 0
    for _ in range(2000):
        scores = torch.rand(n, generator=generator, dtype=torch.float64)
        scores = (scores * 50).floor() / 50 if ties else scores
        threshold = Calibration.of(scores, 0.1, confidence=0.9).threshold
        broken += (1 - threshold - (0.02 if ties else 0)) > 0.1 + 1e-9
    assert broken <= 2000 * 0.1 + 4 * (2000 * 0.09) ** 0.5


@pytest.mark.parametrize("n", [19, 25, 100, 173])
@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2])
def test_false_alarms_are_at_most_what_was_asked_for(n, rate):
    """Over 4,000 draws of held-out and fresh scores the share of fresh ones flagged is the rate, minus rounding."""
    generator = torch.Generator().manual_seed(n)
    draws, fresh = torch.randn(4000, n, generator=generator), torch.randn(4000, generator=generator)
    flagged = torch.tensor([Calibration.of(held, rate).threshold < new for held, new in zip(draws, fresh, strict=True)])
    share, spread = flagged.float().mean().item(), (rate * (1 - rate) / 4000) ** 0.5
    assert share <= rate + 4 * spread
    assert share >= rate - 1 / (n + 1) - 4 * spread  # and not much less: the threshold is not needlessly high


@pytest.mark.parametrize("groups", [None, [row % 3 for row in range(40_000)]], ids=["together", "by_group"])
def test_thinning_is_the_same_each_time(groups):
    scores = torch.randn(40_000)
    first, again = (Calibration.of(scores, 0.01, groups=groups) for _ in range(2))
    assert torch.equal(first.scores, again.scores)
    assert len(first.scores) == (MAX_SCORES if groups is None else 3 * MAX_SCORES)


def test_thinning_keeps_the_guarantee_and_the_size():
    calibration = Calibration.of(torch.randn(50_000), 0.01)
    assert len(calibration.scores) == MAX_SCORES
    assert (torch.randn(100_000) > calibration.threshold).float().mean().item() == pytest.approx(0.01, abs=0.004)


@pytest.mark.parametrize(("rate", "needed"), [(0.05, 19), (0.1, 9), (0.01, 99), (0.001, 999), (0.3, 3), (0.5, 1)])
def test_the_number_needed_is_exact(rate, needed):
    assert examples_needed(rate) == needed
    Calibration.of(torch.randn(needed), rate)
    if needed > 1:
        message = (
            f"Expected at least {needed} held-out examples for a false-alarm rate of {rate:g}, but got {needed - 1}. "
            f"Pass more, or ask for a rate of at least {1 / needed:.3g}."
        )
        with pytest.raises(CalibrationError, match=re.escape(message)):
            Calibration.of(torch.randn(needed - 1), rate)


@pytest.mark.parametrize("value", [0.0, 1.0, 1, 0, -0.1, 1.5, "0.05", None, True, float("nan")], ids=repr)
def test_a_rate_out_of_range_is_an_error(value):
    message = f"Expected `false_alarm_rate` to be a number in the (0, 1) range, but got {value!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        check_rate(value)


def test_scores_must_be_finite():
    with pytest.raises(InputError, match="Expected finite scores to calibrate on"):
        Calibration.of(torch.tensor([float("nan")] * 30), 0.1)


def test_thinning_leaves_as_many_scores_as_a_small_rate_needs():
    scores = torch.randn(30_000, generator=torch.Generator().manual_seed(0))
    calibration = Calibration.of(scores, 5e-5)
    assert len(calibration.scores) == 19_999
    assert calibration.threshold == calibration.scores[-1].item()
    assert calibration.p_value(torch.tensor([1e9])).item() <= 5e-5


def test_each_group_has_its_own_threshold_and_small_ones_share_one():
    scores, labels = torch.arange(60.0), ["a"] * 30 + [7] * 15 + ["c"] * 15
    with pytest.warns(
        CalibrationWarning, match="2 of 3 groups have fewer than 19 held-out examples and are pooled"
    ) as told:
        calibration = Calibration.of(scores, 0.05, groups=labels)
    assert str(told[0].message).endswith(
        "pooled: '7', 'c'. The false-alarm rate holds for them together, not for each."
    )
    assert calibration.group_names == ("7", "a", "c")
    assert calibration.scores.tolist() == scores.tolist()
    assert calibration.group_of.tolist() == [1] * 30 + [0] * 15 + [2] * 15
    assert {name: part.scores.tolist() for name, part in calibration.groups.items()} == {"a": scores[:30].tolist()}
    assert calibration.groups["a"].threshold == 29  # 1 of 31 is the most that is at most 5 %
    assert (calibration.groups["a"].false_alarm_rate, calibration.groups["a"].confidence) == (0.05, None)
    assert calibration.pooled == ("7", "c")
    assert calibration.pool.scores.tolist() == scores[30:].tolist()
    with pytest.warns(CalibrationWarning, match="1 of the groups had no held-out examples: 'new'"):
        found = calibration.parts(["a", 7, "new", "a"], 4)
    assert [(rows.tolist(), part is calibration.pool) for rows, part in found] == [([0, 3], False), ([1, 2], True)]


def test_a_pool_with_too_few_examples_is_all_of_them():
    with pytest.warns(CalibrationWarning, match="1 of 2 groups"):
        calibration = Calibration.of(torch.arange(35.0), 0.05, groups=["a"] * 30 + ["b"] * 5)
    assert len(calibration.pool.scores) == 35
    exactly = ["a"] * 30 + ["b"] * 10 + ["c"] * 9
    with pytest.warns(CalibrationWarning, match="2 of 3 groups"):
        assert len(Calibration.of(torch.arange(49.0), 0.05, groups=exactly).pool.scores) == 19


def test_of_many_small_groups_ten_are_named():
    labels = [f"g{i:02d}" for i in range(12) for _ in range(5)] + ["z"] * 19
    with pytest.warns(CalibrationWarning, match=r"12 of 13 groups .*: 'g00', .*, 'g09' and 2 more\. The false"):
        Calibration.of(torch.arange(79.0), 0.05, groups=labels)


def test_without_groups_all_rows_have_one_calibration():
    calibration = Calibration.of(torch.arange(30.0), 0.05)
    ((rows, part),) = calibration.parts(None, 3)
    assert (rows.tolist(), part is calibration, calibration.pool is calibration) == ([0, 1, 2], True, True)
    assert (calibration.groups, calibration.pooled) == ({}, ())


def test_groups_and_inputs_must_be_as_many():
    calibration = Calibration.of(torch.arange(60.0), 0.05, groups=["a"] * 30 + ["b"] * 30)
    with pytest.raises(
        InputError, match="Expected `groups`, a label for each input, as the detector was calibrated by group"
    ):
        calibration.parts(None, 2)
    with pytest.raises(InputError, match="Expected a group for each of 2 inputs, but got 1"):
        calibration.parts(["a"], 2)
    with pytest.raises(InputError, match="Expected a group for each of 60 held-out examples, but got 2"):
        Calibration.of(torch.arange(60.0), 0.05, groups=["a", "b"])


def test_groups_are_thinned_one_by_one():
    scores = torch.randn(25_000, generator=torch.Generator().manual_seed(0))
    calibration = Calibration.of(scores, 0.05, groups=["a"] * 24_000 + ["b"] * 1_000)
    assert [len(calibration.groups[name].scores) for name in ("a", "b")] == [MAX_SCORES, 1000]
    assert bool((calibration.scores.diff() >= 0).all())


@pytest.mark.parametrize(("count", "level"), [(199, 0.05), (99, 0.01), (40, 0.2)])
def test_the_range_of_rates_is_that_of_thresholds_set_on_many_draws(count, level):
    """Uniform scores: the rate of a threshold t is 1 - t."""
    draws = torch.rand(4000, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rates = torch.tensor([1 - Calibration.of(scores, level).threshold for scores in draws])
    low, high = likely_rates(count, level)
    assert (rates < low).double().mean().item() == pytest.approx(0.025, abs=0.01)
    assert (rates > high).double().mean().item() == pytest.approx(0.025, abs=0.01)


@pytest.mark.parametrize("rate", [0.01, 0.05, 0.2])
def test_as_many_examples_as_it_takes_keep_a_rate_below_twice_the_one_asked_for(rate):
    enough = examples_for_twice(rate)
    assert likely_rates(enough, rate)[1] <= 2 * rate < likely_rates(enough - examples_needed(rate) - 1, rate)[1]


def test_known_groups_need_no_warning():
    labels = ["a"] * 30 + ["b"] * 30
    calibration = Calibration.of(torch.arange(60.0), 0.05, groups=labels)
    assert [rows.tolist() for rows, _ in calibration.parts(["b", "a"], 2)] == [[0], [1]]


@pytest.mark.parametrize("count", [0, 1])
def test_the_rate_that_few_examples_allow_with_confidence_is_said(count):
    with pytest.raises(CalibrationError, match=r"or ask for a rate of at least 0\.95\."):
        check_enough(count, 0.05, 0.95)


@pytest.mark.parametrize(
    ("count", "level", "rank"), [(199, 0.05, 10), (198, 0.05, 9), (20, 0.01, 1), (1, 0.5, 1), (9, 0.9, 9)]
)
@pytest.mark.parametrize("share", [0.5, 0.95])
def test_the_range_of_rates_is_that_of_the_beta_distribution(count, level, rank, share):
    """At its ends the distribution of Beta(j, n + 1 - j), a sum of binomial probabilities, leaves out half of the rest each."""
    for end, expected in zip(likely_rates(count, level, share=share), ((1 - share) / 2, (1 + share) / 2), strict=True):
        terms = (math.comb(count, k) * end**k * (1 - end) ** (count - k) for k in range(rank, count + 1))
        assert sum(terms) == pytest.approx(expected, rel=1e-6)


def test_a_warning_of_small_groups_says_how_many_examples_a_confidence_needs():
    with pytest.warns(CalibrationWarning, match="1 of 2 groups have fewer than 59 held-out examples"):
        Calibration.of(torch.randn(90), 0.05, confidence=0.95, groups=["a"] * 60 + ["b"] * 30)


@pytest.mark.parametrize(("pooled", "known"), [(15, "the pooled groups"), (5, "all held-out examples")])
def test_a_group_without_examples_is_compared_with_what_the_warning_says(pooled, known):
    labels = ["a"] * 30 + ["b"] * pooled + ["c"] * pooled
    with pytest.warns(CalibrationWarning, match="2 of 3 groups"):
        calibration = Calibration.of(torch.arange(float(len(labels))), 0.05, groups=labels)
    message = (
        f"'d'. Their inputs are compared with {known}, and the false-alarm rate may not hold for them. Calibrate with"
    )
    with pytest.warns(CalibrationWarning, match=re.escape(message)):
        ((_, own),) = calibration.parts(["d"], 1)
    assert len(own.scores) == (30 if pooled == 15 else len(labels))


def test_groups_with_too_few_examples_are_named_up_to_ten():
    for count, rest in ((10, ""), (11, " and 1 more"), (25, " and 15 more")):
        labels = [f"{row % count:02}" for row in range(count)] + ["many"] * 40
        names = ", ".join(f"'{row:02}'" for row in range(10))
        with pytest.warns(CalibrationWarning, match=re.escape(f"are pooled: {names}{rest}. ")):
            Calibration.of(torch.arange(float(len(labels))), 0.05, groups=labels)


@pytest.mark.parametrize("groups", ["door", 7], ids=repr)
def test_groups_that_are_no_labels_are_refused(groups):
    with pytest.raises(InputError, match=f"Expected `groups` to be a label for each input, but got {groups!r}"):
        Calibration.of(torch.randn(50), 0.05, groups=groups)


def test_labels_of_groups_may_be_a_tensor():
    calibration = Calibration.of(torch.randn(50), 0.05, groups=torch.arange(50) % 2)
    assert calibration.group_names == ("0", "1")
    parts = calibration.parts(torch.tensor([1, 0, 1]), 3)
    assert [(rows.tolist(), len(own.scores)) for rows, own in parts] == [([0, 2], 25), ([1], 25)]
