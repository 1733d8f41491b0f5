"""What a model's own errors become."""

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.errors import ModelInputError


@pytest.fixture
def plain(images):
    """A detector of convolutions alone, which accept a single image as well."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    return Detector(model, scorer="average").fit(images[:200], held_out=images[200:])


def test_one_image_without_a_batch_dimension_is_told(model, images, plain):
    for detector in (Detector(model, scorer="average").calibrate(images), plain):
        with pytest.raises(ModelInputError, match=r"without a batch dimension\? Pass `x\[None\]`"):
            detector(images[0])


def test_a_list_of_images_for_a_model_that_takes_a_tensor_is_told(plain):
    with pytest.raises(ModelInputError, match=r"but got a list of images .* pass `torch.stack\(images\)`"):
        plain([torch.rand(3, 32, 32), torch.rand(3, 32, 32)])


def test_an_error_of_ours_about_a_batch_stays_what_it_is(plain):
    with pytest.raises(ModelInputError, match="expected input") as told:
        plain(torch.rand(2, 4, 8, 8))
    assert "batch dimension" not in str(told.value)
