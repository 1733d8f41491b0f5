"""The baseline: what is kept of held-out vectors, and how far a layer may lie off by chance."""

import math

import pytest
import torch

from neuralmean.baseline import Baseline, Seen
from neuralmean.moments import Moments


def _reference_eigenvalues(rows):
    """Eigenvalues of the correlations of the columns, over their sum."""
    values = torch.linalg.eigvalsh(torch.corrcoef(rows.T.double()))
    return values / values.sum()


def _rows(n=400, seed=0):
    """Vectors of two layers: four channels that are nearly one, six that have nothing to do with each other."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(n, 1, generator=generator)
    together = common + 0.3 * torch.randn(n, 4, generator=generator)
    return torch.cat([together, 5 + 2 * torch.randn(n, 6, generator=generator)], dim=1)


COLUMNS = torch.tensor([0] * 4 + [1] * 6)


def _seen(*blocks, columns=COLUMNS, n_layers=2):
    seen = Seen(columns, n_layers)
    for block in blocks:
        seen.add(block)
    return seen.baseline()


def test_eigenvalues_are_those_of_the_correlations():
    rows = _rows()
    baseline = _seen(rows)
    for layer in (0, 1):
        values = _reference_eigenvalues(rows[:, layer == COLUMNS])
        assert baseline.squares[layer].item() == pytest.approx(values.square().sum().item(), rel=1e-9)
        largest = baseline.largest[layer].item()
        assert values.max().item() - 1e-12 <= largest == pytest.approx(values.pow(4).sum().pow(0.25).item(), rel=1e-9)


def test_fewer_rows_than_channels_have_the_same_eigenvalues():
    rows = _rows(n=5)
    values = _reference_eigenvalues(rows[:, 4:])
    assert _seen(rows).squares[1].item() == pytest.approx(values.square().sum().item(), rel=1e-9)


def test_blocks_change_nothing():
    rows = _rows()
    whole, split = _seen(rows), _seen(rows[:1], rows[1:130], rows[130:])
    assert split.moments.count == 400
    torch.testing.assert_close(split.moments.mean, whole.moments.mean)
    torch.testing.assert_close(split.squares, whole.squares)
    torch.testing.assert_close(split.largest, whole.largest)


def test_of_many_rows_every_so_many_th_serves_for_the_correlations_and_all_for_the_moments():
    rows = _rows(n=9000)
    thinned, by_hand = _seen(*rows.split(1000)), _seen(rows[::32])
    assert thinned.moments.count == 9000
    torch.testing.assert_close(thinned.moments.mean, Moments.of(rows).mean)
    torch.testing.assert_close(thinned.squares, by_hand.squares)


def test_rows_are_copied_as_a_table_may_be_written_to_later():
    rows = _rows()
    seen = Seen(COLUMNS, 2)
    seen.add(rows)
    expected = _seen(rows.clone())
    rows.zero_()
    assert torch.equal(seen.baseline().squares, expected.squares)


def test_dead_channels_are_nobody():
    rows = torch.cat([_rows(), torch.full((400, 3), 7.0)], dim=1)
    columns = torch.cat([COLUMNS, torch.tensor([1, 1, 2])])
    baseline = _seen(rows, columns=columns, n_layers=3)
    torch.testing.assert_close(baseline.squares[:2], _seen(_rows()).squares)
    assert baseline.squares[2] == baseline.largest[2] == 1


@pytest.mark.parametrize("n_rows", [16, 64])
def test_the_limit_is_passed_by_chance_no_more_often_than_it_says(n_rows):
    # 4,000 means of normal rows, at 1 %: more than 63 has probability 0.03 % at exactly 1 %.
    baseline = _seen(_rows(n=4000))
    limit = baseline.limit(math.log(100))
    over = torch.zeros(2)
    for seed in range(40):
        means = _rows(n=100 * n_rows, seed=1 + seed).reshape(100, n_rows, 10).mean(dim=1)
        squares = ((means - baseline.moments.mean) / baseline.moments.std).square() * n_rows
        over += torch.stack([squares[:, :4].mean(1), squares[:, 4:].mean(1)], dim=1).gt(limit).sum(0)
    assert (over <= 63).all()


def test_channels_of_their_own_leave_less_to_chance():
    together, apart = _seen(_rows()).limit(12.0).tolist()
    assert together == pytest.approx(24, rel=0.05)
    assert apart < 12


def test_without_correlations_channels_may_all_be_one():
    assert Baseline.bare(Moments.empty(10), 3).limit(10.0).tolist() == [20.0, 20.0, 20.0]
