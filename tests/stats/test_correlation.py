"""How far apart items must be, on streams whose correlation is known."""

import numpy as np
import pytest

from neuralmean.stats.change_point import change_interval
from neuralmean.stats.correlation import LEVELS, spacing


def _stream(random, n, rho):
    values = random.normal(size=n)
    for i in range(1, n):
        values[i] = rho * values[i - 1] + (1 - rho**2) ** 0.5 * values[i]
    return values


@pytest.mark.parametrize(("rho", "least"), [(0.5, 4), (0.9, 16), (0.99, 64)])
def test_correlated_items_must_be_far_apart(rho, least):
    random = np.random.default_rng(0)
    assert all(spacing(_stream(random, 2048, rho)) >= least for _ in range(20))


def test_independent_items_need_no_distance_also_with_ties_and_around_a_change():
    random = np.random.default_rng(1)
    streams = [random.normal(size=2048) for _ in range(50)] + [random.normal(size=2048).round() for _ in range(50)]
    assert sum(spacing(stream) > 1 for stream in streams) <= 3
    changed = [np.concatenate([random.normal(size=100), random.normal(8, 1, size=30)]) for _ in range(50)]
    assert sum(spacing(stream, 100) > 1 for stream in changed) <= 8
    assert sum(spacing(stream) > 1 for stream in changed) == 50  # which is why ranks are taken apart
    assert spacing(np.ones(300)) == 1


def test_a_change_lies_in_its_interval_as_often_as_it_says():
    # Bets that are exactly right: 90 % is what Bayes' rule promises.
    random, inside = np.random.default_rng(2), 0
    for _ in range(400):
        change, shift = int(random.integers(20, 180)), 1.0
        values = random.normal(size=200) + shift * (np.arange(200) >= change)
        low, high = change_interval((shift * values - shift**2 / 2)[:, None], np.ones(1))
        inside += low <= change <= high
    assert 0.85 < inside / 400 < 0.97


def test_more_items_than_the_largest_level_needs_are_no_harm():
    random = np.random.default_rng(3)
    assert spacing(random.normal(size=8 * 4 * LEVELS[-1] + 1)) == 1
    assert spacing(np.arange(2.0)) == spacing(np.empty(0)) == 1
    assert spacing(np.arange(3000.0)) == LEVELS[-1]
