"""Online ranks and evidence: exact numbers, and the promises over whole streams by simulation."""

import itertools
import math

import numpy as np
import pytest

from neuralmean.stats.betting import BETS, WEIGHTS, log_bin_probabilities, log_densities
from neuralmean.stats.sequential import Evidence, FixedBins, OnlineRanks


def _reference_counts(history, score):
    """How many came before that are larger, and how many that are equal."""
    return sum(s > score for s in history), sum(s == score for s in history)


def _reference_capital(p_values):
    """The capital from its definition: a double sum over betting densities and starting times."""
    times = range(len(p_values) + 1)
    reserve = [0.3 * (1 + math.log(1 + t)) ** -0.5 + 0.7 * (1 + t / 300) ** -0.3 for t in times]
    densities = np.exp(log_densities(np.array(p_values)))  # (N, K)
    total = reserve[-1]
    for start in range(1, len(p_values) + 1):
        weight = reserve[start - 1] - reserve[start]
        total += weight * densities[start - 1 :].prod(axis=0) @ WEIGHTS
    return total


def test_a_p_value_lies_between_the_share_above_and_the_share_at_or_above():
    random = np.random.default_rng(0)
    history = [1.0, 2.0, 2.0, 5.0]
    ranks = OnlineRanks(history, seed=3)
    for score in random.integers(0, 7, 60).astype(float):
        above, equal = _reference_counts(history, score)
        p_value = ranks.p_values([score])[0]
        assert above / (len(history) + 1) <= p_value <= (above + equal + 1) / (len(history) + 1)
        history.append(score)
    assert len(ranks) == 64


def test_beyond_the_capacity_the_interval_counts_as_a_tie():
    ranks = OnlineRanks([1.0, 2.0, 3.0], capacity=3)
    ranks.p_values([2.5, 2.6])  # both in the interval from 2 to 3
    # Above 2.9 lies the 3; tied with it are the two before: (1 + U * 3) / 6.
    assert 1 / 6 <= ranks.p_values([2.9])[0] <= 4 / 6
    # Above 1.5 lie 2 and 3 and the three in between; nothing shares its interval: (5 + U) / 7.
    assert 5 / 7 <= ranks.p_values([1.5])[0] <= 6 / 7


@pytest.mark.parametrize("capacity", [40, 10_000], ids=["urn", "all_kept"])
@pytest.mark.parametrize("ties", [False, True], ids=["continuous", "ties"])
def test_p_values_of_an_exchangeable_stream_are_uniform_and_independent(capacity, ties):
    random = np.random.default_rng(7)
    rows = []
    for repeat in range(400):
        scores = random.normal(size=70)
        if ties:
            scores = scores.round(0)
        rows.append(OnlineRanks(scores[:40], capacity=capacity, seed=repeat).p_values(scores[40:]))
    p_values = np.array(rows)  # (400, 30)
    # Mean and variance of 30 independent uniforms: 15 and 2.5. With p-values against the 40 alone it would be 21.
    assert abs(p_values.sum(axis=1).mean() - 15) < 3.5 * math.sqrt(2.5 / 400)
    assert abs(p_values.sum(axis=1).var() - 2.5) < 3.5 * 2.5 * math.sqrt(2 / 400)
    shares = np.histogram(p_values, bins=10, range=(0, 1))[0] / p_values.size
    assert np.abs(shares - 0.1).max() < 4 * math.sqrt(0.09 / p_values.size)


def test_batching_does_not_change_a_p_value():
    scores = np.random.default_rng(0).normal(size=50)
    whole = OnlineRanks(scores[:10], capacity=20).p_values(scores[10:])
    ranks = OnlineRanks(scores[:10], capacity=20)
    parts = np.concatenate([ranks.p_values(scores[a:b]) for a, b in ((10, 11), (11, 11), (11, 37), (37, 50))])
    assert whole.tolist() == parts.tolist()


