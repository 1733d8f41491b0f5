from __future__ import annotations

import functools
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuralmean.errors import InputError
from neuralmean.stats.moments import Moments


def _reference_moments(rows):
    """Two passes over all rows at once, in float64."""
    rows = rows.double()
    mean = rows.sum(0) / len(rows)
    return mean, ((rows - mean) ** 2).sum(0) / len(rows)


@pytest.mark.parametrize("sizes", [[1], [1, 1, 1], [2, 5, 1], [7, 3], [64] * 4], ids=str)
@pytest.mark.parametrize("offset", [0.0, 1e4], ids=["centred", "far_from_zero"])
def test_moments_do_not_depend_on_batching(sizes, offset):
    rows = torch.randn(sum(sizes), 3) + offset
    total = sum(Moments.of(part) for part in rows.split(sizes))
    mean, variance = _reference_moments(rows)
    torch.testing.assert_close(total.mean, mean, rtol=1e-13, atol=0)
    torch.testing.assert_close(total.variance, variance, rtol=1e-11, atol=1e-13)
    assert total.count == sum(sizes)


def test_the_numbers_by_hand():
    moments = Moments.of(torch.tensor([[1.0, 10.0], [3.0, 10.0]])) + Moments.of(torch.tensor([[8.0, 10.0]]))
    assert moments.mean.tolist() == [4.0, 10.0]
    assert moments.m2.tolist() == [26.0, 0.0]  # 9 + 1 + 16
    assert moments.std.tolist() == [(26 / 3) ** 0.5, 0.0]


def test_nothing_is_neutral():
    some = Moments.of(torch.tensor([[1.0], [2.0]]))
    for total in (
        some + Moments.empty(1),
        Moments.empty(1) + some,
        Moments.empty(1) + Moments.of(torch.zeros(0, 1)) + some,
    ):
        assert (total.count, total.mean.item(), total.m2.item()) == (2, 1.5, 0.5)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=2, max_size=6), st.integers(0, 2**31), st.floats(-1e6, 1e6))
def test_merging_is_associative_and_commutative_to_rounding(sizes, seed, offset):
    generator = torch.Generator().manual_seed(seed)
    parts = [Moments.of(torch.randn(size, 2, generator=generator, dtype=torch.float64) + offset) for size in sizes]
    forward, backward = functools.reduce(operator.add, parts), functools.reduce(operator.add, parts[::-1])
    torch.testing.assert_close(forward.mean, backward.mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(forward.m2, backward.m2, rtol=1e-9, atol=1e-6)


def test_a_million_examples_in_a_thousand_shards_equal_one_pass():
    rows = torch.randn(100_000, 2, dtype=torch.float64) * 3 + 100
    shards = sum(Moments.of(shard) for shard in rows.chunk(1000))
    whole = Moments.of(rows)
    assert (shards.mean - whole.mean).abs().max() < 1e-12 * whole.mean.abs().max()
    assert ((shards.variance - whole.variance) / whole.variance).abs().max() < 1e-12


def test_other_channels_do_not_merge():
    with pytest.raises(InputError, match="Expected moments of the same channels, but got 1 and 2"):
        Moments.empty(1) + Moments.empty(2)


def test_rows_must_be_rows():
    with pytest.raises(InputError, match=r"Expected rows of shape \(N, C\), but got shape \(3,\)"):
        Moments.of(torch.zeros(3))


def test_no_rows_have_no_variance():
    with pytest.raises(InputError, match="Expected moments of at least one row"):
        _ = Moments.empty(2).variance


def test_only_moments_can_be_added():
    with pytest.raises(TypeError):
        Moments.empty(1) + 1
