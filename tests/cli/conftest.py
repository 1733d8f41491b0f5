"""A small model with weights, folders of images, and the command called as a person would."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import nn

MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.relu(self.bn2(self.conv2(x))).mean((2, 3)))
"""


def pictures(n, seed, *, strange=False):
    random = np.random.default_rng(seed)
    if strange:
        return np.repeat(random.integers(0, 256, (n, 1, 1, 3)), 12, axis=1).repeat(12, axis=2).astype(np.uint8)
    return random.integers(90, 160, (n, 12, 12, 3)).astype(np.uint8)


def save_pictures(folder, images):
    folder.mkdir(parents=True, exist_ok=True)
    for index, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{index:04d}.png")
    return folder


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A working folder with `toynet.py`, trained weights and images."""
    (tmp_path / "toynet.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("toynet", None)
    import toynet

    torch.manual_seed(0)
    model: nn.Module = toynet.Net().train()
    with torch.no_grad():
        for step in range(40):
            model((torch.from_numpy(pictures(64, 100 + step)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.5)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    save_pictures(tmp_path / "train", pictures(120, 1))
    save_pictures(tmp_path / "val", pictures(60, 2))
    save_pictures(tmp_path / "new" / "inner", pictures(5, 3))
    save_pictures(tmp_path / "new" / "odd", pictures(5, 4, strange=True))
    yield tmp_path
    sys.modules.pop("toynet", None)


@pytest.fixture
def nmd(monkeypatch, capsys):
    """Run `nmd ARGS` in this process and return exit code, stdout and stderr."""
    import warnings

    from neuralmean.cli import main

    def run(*args):
        if args[0] in ("score", "explain") and "m.nmd" in args:  # whose model is in this folder
            args = (*args, "--trust-local-code")
        monkeypatch.setattr(sys, "argv", ["nmd", *map(str, args)])
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            try:
                main()
                code = 0
            except SystemExit as stop:
                code = 0 if stop.code is None else stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


FIT = ("--weights", "w.safetensors", "--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--size", "12")


@pytest.fixture
def saved(world, nmd):
    code, _, err = nmd("fit", "toynet:Net", *FIT, "--id", "train", "--held-out", "val", "--out", "m.nmd", "-q")
    assert code == 0, err
    return world / "m.nmd"
