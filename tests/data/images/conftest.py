"""Images made on the spot."""

import io
import sys

import numpy as np
import pytest
from PIL import Image

from neuralmean.data.preprocessing import Preprocessing

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX system")


SMALL = Preprocessing((8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def noise(seed=0, size=(8, 8), channels=3):
    shape = (*size, channels) if channels > 1 else size
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, seed=0, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(seed, size)).save(path)
    return path


def encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def collect(batches):
    names, rows = [], []
    for images, batch_names in batches:
        names.extend(batch_names)
        rows.extend(images)
    return names, rows


@pytest.fixture
def folder(tmp_path):
    """Ten images in nested folders, and other things."""
    for i, name in enumerate(
        ["b.png", "a.jpg", "sub/z.webp", "sub/deep/y.bmp", "sub/deep/x.tiff", "c/1.PNG", "c/2.jpeg"]
    ):
        save(tmp_path / "photos" / name, i)
    (tmp_path / "photos" / "notes.txt").write_text("hello")
    (tmp_path / "photos" / ".hidden.png").write_bytes(b"")
    (tmp_path / "photos" / "features.npy").write_bytes(b"")
    return tmp_path / "photos"


@pytest.fixture
def many(tmp_path):
    """A folder of 150 images of 8 x 8: more than two tasks, so that processes are started."""
    for i in range(150):
        save(tmp_path / "many" / f"{i:03}.png", i)
    return tmp_path / "many"
