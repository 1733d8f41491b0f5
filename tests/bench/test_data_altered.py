"""Altered photos: same size and number, another look, the same for the same seed."""

import numpy as np
import pytest

from neuralmean.bench.data import ALTERATIONS, ImageSet, alter


@pytest.fixture
def photos():
    pixels = np.full((2, 64, 64, 3), 40, np.uint8)
    pixels[:, :, 32:] = 200  # one vertical edge
    return ImageSet.of(pixels, None, name="photos", split="test")


@pytest.mark.parametrize("name", ALTERATIONS)
def test_altered_photos_keep_their_size_and_depend_on_the_seed_alone(photos, name):
    first, second = alter(photos, name), alter(photos, name)
    assert first.images.shape == photos.images.shape
    assert (first.name, first.split) == (name, "test")
    assert first.digest == second.digest != photos.digest


def test_a_sketch_is_dark_at_edges_and_white_elsewhere(photos):
    image = alter(photos, "photo-sketch").images[0]
    assert (image[:, :20] == 255).all()
    assert (image[:, 44:] == 255).all()
    assert image[:, 31:33].max() < 30


def test_blur_leaves_the_mean_and_takes_the_edge(photos):
    image = alter(photos, "photo-blur").images[0].astype(float)
    assert abs(image.mean() - photos.images[0].mean()) < 2
    assert abs(image[32, 33, 0] - image[32, 30, 0]) < 100


def test_noise_has_the_deviation_it_says():
    grey = ImageSet.of(np.full((1, 64, 64, 3), 128, np.uint8), None, name="grey", split="test")
    noisy = alter(grey, "photo-noise").images
    # Of N(0.5, 0.38), clipped to [0, 1]: 9.4 % of the pixels are at either end.
    assert 0.08 < (noisy == 0).mean() < 0.11
    assert 0.08 < (noisy == 255).mean() < 0.11
    assert alter(grey, "photo-noise", seed=1).digest != alter(grey, "photo-noise").digest
