import pytest
import torch
from torch import Tensor

from neuralmean.errors import InputError
from neuralmean.scorers import LayersScorer
from neuralmean.scorers.statistics import ledoit_wolf

WIDTHS = [5, 700, 3]


def _rows(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(count, 708, generator=generator) @ torch.randn(
        708, 708, generator=torch.Generator().manual_seed(9)
    )
    return mixed / 26 + 2


def _reference_distance(fitted_on: Tensor, rows: Tensor) -> Tensor:
    """Mahalanobis distance of standardised rows under the Ledoit-Wolf covariance, row by row."""
    centre, scale = fitted_on.double().mean(dim=0), fitted_on.double().std(dim=0)
    inverse = torch.linalg.inv(ledoit_wolf([(fitted_on.double() - centre) / scale]))
    standard = (rows.double() - centre) / scale
    return torch.stack([(row @ inverse @ row).sqrt() for row in standard])


def test_the_score_is_the_mean_of_the_standardised_distances_of_the_layers():
    rows, fresh = _rows(300, 0)[:, :8], _rows(20, 1)[:, :8]
    scorer = LayersScorer(widths=[5, 3]).fit(rows)
    expected = torch.zeros(20, dtype=torch.float64)
    for index, columns in enumerate((slice(0, 5), slice(5, 8))):
        distance = _reference_distance(rows[:, columns], fresh[:, columns])
        expected += (distance - scorer.usual_[index]) / scorer.spread_[index] / 2
    torch.testing.assert_close(scorer.score(fresh).double(), expected, rtol=1e-3, atol=1e-3)


def test_fresh_rows_score_about_zero_and_strange_ones_more():
    scorer = LayersScorer(widths=WIDTHS).fit(_rows(600, 0))
    fresh = _rows(300, 2)
    assert scorer.score(fresh).mean().abs() < 0.5
    strange = fresh.clone()
    strange[:, 705:] += 20
    assert scorer.score(strange).min() > scorer.score(fresh).max()


def test_contributions_and_terms_add_up_to_the_score():
    scorer = LayersScorer(widths=WIDTHS).fit(_rows(200, 0))
    fresh = _rows(10, 3)
    total = scorer.contributions(fresh).sum(dim=1) + scorer.terms(fresh)["constant"]
    torch.testing.assert_close(total, scorer.score(fresh), rtol=1e-4, atol=1e-4)


def test_only_the_chosen_rows_are_learnt_from():
    rows = _rows(200, 0)
    chosen = torch.arange(0, 200, 2)
    one, other = LayersScorer(widths=WIDTHS).fit(rows, chosen=chosen), LayersScorer(widths=WIDTHS).fit(rows[chosen])
    torch.testing.assert_close(one.score(rows[:5]), other.score(rows[:5]))


def test_widths_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="708 columns of `widths`, but got 9"):
        LayersScorer(widths=WIDTHS).fit(torch.randn(50, 9))
    scorer = LayersScorer(widths=[4, 5]).fit(torch.randn(50, 9))
    with pytest.raises(InputError, match="add up to 9 columns"):
        LayersScorer(widths=[4, 4]).load_state(scorer.state())
    with pytest.raises(InputError, match="at least 20 examples"):
        LayersScorer().fit(torch.randn(19, 9))
