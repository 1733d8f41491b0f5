"""Frames of pandas and polars, timm's data config, and lists of images of different sizes, with the real packages."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from neuralmean import Detector
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError


@pytest.fixture
def table_model():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        for _ in range(60):
            model(torch.randn(64, 4))
    return model.eval()


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_frame_gives_the_numbers_of_its_tensor(package, table_model):
    frames = pytest.importorskip(package, reason=f"{package} is not installed")
    values = {name: torch.randn(200).numpy() for name in "abcd"}
    frame = frames.DataFrame(values)
    tensor = torch.from_numpy(np.column_stack(list(values.values())))
    detector = Detector(table_model, scorer="average").fit(frame[:100], held_out=frame[100:])
    same = Detector(table_model, scorer="average").fit(tensor[:100], held_out=tensor[100:])
    assert detector.threshold == same.threshold
    output, decision = detector(frame)
    assert torch.equal(decision.score, same.score(tensor))
    assert torch.equal(output, table_model(tensor))


@pytest.mark.parametrize("package", ["pandas", "polars"])
def test_a_column_of_text_or_a_missing_value_is_refused(package, table_model):
    frames = pytest.importorskip(package, reason=f"{package} is not installed")
    detector = Detector(table_model, scorer="average").calibrate(torch.randn(100, 4))
    good = {name: [0.0, 1.0] for name in "abc"}
    with pytest.raises(InputError, match="Expected a DataFrame of numbers, but column 'd' holds"):
        detector.score(frames.DataFrame({**good, "d": ["x", "y"]}))
    with pytest.raises(InputError, match="NaN|missing"):
        detector.score(frames.DataFrame({**good, "d": [0.0, None]}))


@pytest.mark.filterwarnings("ignore")  # torchvision warns of codecs
def test_timms_own_transform_and_the_preprocessing_give_the_same_pixels():
    timm = pytest.importorskip("timm", reason="timm is not installed")
    data = importlib.import_module("timm.data")
    model = timm.create_model("resnet10t", pretrained=False)
    transform = data.create_transform(**data.resolve_model_data_config(model))
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8))
    assert torch.allclose(Preprocessing.for_timm(model)(photo), transform(photo), atol=1e-6)


class TakesList(nn.Module):
    """A model that takes a list of images of different sizes, as detection models do."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, images):
        side = max(max(image.shape[1:]) for image in images)
        padded = [nn.functional.pad(image, (0, side - image.shape[2], 0, side - image.shape[1])) for image in images]
        return [{"boxes": row.flatten()[:4]} for row in self.bn(self.conv(torch.stack(padded)))]


def train_on_lists():
    model = TakesList()
    with torch.no_grad():
        for _ in range(60):
            model(list(torch.rand(16, 3, 9, 9)))
    return model.eval()


def test_a_list_of_images_of_different_sizes_is_one_batch():
    model = train_on_lists()
    pictures = [torch.rand(3, 8 + i % 3, 9) for i in range(120)]
    detector = Detector(model, scorer="average").fit(pictures[:60], held_out=pictures[60:])
    output, decision = detector([*pictures[:3], 9 + torch.rand(3, 8, 8)])
    assert len(output) == 4
    assert decision.is_ood.tolist() == [False, False, False, True]


def test_images_of_different_sizes_cannot_be_permuted():
    pictures = [torch.rand(3, 8 + i % 3, 9) for i in range(120)]
    with pytest.raises(InputError, match="images of one size, to craft OOD examples from, but got images of different"):
        Detector(train_on_lists(), scorer="logistic").fit(pictures)
