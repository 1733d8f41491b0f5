"""Selections and bounds on false flags: definitions, and the promises over many draws."""

import numpy as np
import pytest
import torch

from neuralmean.detector.decision import Decision
from neuralmean.errors import InputError
from neuralmean.stats.calibration import Calibration
from neuralmean.stats.false_flags import benjamini_hochberg


def _reference_selection(p_values, fdr):
    """The largest k for which k p-values are at most fdr * k / N, tried one by one."""
    n = len(p_values)
    for k in range(n, 0, -1):
        if sum(p <= fdr * k / n for p in p_values) >= k:
            return [p <= sorted(p_values)[k - 1] for p in p_values]
    return [False] * n


def _draw(random, n, n_in, n_out, ties):
    """A decision on inliers followed by outliers, some of them easy, with a held-out set of its own."""
    scores = np.concatenate([random.normal(size=n + n_in), random.normal(2.5, 1.0, size=n_out)])
    scores = torch.from_numpy(scores.round(0) if ties else scores)
    return Decision(scores[n:], Calibration.of(scores[:n], 0.05))


@pytest.mark.parametrize("seed", range(20))
def test_a_selection_is_that_of_its_definition(seed):
    p_values = np.random.default_rng(seed).uniform(size=30) ** 3
    assert benjamini_hochberg(p_values, 0.2).tolist() == _reference_selection(p_values.tolist(), 0.2)


@pytest.mark.parametrize("ties", [False, True], ids=["continuous", "ties"])
def test_of_the_selected_at_most_the_share_asked_for_is_false(ties):
    random, shares = np.random.default_rng(1), []
    for _ in range(600):
        chosen = _draw(random, 200, 40, 20, ties).select(fdr=0.2)
        shares.append(chosen[:40].sum().item() / max(1, chosen.sum().item()))
    assert np.mean(shares) <= 0.2 + 4 * np.std(shares) / 600**0.5
    assert np.mean(shares) > (0.02 if ties else 0.06)  # and something is selected


@pytest.mark.parametrize("ties", [False, True], ids=["continuous", "ties"])
@pytest.mark.parametrize(("n", "n_in", "n_out"), [(200, 60, 0), (200, 30, 30), (1000, 500, 50)])
def test_the_bound_holds_at_the_worst_level_chosen_after_looking(n, n_in, n_out, ties):
    random, broken, runs = np.random.default_rng(2), 0, 60
    for _ in range(runs):
        decision = _draw(random, n, n_in, n_out, ties)
        levels = sorted(set(decision.p_value.tolist()))[:25]
        broken += any(
            (decision.p_value[:n_in] <= level).sum().item() > decision.most_false(level, confidence=0.8)
            for level in levels[:: max(1, len(levels) // 5)]
        )
    assert broken <= runs * 0.2 + 3 * (runs * 0.16) ** 0.5


def test_clear_outliers_are_not_called_false():
    scores = torch.cat([torch.randn(50, generator=torch.Generator().manual_seed(0)), torch.full((50,), 9.0)])
    held_out = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    decision = Decision(scores, Calibration.of(held_out, 0.05))
    assert decision.is_ood.sum() >= 50
    assert decision.most_false() <= 12
    assert decision.most_false(0.001) <= 3
    assert decision.most_false(1e-9) == 0


def test_wrong_arguments_are_refused():
    decision = Decision(torch.zeros(3), Calibration.of(torch.randn(99), 0.05))
    with pytest.raises(InputError, match="Expected `fdr` to be a number in the"):
        decision.select(fdr=10)
    with pytest.raises(InputError, match="Expected `confidence` to be a number in the"):
        decision.most_false(confidence=95)