@pytest.mark.parametrize("capacity", [12, 10_000], ids=["urn", "all_kept"])
def test_ranks_go_on_bit_for_bit_after_a_restart(capacity):
    scores = np.random.default_rng(0).normal(size=60).round(1)
    ranks = OnlineRanks(scores[:10], capacity=capacity, seed=5)
    ranks.p_values(scores[10:30])
    again = OnlineRanks.restore(*ranks.state())
    assert ranks.p_values(scores[30:]).tolist() == again.p_values(scores[30:]).tolist()


def test_a_state_that_does_not_fit_together_is_refused():
    arrays, values = OnlineRanks([1.0, 2.0]).state()
    with pytest.raises(ValueError, match="the ranks do not fit together"):
        OnlineRanks.restore({**arrays, "ties": arrays["ties"][:1]}, values)
    with pytest.raises(ValueError, match="the ranked scores are not in order"):
        OnlineRanks.restore({**arrays, "scores": arrays["scores"][::-1]}, values)
    evidence = Evidence(WEIGHTS)
    evidence.update(log_densities(np.array([0.5])))
    with pytest.raises(ValueError, match="the evidence is not that of this version"):
        Evidence.restore({**evidence.state(), "log_bets": [0.0]}, WEIGHTS)
    with pytest.raises(ValueError, match="the evidence is out of range"):
        Evidence.restore({**evidence.state(), "n": -1}, WEIGHTS)


def test_every_betting_density_integrates_to_one():
    # With p = u ** 8 the singularity at 0 goes away; the mirrored densities are their own image.
    u = (np.arange(400_000) + 0.5) / 400_000
    small, jacobian = u**8, 8 * u**7
    left = (np.exp(log_densities(small)) * jacobian[:, None]).mean(axis=0)
    right = (np.exp(log_densities(1 - small)) * jacobian[:, None]).mean(axis=0)
    mirrored = np.array([bet.mirrored for bet in BETS])
    assert left[~mirrored] == pytest.approx(1, abs=2e-2)
    assert right[mirrored] == pytest.approx(1, abs=2e-2)
    assert WEIGHTS.sum() == pytest.approx(1)


def test_bin_probabilities_are_the_integrals_of_the_densities():
    edges = np.array([1.0, 0.8, 0.5, 0.2, 0.1])
    steps = [np.linspace(low, high, 20001) for high, low in itertools.pairwise(edges)]
    middles = [(points[1:] + points[:-1]) / 2 for points in steps]
    expected = [np.exp(log_densities(m)).mean(axis=0) * (p[-1] - p[0]) for m, p in zip(middles, steps, strict=True)]
    plain = [not bet.mirrored for bet in BETS]  # the mirrored ones are singular at 1
    assert np.exp(log_bin_probabilities(edges))[:, plain] == pytest.approx(np.array(expected)[:, plain], rel=1e-4)
    assert np.exp(log_bin_probabilities(np.array([1.0, 0.3, 0.0]))).sum(axis=0) == pytest.approx(1)


@pytest.mark.parametrize("ties", [False, True], ids=["continuous", "ties"])
def test_bins_hold_the_next_score_as_often_as_they_say(ties):
    # The sum of 1 / probability over what happened, less the number of bins, is 0 on average, at every step.
    random, sums = np.random.default_rng(0), []
    for _ in range(2000):
        scores = random.normal(size=40 + 6)
        scores = scores.round() if ties else scores
        ranks = OnlineRanks(scores[:40], seed=int(random.integers(2**31)))
        bins = FixedBins(*ranks.ordered())
        found, log_null = bins.add(scores[40:], ranks.rank(scores[40:])[1])
        sums.append(np.exp(-log_null))
        assert bins.counts.sum() == 6
    sums = np.array(sums) / len(bins.counts)
    assert np.abs(sums.mean(axis=0) - 1).max() < 4 * sums.std() / 2000**0.5
    assert len(found) == 6


