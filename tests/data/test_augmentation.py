from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neuralmean.data.augmentation import permute_blocks, rotate
from neuralmean.errors import InputError


def _blocks(image, rows, columns):
    """The tiles of one image as a list, cut one by one."""
    height, width = image.shape[1] // rows, image.shape[2] // columns
    return [
        image[:, r * height : (r + 1) * height, c * width : (c + 1) * width].flatten().tolist()
        for r in range(rows)
        for c in range(columns)
    ]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(2, 40), st.integers(1, 40), st.integers(0, 1000))
def test_tiles_move_whole_and_never_all_stay(count, channels, height, width, seed):
    images = torch.arange(float(count * channels * height * width)).reshape(count, channels, height, width)
    shuffled = permute_blocks(images, seed=seed)
    rows, columns = min(4, height), min(4, width)
    for before, after in zip(images, shuffled, strict=True):
        assert sorted(_blocks(before, rows, columns)) == sorted(_blocks(after, rows, columns))
        assert not torch.equal(before, after)
    # what does not fit the grid stays
    assert torch.equal(shuffled[:, :, rows * (height // rows) :], images[:, :, rows * (height // rows) :])
    assert torch.equal(shuffled[..., columns * (width // columns) :], images[..., columns * (width // columns) :])


def test_the_paper_cuts_cifar_images_into_sixteen_tiles_of_eight_by_eight():
    image = torch.arange(1024.0).reshape(1, 1, 32, 32)
    assert sorted(_blocks(permute_blocks(image)[0], 4, 4)) == sorted(_blocks(image[0], 4, 4))
    assert len(_blocks(image[0], 4, 4)[0]) == 64


def test_two_tiles_always_swap():
    image = torch.tensor([[[[1.0, 2.0]]]])
    assert all(permute_blocks(image, seed=seed).flatten().tolist() == [2.0, 1.0] for seed in range(20))


def test_the_seed_decides_and_the_input_is_left_alone():
    images = torch.rand(4, 3, 16, 16)
    before = images.clone()
    assert torch.equal(permute_blocks(images, seed=3), permute_blocks(images, seed=3))
    assert not torch.equal(permute_blocks(images, seed=3), permute_blocks(images, seed=4))
    assert torch.equal(images, before)


def test_each_image_has_a_permutation_of_its_own():
    images = torch.arange(16.0).reshape(1, 1, 4, 4).expand(50, 1, 4, 4)
    assert len({tuple(image.flatten().tolist()) for image in permute_blocks(images)}) > 45


def test_a_generator_goes_on_from_batch_to_batch():
    generator, image = torch.Generator().manual_seed(0), torch.arange(256.0).reshape(1, 1, 16, 16)
    assert not torch.equal(permute_blocks(image, generator=generator), permute_blocks(image, generator=generator))


def test_only_images_can_be_permuted():
    with pytest.raises(InputError, match=r"Expected images of shape \(N, C, H, W\) to permute, but got shape \(3, 4\)"):
        permute_blocks(torch.zeros(3, 4))


def test_a_single_pixel_cannot_be_permuted():
    with pytest.raises(InputError, match="Expected at least two blocks to permute, but got 1 x 1 for 1 x 1 pixels"):
        permute_blocks(torch.zeros(1, 3, 1, 1))


@pytest.mark.parametrize("blocks", [0, -1, 2.5], ids=repr)
def test_blocks_must_be_a_positive_integer(blocks):
    with pytest.raises(InputError, match="Expected `blocks` to be a positive integer, but got"):
        permute_blocks(torch.zeros(1, 3, 8, 8), blocks=blocks)


def test_no_angle_leaves_the_image_as_it_is():
    images = torch.rand(2, 3, 6, 9)
    torch.testing.assert_close(rotate(images, degrees=0.0), images)


def test_a_turned_disc_is_the_same_disc_and_a_turned_bar_leans():
    y, x = torch.meshgrid(torch.arange(33.0) - 16, torch.arange(33.0) - 16, indexing="ij")
    disc = torch.exp(-(x.square() + y.square()) / 60)[None, None]
    torch.testing.assert_close(rotate(disc, degrees=15), disc, rtol=0, atol=0.02)
    bar = torch.exp(-x.square() / 4)[None, None].expand(20, 1, 33, 33)
    tops = rotate(bar, degrees=15)[:, 0, 2].argmax(1) - 16
    assert tops.abs().max() <= 5  # 14 pixels up, 15 degrees: tan(15 deg) * 14 = 3.8
    assert tops.min() < 0 < tops.max()


def test_only_float_images_can_be_turned():
    with pytest.raises(InputError, match="Expected float images"):
        rotate(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
