"""A folder as the pages describe it: a model of one's own with weights, photos, and something strange."""

import os
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.cli.conftest import nmd  # noqa: F401  # the fixture

NETS = """
import torch
from torch import nn


class ResNet8(nn.Module):
    def __init__(self, classes=8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv3, self.bn3 = nn.Conv2d(16, 32, 3, padding=1, stride=2, bias=False), nn.BatchNorm2d(32)
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        x = x + torch.relu(self.bn2(self.conv2(x)))
        return self.fc(torch.relu(self.bn3(self.conv3(x))).mean((2, 3)))
"""

MODEL = """
from neuralmean.data.preprocessing import Preprocessing
from torchnets import ResNet8


def build():
    return ResNet8(classes=8)


build.preprocessing = Preprocessing(size=(32, 32), mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
"""


def photos(n, seed):
    """Smooth coloured pictures, uint8 of shape (n, 32, 32, 3)."""
    coarse = np.random.default_rng(seed).integers(60, 200, (n, 4, 4, 3)).astype(np.uint8)
    return np.stack([np.asarray(Image.fromarray(one).resize((32, 32))) for one in coarse])


def as_input(images):
    return (torch.from_numpy(images).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25


def train(build):
    """Return the model after learning briefly which colours are bright: 8 classes."""
    torch.manual_seed(0)
    model = build().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(60):
        batch = as_input(photos(32, 100 + step))
        labels = (batch.mean((2, 3)) > 0.1).long() @ torch.tensor([4, 2, 1])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), labels).backward()
        optimizer.step()
    return model.eval()


def strangers():
    """Black and white noise, uint8 of shape (8, 32, 32, 3)."""
    return 255 * np.random.default_rng(9).integers(0, 2, (8, 32, 32, 1)).repeat(3, axis=3).astype(np.uint8)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder that each page gets a copy of."""
    path = tmp_path_factory.mktemp("pages")
    (path / "torchnets.py").write_text(NETS)
    (path / "mymodel.py").write_text(MODEL)
    noise = strangers()
    sets = {
        "photos/train": photos(120, 1),
        "photos/val": photos(130, 2),
        "photos/test": photos(40, 3),
        "drawings": noise,
    }
    sets["new-photos"] = np.concatenate([photos(4, 4), noise[:2]])
    for name, images in sets.items():
        (path / name).mkdir(parents=True)
        for index, image in enumerate(images):
            Image.fromarray(image).save(path / name / f"{index:03d}.png")
    for name in ("new-photos/strange.png", "strange.png", "photo.png", "cat.png", "street.png"):
        Image.fromarray(noise[0]).save(path / name)
    return path


@pytest.fixture
def world(folder, tmp_path, monkeypatch):
    """Make a copy of the folder the current one, and return the names that pages use without introducing them."""
    from neuralmean import Detector

    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    for name in ("torchnets", "mymodel"):
        sys.modules.pop(name, None)
    import mymodel

    weights = folder / "mymodel.safetensors"
    if not weights.exists():
        save_file(train(mymodel.build).state_dict(), weights)
    shutil.copy(weights, tmp_path)
    model = mymodel.build().eval()
    model.load_state_dict(load_file(weights))
    known, unseen, strange = (as_input(images) for images in (photos(120, 1), photos(130, 2), strangers()))
    detector = Detector(model).fit(known, held_out=unseen)
    info = {
        "model": "mymodel:build",
        "weights": str(tmp_path / "mymodel.safetensors"),
        "preprocessing": mymodel.build.preprocessing.to_json(),
    }
    detector.save("model.nmd", info=info)
    yield {
        "__name__": "page",
        "torch": torch,
        "np": np,
        "model": model,
        "detector": detector,
        "preprocessing": mymodel.build.preprocessing,
        "id_images": known,
        "unseen_id_images": unseen,
        "ood_images": strange,
        "ood_data": strange,
        "id_data": known,
        "held_out": unseen,
        "unseen": unseen,
        "train": known,
        "boxes": torch.tensor([[[0.0, 0.0, 16.0, 16.0]]]).expand(2, 1, 4),
        "cameras": ["north", "south"] * (len(unseen) // 2),
        "cameras_of_x": ["north", "south"],
        "x": strange[:2],
        "images": strange.numpy(),
        "fog": strange,
        "night": strange,
        "decision": detector.predict(strange),
    }
    for name in ("torchnets", "mymodel"):
        sys.modules.pop(name, None)
