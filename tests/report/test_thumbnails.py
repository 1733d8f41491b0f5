from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.report.gather import Pictured
from neuralmean.report.thumbnails import thumbnail

HOW = Preprocessing((8, 8), (0.2, 0.4, 0.6), (0.5, 0.25, 0.1))


def picture(*, name=None, image=None):
    return Pictured(row=0, name=name, score=1.0, p_value=0.5, kind="typical", image=image, parts=None)


def decode(uri):
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def test_the_file_is_shown_where_there_is_one(tmp_path):
    Image.new("RGB", (400, 200), (200, 10, 10)).save(tmp_path / "wide.png")
    uri = thumbnail(picture(name=str(tmp_path / "wide.png"), image=torch.zeros(3, 8, 8)), HOW)
    assert uri.startswith("data:image/jpeg;base64,")
    assert decode(uri).size == (96, 48)


def test_the_normalisation_is_undone_exactly():
    pixels = np.arange(192, dtype=np.uint8).reshape(1, 8, 8, 3)
    uri = thumbnail(picture(image=HOW.normalise(pixels)[0]), HOW)
    assert uri.startswith("data:image/png;base64,")
    np.testing.assert_array_equal(np.asarray(decode(uri)), pixels[0])


def test_without_preprocessing_values_from_0_to_1_are_shown_as_they_are():
    uri = thumbnail(picture(image=torch.full((1, 8, 8), 0.5)), None)
    assert np.asarray(decode(uri)).tolist() == [[128] * 8] * 8


def test_other_values_are_stretched():
    image = torch.linspace(-3, 5, 64).view(1, 8, 8)
    values = np.asarray(decode(thumbnail(picture(image=image), None)))
    assert (values.min(), values.max()) == (0, 255)


@pytest.mark.parametrize(
    "image",
    [None, torch.zeros(5, 8, 8), torch.zeros(7), torch.zeros(3, 8, 8, dtype=torch.long)],
    ids=["none", "channels", "vector", "integers"],
)
def test_what_is_no_image_has_no_picture(image):
    assert thumbnail(picture(image=image), HOW) is None


def test_a_file_that_is_no_image_any_more_falls_back_to_the_tensor(tmp_path):
    (tmp_path / "a.png").write_bytes(b"gone")
    assert decode(thumbnail(picture(name=str(tmp_path / "a.png"), image=torch.zeros(3, 8, 8)), None)).size == (8, 8)


def test_a_file_of_unknown_depth_falls_back_to_the_tensor(tmp_path):
    Image.fromarray(np.full((4, 4), 7.0, np.float32)).save(tmp_path / "f.tiff")
    assert decode(thumbnail(picture(name=str(tmp_path / "f.tiff"), image=torch.zeros(3, 8, 8)), None)).size == (8, 8)
