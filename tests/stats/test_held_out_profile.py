"""The profile: what is kept of held-out vectors, and how far a layer may lie off by chance."""

import math

import pytest
import torch

from neuralmean.stats.held_out_profile import HeldOutProfile, ProfileBuilder
from neuralmean.stats.moments import Moments


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
    seen = ProfileBuilder(columns, n_layers)
    for block in blocks:
        seen.add(block)
    return seen.profile()


def test_eigenvalues_are_those_of_the_correlations():
    rows = _rows(n=200)
    profile = _seen(rows)
    for layer in (0, 1):
        values = _reference_eigenvalues(rows[:, layer == COLUMNS])
        assert profile.squares[layer].item() == pytest.approx(values.square().sum().item(), rel=1e-9)
        largest = profile.largest[layer].item()
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


def test_of_many_rows_some_serve_for_the_correlations_and_all_for_the_moments():
    rows = _rows(n=9000)
    profile = _seen(*rows.split(1000))
    assert profile.moments.count == 9000
    torch.testing.assert_close(profile.moments.mean, Moments.of(rows).mean)
    for layer in (0, 1):
        values = _reference_eigenvalues(rows[:, layer == COLUMNS])
        assert profile.squares[layer].item() == pytest.approx(values.square().sum().item(), rel=0.1)
    one_by_one = _seen(*rows.split(1))
    assert torch.equal(one_by_one.squares, profile.squares)


def test_one_may_ask_on_the_way():
    rows, seen = _rows(n=200), ProfileBuilder(COLUMNS, 2)
    seen.add(rows[:20])
    seen.profile()
    seen.add(rows[20:])
    torch.testing.assert_close(seen.profile().squares, _seen(rows).squares)


def test_sources_that_take_turns_are_all_in_the_sample():
    rows = torch.randn(4096, 10, generator=torch.Generator().manual_seed(0))
    rows[::2] += 3  # makes all channels move together
    torch.testing.assert_close(_seen(rows).squares, _seen(rows[torch.randperm(4096)]).squares, rtol=0.1, atol=0)


def test_what_is_kept_does_not_grow():
    seen = ProfileBuilder(COLUMNS, 2)
    for row in _rows(n=5000).split(1):
        seen.add(row)
    assert sum(map(len, seen._rows)) < 512
    assert len(seen._rows) < 512


def test_rows_are_copied_as_a_table_may_be_written_to_later():
    rows = _rows()
    seen = ProfileBuilder(COLUMNS, 2)
    seen.add(rows)
    expected = _seen(rows.clone())
    rows.zero_()
    assert torch.equal(seen.profile().squares, expected.squares)


def test_dead_channels_are_nobody():
    rounding = 1e-6 * torch.randn(400, 2, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([_rows(), 0.1 + rounding, torch.full((400, 1), 7.0)], dim=1)
    columns = torch.cat([COLUMNS, torch.tensor([1, 1, 2])])
    profile, living = _seen(rows, columns=columns, n_layers=3), _seen(_rows())
    torch.testing.assert_close(profile.squares[:2], living.squares)
    assert profile.squares[2] == profile.largest[2] == 1
    moved = Moments.of(rows + 1)
    shifts = profile.layer_shifts([moved])[0]
    torch.testing.assert_close(shifts[:2], living.layer_shifts([Moments.of(_rows() + 1)])[0])
    assert shifts[2] == 0


def test_small_layers_are_alive_beside_large_ones():
    rows = _rows()
    rows[:, 4:] *= 1e6
    assert (_seen(rows).layer_shifts([Moments.of(rows + rows.std(dim=0))])[0] > 0.9).all()


@pytest.mark.parametrize("n_rows", [16, 64])
def test_the_limit_is_passed_by_chance_no_more_often_than_it_says(n_rows):
    # 4,000 means of normal rows, at 1 %: more than 63 has probability 0.03 % at exactly 1 %.
    profile = _seen(_rows(n=4000))
    limit = profile.limit(math.log(100))
    over = torch.zeros(2)
    for seed in range(40):
        means = _rows(n=100 * n_rows, seed=1 + seed).reshape(100, n_rows, 10).mean(dim=1)
        squares = ((means - profile.moments.mean) / profile.moments.std).square() * n_rows
        over += torch.stack([squares[:, :4].mean(1), squares[:, 4:].mean(1)], dim=1).gt(limit).sum(0)
    assert (over <= 63).all()


def test_the_limit_is_that_of_the_formula():
    profile = HeldOutProfile(COLUMNS, Moments.empty(10), torch.tensor([0.36, 0.09]), torch.tensor([0.5, 0.2]))
    by_hand = [1 + 2 * 3 * 0.6 + 18 * 0.5, 1 + 2 * 3 * 0.3 + 18 * 0.2]
    assert profile.limit(9.0).tolist() == pytest.approx(by_hand)


def test_channels_of_their_own_leave_less_to_chance():
    together, apart = _seen(_rows()).limit(12.0).tolist()
    assert together == pytest.approx(24, rel=0.05)
    assert apart < 12


def test_without_correlations_channels_may_all_be_one():
    assert HeldOutProfile.bare(COLUMNS, Moments.empty(10), 3).limit(10.0).tolist() == [20.0, 20.0, 20.0]