def test_a_fixed_reference_gains_where_a_growing_one_is_contaminated():
    # All strange inputs look alike: each makes the next less strange to a growing reference.
    scores = np.concatenate([np.random.default_rng(0).normal(size=300), 9 + np.linspace(0, 1, 40)[::-1]])
    ranks = OnlineRanks(scores[:300])
    bins = FixedBins(*ranks.ordered())
    p_values, ties = ranks.rank(scores[300:])
    found, log_null = bins.add(scores[300:], ties)
    growing = log_densities(p_values)[:, 0].sum()
    fixed = (log_bin_probabilities(bins.p_edges)[found, 1] - log_null).sum()
    assert fixed > growing > 0


def test_the_capital_is_that_of_its_definition():
    p_values = np.random.default_rng(0).uniform(size=25).tolist() + [0.001] * 5
    evidence = Evidence(WEIGHTS)
    log_values = evidence.update(log_densities(np.array(p_values)))
    assert log_values[-1] == pytest.approx(math.log(_reference_capital(p_values)), rel=1e-9)
    assert evidence.log_value == pytest.approx(log_values[-1], rel=1e-12)
    assert evidence.log_peak == max(0.0, *log_values)


def test_no_item_is_no_evidence():
    evidence = Evidence(WEIGHTS)
    assert evidence.log_value == 0.0
    assert evidence.update(np.empty((0, len(WEIGHTS)))).tolist() == []
    assert Evidence.restore(evidence.state(), WEIGHTS).log_value == 0.0


def test_evidence_does_not_depend_on_batching_and_goes_on_after_a_restart():
    p_values = np.random.default_rng(1).uniform(size=40)
    whole = Evidence(WEIGHTS).update(log_densities(np.array(p_values)))
    evidence = Evidence(WEIGHTS)
    first = evidence.update(log_densities(p_values[:17]))
    evidence = Evidence.restore(evidence.state(), WEIGHTS)
    assert np.concatenate([first, evidence.update(log_densities(p_values[17:]))]).tolist() == whole.tolist()


def test_evidence_of_a_long_shifted_stream_does_not_overflow():
    assert np.isfinite(Evidence(WEIGHTS).update(log_densities(np.full(5000, 1e-15)))).all()


@pytest.mark.parametrize("n_held_out", [200, 2000])
def test_false_alarms_over_a_long_stream_stay_below_what_is_promised(n_held_out):
    # 100 streams of 3,000 items at 20 %: at most 20 expected; 32 has probability 0.3 % if exactly 20 % were reached.
    random = np.random.default_rng(n_held_out)
    alarms = 0
    for repeat in range(100):
        scores = random.standard_t(4, size=n_held_out + 3000)
        evidence = Evidence(WEIGHTS)
        p_values = OnlineRanks(scores[:n_held_out], seed=repeat).p_values(scores[n_held_out:])
        evidence.update(log_densities(p_values))
        alarms += evidence.log_peak >= math.log(1 / 0.2)
    assert alarms <= 32


def test_p_values_against_the_held_out_scores_alone_would_break_the_promise():
    # What `OnlineRanks` is for: the usual p-values lead to false alarms: 3 of 20 streams have probability 0.1 % at 1 %.
    random = np.random.default_rng(0)
    alarms = 0
    for _ in range(20):
        held_out, stream = np.sort(random.normal(size=50)), random.normal(size=8000)
        p_values = (len(held_out) - np.searchsorted(held_out, stream) + random.uniform(size=8000)) / 51
        evidence = Evidence(WEIGHTS)
        evidence.update(log_densities(np.array(p_values)))
        alarms += evidence.log_peak >= math.log(1 / 0.01)
    assert alarms >= 3


def test_scores_near_one_are_counted_and_those_not_kept_with_them():
    ranks = OnlineRanks([1.0, 2.0, 2.5, 3.0, 9.0], capacity=5)
    assert [ranks.count_near(2.0, tolerance) for tolerance in (0.0, 0.5, 1.0, 100.0)] == [1, 2, 4, 5]
    ranks.p_values([2.1, 2.2, 50.0])  # two between 2 and 2.5, one above 9
    assert [ranks.count_near(2.0, tolerance) for tolerance in (0.0, 0.5, 1.0, 100.0)] == [3, 4, 6, 8]
    assert ranks.count_near(20.0, 1.0) == 1
