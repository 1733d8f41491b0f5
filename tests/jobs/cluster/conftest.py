"""150 small images, one of them damaged, and a detector for them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from neuralmean import Detector
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.jobs import cluster as distributed
from tests.conftest import make_trained

SMALL = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)


N = 150


def pixels(i, side=8):
    return np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8)


def png(i):
    buffer = io.BytesIO()
    Image.fromarray(pixels(i)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """150 images in two subfolders, of which number 7 is damaged, and a text file."""
    top = tmp_path_factory.mktemp("images")
    for i in range(N):
        path = top / ("a" if i < 100 else "b") / f"{i:04}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(png(i) if i != 7 else b"no image")
    (top / "notes.txt").write_text("hello")
    return top


@pytest.fixture(scope="module")
def good(folder):
    return sorted(path for path in folder.rglob("*.png") if path.stem != "0007")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "tiny.nmd"
    images = torch.stack([SMALL(Image.fromarray(pixels(i))) for i in range(1000, 1200)])
    Detector(make_trained(), scorer="average").calibrate(images).save(path, info={"preprocessing": SMALL.to_json()})
    return path


def score(saved, sources, out, **options):
    return distributed.score(saved, sources, out=out, model=make_trained, **{"workers": 0, **options})


def rows_of(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def names_of(chunks):
    return [name for chunk in chunks for name in chunk.piece.names]


class ConvNet(nn.Module):
    """No batch norm, so that the reference must come from data."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))


def make_convnet():
    torch.manual_seed(5)
    return ConvNet().eval()


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """Fifty more images, in an array."""
    path = tmp_path_factory.mktemp("fresh") / "fresh.npz"
    np.savez(path, images=np.stack([pixels(i) for i in range(2000, 2050)]))
    return path


@pytest.fixture(scope="module")
def containers(tmp_path_factory):
    """The same 150 images as an array, a tar, and parquet of bytes, structs, nested lists and tensors."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    top = tmp_path_factory.mktemp("containers")
    np.savez(top / "array.npz", images=np.stack([pixels(i) for i in range(N)]))
    with tarfile.open(top / "shard.tar", "w") as archive:
        for i in range(N):
            for suffix, data in (("png", png(i)), ("cls", b"3")):
                entry = tarfile.TarInfo(f"{i:04}.{suffix}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    kind = pa.fixed_shape_tensor(pa.uint8(), (8, 8, 3))
    flat = pa.FixedSizeListArray.from_arrays(pa.array(np.stack([pixels(i) for i in range(N)]).reshape(-1)), 192)
    columns = {
        "bytes": pa.array([png(i) for i in range(N)]),
        "struct": pa.array([{"bytes": png(i), "path": f"{i}"} for i in range(N)]),
        "lists": pa.array([pixels(i).tolist() for i in range(N)]),
        "tensor": pa.ExtensionArray.from_storage(kind, flat),
    }
    for name, column in columns.items():
        table = pa.table({"label": list(range(N)), "image": column})
        pq.write_table(table, top / f"{name}.parquet", row_group_size=1000)
    paths = {name: top / f"{name}.parquet" for name in columns}
    return {"array": top / "array.npz", "tar": top / "shard.tar", **paths}
