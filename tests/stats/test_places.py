from __future__ import annotations

import pytest
import torch

from neuralmean.stats.places import enlarge, patch_grid, position_weights, split_over_positions


def _reference_split(activation, shares, centre):
    """The formula of the module's text, one number at a time, for (N, C, P)."""
    n, c, p = activation.shape
    maps = torch.zeros(n, p, dtype=torch.float64)
    for i in range(n):
        for k in range(c):
            weights = [(activation[i, k, q].item() - centre[k].item()) ** 4 for q in range(p)]
            for q in range(p):
                maps[i, q] += shares[i].item() / c * weights[q] / sum(weights)
    return maps


def test_the_split_is_the_formula():
    activation, shares, centre = torch.randn(3, 4, 5), torch.rand(3), torch.randn(4)
    maps = split_over_positions(position_weights(activation, centre), shares)
    torch.testing.assert_close(maps, _reference_split(activation, shares, centre), rtol=1e-5, atol=1e-6)


def test_a_layer_that_lowers_the_score_is_spread_evenly():
    weights = position_weights(torch.tensor([[[1.0, 2.0]]]), torch.zeros(1))
    assert split_over_positions(weights, torch.tensor([-3.0])).tolist() == [[-1.5, -1.5]]


def test_channels_last_gives_the_same_split():
    activation, centre = torch.randn(2, 4, 3, 5), torch.randn(4)
    last = position_weights(activation.permute(0, 2, 3, 1), centre, channels_last=True)
    torch.testing.assert_close(last, position_weights(activation, centre))


def test_the_activation_is_left_alone():
    activation = torch.randn(2, 3, 4)
    before = activation.clone()
    position_weights(activation, torch.zeros(3))
    assert torch.equal(activation, before)


@pytest.mark.parametrize("value", [0.0, 1e12], ids=["no distance", "overflow"])
def test_a_channel_that_says_nothing_is_spread_evenly(value):
    weights = position_weights(torch.full((1, 1, 4), value), torch.zeros(1))
    assert split_over_positions(weights, torch.tensor([2.0])).tolist() == [[0.5, 0.5, 0.5, 0.5]]


def test_padding_gets_nothing():
    weights = position_weights(torch.tensor([[[1.0, 2.0, 9.0]]]), torch.zeros(1))
    maps = split_over_positions(weights, torch.tensor([17.0]), torch.tensor([[1, 1, 0]]))
    torch.testing.assert_close(maps, torch.tensor([[1.0, 16.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 3), (1, 9)])
def test_enlarging_keeps_the_sum_and_the_place(size):
    maps = torch.zeros(1, 4, 4, dtype=torch.float64)
    maps[0, 0, 3] = 2.0
    large = enlarge(maps, size)
    assert large.shape == (1, *size)
    assert large.sum().item() == pytest.approx(2.0, abs=1e-12)
    assert large[0, 0, -1] == large.max()


@pytest.mark.parametrize(
    ("n_tokens", "size", "expected"),
    [
        (64, (32, 32), (0, (8, 8))),
        (197, (224, 224), (1, (14, 14))),
        (201, (224, 224), (5, (14, 14))),
        (9, (32, 64), (1, (2, 4))),
        (1, (32, 32), None),
    ],
)
def test_the_grid_of_patches_is_found_after_the_class_tokens(n_tokens, size, expected):
    assert patch_grid(n_tokens, size) == expected
