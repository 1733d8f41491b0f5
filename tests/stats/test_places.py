from __future__ import annotations

import pytest
import torch

from neuralmean.stats.places import SURROUNDINGS, distances, enlarge, patch_grid, split_over_positions, standing_out


def _reference_distances(activation, centre):
    """The formula of the module's text, one number at a time, for (N, C, P)."""
    n, c, p = activation.shape
    found = torch.zeros(n, p)
    for i in range(n):
        for k in range(c):
            powers = [(activation[i, k, q].item() - centre[k].item()) ** 4 for q in range(p)]
            for q in range(p):
                found[i, q] += powers[q] / sum(powers)
    return found


def test_the_distance_is_the_formula():
    activation, centre = torch.randn(3, 4, 5), torch.randn(4)
    torch.testing.assert_close(distances(activation, centre), _reference_distances(activation, centre))


def test_without_places_a_layer_is_split_in_proportion_to_the_distance():
    strange = torch.tensor([[1.0, 3.0], [0.0, 5.0]])
    maps = split_over_positions(strange, torch.tensor([8.0, 1.0]))
    assert maps.tolist() == [[2.0, 6.0], [0.0, 1.0]]


def test_a_layer_that_lowers_the_score_is_spread_evenly():
    assert split_over_positions(torch.tensor([[1.0, 2.0]]), torch.tensor([-3.0])).tolist() == [[-1.5, -1.5]]


def test_channels_last_gives_the_same_distances():
    activation, centre = torch.randn(2, 4, 3, 5), torch.randn(4)
    last = distances(activation.permute(0, 2, 3, 1), centre, channels_last=True)
    torch.testing.assert_close(last, distances(activation, centre))


def test_the_activation_is_left_alone():
    activation = torch.randn(2, 3, 4, 4)
    before = activation.clone()
    distances(activation, torch.zeros(3))
    standing_out(activation)
    assert torch.equal(activation, before)


@pytest.mark.parametrize("value", [0.0, 1e12, 1e30], ids=["no distance", "far", "overflow"])
def test_a_layer_that_says_nothing_of_places_is_spread_evenly(value):
    activation = torch.full((1, 1, 4, 4), value)
    strange, place = distances(activation, torch.zeros(1)).reshape(1, 4, 4), standing_out(activation)
    maps = split_over_positions(strange, torch.tensor([2.0]), place=place)
    torch.testing.assert_close(maps, torch.full((1, 4, 4), 0.125, dtype=torch.float64))


def test_padding_gets_nothing():
    mask = torch.tensor([[1, 1, 0]])
    strange = distances(torch.tensor([[[1.0, 2.0, 9.0]]]), torch.zeros(1), mask)
    maps = split_over_positions(strange, torch.tensor([17.0]), mask)
    torch.testing.assert_close(maps, torch.tensor([[1.0, 16.0, 0.0]], dtype=torch.float64))


def _reference_standing_out(activation):
    """The Mahalanobis distance of each position by explicit inverses, its eighth power averaged over the surroundings."""
    n, c, h, w = activation.shape
    found = torch.zeros(n, h, w, dtype=torch.float64)
    for i in range(n):
        rows = activation[i].double().reshape(c, -1)
        rows = (rows - rows.mean(dim=1, keepdim=True)) / rows.std(dim=1, correction=0, keepdim=True)
        inverse = torch.linalg.inv(rows @ rows.T / rows.shape[1] + 1e-4 * torch.eye(c, dtype=torch.float64))
        powers = torch.stack([row @ inverse @ row for row in rows.T]).reshape(h, w) ** 4
        powers -= powers[1:-1, 1:-1].min()
        for row in range(h):
            for column in range(w):
                # The outermost positions count as their neighbours.
                own = powers[min(max(row, 1), h - 2), min(max(column, 1), w - 2)]
                found[i] += own * _bell(row, h, min(h, w))[:, None] * _bell(column, w, min(h, w))
        found[i] /= found[i].sum()
    return found


def _bell(place, length, shorter):
    values = torch.exp(-((torch.arange(length).double() - place) ** 2) / (2 * (SURROUNDINGS * shorter) ** 2))
    return values / values.sum()


def test_what_stands_out_is_the_distance_from_the_rest_of_the_image():
    activation = torch.randn(2, 3, 6, 9) + torch.arange(3.0)[:, None, None]
    torch.testing.assert_close(standing_out(activation), _reference_standing_out(activation), rtol=1e-3, atol=1e-6)


def test_a_place_stands_out_whatever_the_contrast_of_the_image():
    activation = torch.randn(1, 4, 32, 32)
    activation[:, 1] = activation[:, 0] + 0.01 * activation[:, 1]  # two channels that agree
    activation[0, 1, 20:24, 4:8] *= -1  # but for one place, where no channel is large
    row, column = divmod(int(standing_out(activation)[0].argmax()), 32)
    assert 19 <= row <= 24
    assert 3 <= column <= 8
    torch.testing.assert_close(standing_out(100 * activation + 7), standing_out(activation), rtol=0.05, atol=1e-4)


def test_with_places_a_layer_goes_where_both_point():
    strange, place = torch.zeros(1, 9, 9), torch.full((1, 9, 9), 0.01, dtype=torch.float64)
    strange[0, 2, 2] = strange[0, 6, 6] = 1.0
    place[0, 6, 6] = 0.2
    maps = split_over_positions(strange, torch.tensor([3.0]), place=place)
    assert maps.sum().item() == pytest.approx(3.0, abs=1e-12)
    assert maps[0, 6, 6] > 2.9


@pytest.mark.parametrize("shape", [(1, 20, 8, 8), (1, 1, 2, 9)], ids=["few positions", "thin"])
def test_few_positions_do_not_tell_what_stands_out(shape):
    assert standing_out(torch.randn(shape)) is None


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
