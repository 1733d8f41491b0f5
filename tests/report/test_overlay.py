from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from neuralmean.errors import InputError
from neuralmean.report.overlay import CIVIDIS, overlay, overlay_png, overlay_uri, write_overlay


def test_the_strongest_place_is_yellow_and_the_usual_ones_are_left_clear():
    map_ = torch.zeros(8, 8)
    map_[2, 5] = 1.0
    pixels = np.asarray(overlay(Image.new("RGB", (8, 8), (0, 0, 255)), map_))
    scale = len(pixels) // 8
    inside = pixels[2 * scale + scale // 2, 5 * scale + scale // 2].astype(int)
    assert inside[0] > 150
    assert inside[2] < 150
    assert pixels[7 * scale, 0].tolist() == [0, 0, 255]


def test_the_lightness_of_the_scale_rises():
    lightness = CIVIDIS @ np.array([0.2126, 0.7152, 0.0722])
    assert (np.diff(lightness) > 0).all()


def test_a_flat_map_leaves_the_image_as_it_is():
    image = Image.new("RGB", (4, 4), (10, 20, 30))
    assert np.unique(np.asarray(overlay(image, torch.ones(4, 4))).reshape(-1, 3), axis=0).tolist() == [[10, 20, 30]]


def test_a_png_and_a_data_uri_come_out():
    x, map_ = torch.rand(3, 16, 16), torch.rand(16, 16)
    assert Image.open(io.BytesIO(overlay_png(x, map_, None))).size == (256, 256)
    assert overlay_uri(x, map_, None, 96).startswith("data:image/jpeg;base64,")
    assert overlay_uri(torch.rand(5, 16, 16), map_, None, 96) is None


def test_an_input_that_is_no_image_is_an_error(tmp_path):
    with pytest.raises(InputError, match="Expected an image to draw a map over"):
        write_overlay(tmp_path / "map.png", torch.rand(7, 4, 4), torch.rand(4, 4), None)
    assert not (tmp_path / "map.png").exists()
