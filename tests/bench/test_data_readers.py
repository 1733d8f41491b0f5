"""Readers, one format at a time: what they return, what they count, and what they say of a damaged file."""

import hashlib
import json
import sys

import numpy as np
import pytest
from PIL import Image

from neuralmean.bench.data import readers
from neuralmean.errors import ArtefactError, MissingExtraError

scipy_io = pytest.importorskip("scipy.io")

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9])


def _binary(label_bytes):
    """CIFAR's binary records: label bytes, then red, green, blue."""
    pixels = IMAGES.transpose(0, 3, 1, 2).reshape(6, -1)
    coarse = np.full((6, label_bytes - 1), 17, np.uint8)
    return np.concatenate([coarse, LABELS[:, None].astype(np.uint8), pixels], axis=1).tobytes()


def _svhn(path, **changes):
    held = {"X": IMAGES.transpose(1, 2, 3, 0), "y": np.where(LABELS == 9, 10, LABELS)[:, None].astype(np.uint8)}
    scipy_io.savemat(path, held | changes, do_compression=True)


def _sheets(folder, **changes):
    """One sheet of 2 x 4 tiles, the last two of them empty."""
    folder.mkdir()
    tiles = np.concatenate([IMAGES, np.zeros((2, 32, 32, 3), np.uint8)]).reshape(2, 4, 32, 32, 3)
    Image.fromarray(tiles.transpose(0, 2, 1, 3, 4).reshape(64, 128, 3)).save(folder / "000.webp", lossless=True)
    about = {"count": 6, "sha256": hashlib.sha256(IMAGES.tobytes()).hexdigest(), "labels": LABELS.tolist()}
    (folder / "set.json").write_text(json.dumps(about | changes))
    return folder / "set.json"


def _make(kind, tmp_path):
    """Keep IMAGES in one format; return the paths and the labels that must come back."""
    path = tmp_path / kind
    if kind == "npz":
        np.savez_compressed(path.with_suffix(".npz"), images=IMAGES, labels=LABELS)
        return [path.with_suffix(".npz")], LABELS
    if kind == "npy":
        np.save(path.with_suffix(".npy"), IMAGES)
        return [path.with_suffix(".npy")], None
    if kind in ("cifar10", "cifar100"):
        path.write_bytes(_binary(1 if kind == "cifar10" else 2))
        return [path], LABELS
    if kind == "mat":
        _svhn(path.with_suffix(".mat"))
        return [path.with_suffix(".mat")], np.where(LABELS == 9, 0, LABELS)
    if kind == "sheets":
        return [_sheets(path)], LABELS
    for row, image in enumerate(IMAGES):
        folder = path / f"class_{LABELS[row]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{row}.png")
    return [path], None


FORMATS = {
    "npz": readers.NPZ,
    "npy": readers.NPY,
    "cifar10": readers.CIFAR10_BINARY,
    "cifar100": readers.CIFAR100_BINARY,
    "mat": readers.SVHN_MAT,
    "sheets": readers.SHEETS,
}


@pytest.mark.parametrize("kind", FORMATS)
def test_images_and_labels_come_back(kind, tmp_path):
    paths, expected = _make(kind, tmp_path)
    images, labels = FORMATS[kind].read(paths, "resize")
    assert np.array_equal(images, IMAGES)
    assert labels is None if expected is None else labels.tolist() == expected.tolist()
    assert FORMATS[kind].count(paths) == 6


@pytest.mark.parametrize("kind", ["npz", "npy", "cifar10", "mat", "sheets"])
@pytest.mark.parametrize("keep", [0.0, 0.001, 0.1, 0.9])
def test_a_damaged_file_says_so(kind, keep, tmp_path):
    (path,), _ = _make(kind, tmp_path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    attempts = [lambda: FORMATS[kind].read([path], "resize"), lambda: FORMATS[kind].count([path])]
    if kind == "mat" and keep > 0.001:
        attempts.pop()  # its header says the number of images, and nothing of what follows
    for attempt in attempts:
        with pytest.raises(ArtefactError, match=r"damaged.*(Remove it|Check the file)"):
            attempt()


def test_a_flipped_byte_in_an_npz_is_noticed(tmp_path):
    (path,), _ = _make("npz", tmp_path)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)
    with pytest.raises(ArtefactError, match=r"npz\.npz to be readable, but it is damaged"):
        readers.NPZ.read([path], "resize")


def test_an_npz_without_images_says_what_it_has(tmp_path):
    np.savez(tmp_path / "a.npz", pixels=IMAGES)
    with pytest.raises(ArtefactError, match=r"to hold an array `images`, but got only \['pixels'\]"):
        readers.NPZ.read([tmp_path / "a.npz"], "resize")


@pytest.mark.parametrize(
    "images", [IMAGES / 255, IMAGES[0], IMAGES.transpose(0, 3, 1, 2)], ids=["float", "one", "first"]
)
def test_an_npz_with_other_images_says_what_they_are(images, tmp_path):
    np.savez(tmp_path / "a.npz", images=images)
    with pytest.raises(ArtefactError, match=r"to hold uint8 images of shape \(N, H, W, 3\), but got"):
        readers.NPZ.read([tmp_path / "a.npz"], "resize")


def test_an_npz_with_fewer_labels_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS[:2])
    with pytest.raises(ArtefactError, match="to hold one label per image, but got 2 labels for 6 images"):
        readers.NPZ.read([tmp_path / "a.npz"], "resize")


def test_pickled_arrays_are_not_read(tmp_path):
    np.savez(tmp_path / "a.npz", images=np.array([{}], dtype=object))
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object))
    for kind, path in ((readers.NPZ, tmp_path / "a.npz"), (readers.NPY, tmp_path / "a.npy")):
        with pytest.raises(ArtefactError, match=r"damaged \(ValueError: Object arrays cannot be loaded"):
            kind.read([path], "resize")


def test_arrays_of_other_sizes_become_32_by_32(tmp_path):
    np.save(tmp_path / "a.npy", np.full((2, 50, 40, 3), 9, np.uint8))
    images, _ = readers.NPY.read([tmp_path / "a.npy"], "resize")
    assert (images == 9).all()
    assert images.shape == (2, 32, 32, 3)


def test_a_mat_file_with_fewer_labels_is_refused(tmp_path):
    _svhn(tmp_path / "a.mat", y=np.ones((2, 1)))
    with pytest.raises(ArtefactError, match="to hold one label per image, but got 2 labels for 6 images"):
        readers.SVHN_MAT.read([tmp_path / "a.mat"], "resize")


def test_a_mat_file_needs_scipy(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    with pytest.raises(
        MissingExtraError, match=r"needs the 'scipy' package. Install it with `pip install neuralmean\[bench\]`"
    ):
        readers.SVHN_MAT.read([tmp_path / "a.mat"], "resize")


def test_sheets_with_other_pixels_are_refused(tmp_path):
    path = _sheets(tmp_path / "sheets", sha256="0" * 64)
    with pytest.raises(
        ArtefactError, match=r"to hold the pixels that its set\.json names by their SHA-256, but got others"
    ):
        readers.SHEETS.read([path], "resize")


def test_a_damaged_sheet_is_named(tmp_path):
    path = _sheets(tmp_path / "sheets")
    (path.parent / "000.webp").write_bytes(b"nothing")
    with pytest.raises(ArtefactError, match=r"000\.webp to be readable, but it is damaged"):
        readers.SHEETS.read([path], "resize")


class TestFolder:
    def test_labels_are_subfolders_in_order(self, tmp_path):
        (folder,), _ = _make("folder", tmp_path)
        images, labels = readers.FOLDER.read([folder], "resize")
        # Folders class_1 (rows 1, 3), class_3 (0), class_4 (2), class_5 (4), class_9 (5)
        assert np.array_equal(images, IMAGES[[1, 3, 0, 2, 4, 5]])
        assert labels.tolist() == [0, 0, 1, 2, 3, 4]
        assert readers.FOLDER.count([folder]) == 6

    def test_numbers_count_as_numbers(self, tmp_path):
        for name in ("10", "9", "1"):
            (tmp_path / name).mkdir()
            Image.fromarray(np.full((32, 32, 3), int(name), np.uint8)).save(tmp_path / name / "a.png")
        images, labels = readers.FOLDER.read([tmp_path], "resize")
        assert images[:, 0, 0, 0].tolist() == [1, 9, 10]
        assert labels.tolist() == [0, 1, 2]

    def test_one_subfolder_is_no_class(self, tmp_path):
        (tmp_path / "iSUN_patches").mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / "iSUN_patches" / "a.JPEG")
        assert readers.FOLDER.read([tmp_path], "resize")[1] is None

    def test_pictures_beside_subfolders_have_no_class(self, tmp_path):
        (folder,), _ = _make("folder", tmp_path)
        Image.new("RGB", (32, 32)).save(folder / "a.png")
        assert readers.FOLDER.read([folder], "resize")[1] is None

    def test_hidden_and_other_files_are_left_out(self, tmp_path):
        (folder,), _ = _make("folder", tmp_path)
        (folder / "readme.txt").write_text("x")
        (folder / "._0.png").write_text("x")
        (folder / ".cache").mkdir()
        Image.new("RGB", (32, 32)).save(folder / ".cache" / "a.png")
        assert readers.FOLDER.count([folder]) == 6

    def test_a_damaged_picture_is_named(self, tmp_path):
        (folder,), _ = _make("folder", tmp_path)
        victim = folder / "class_4" / "2.png"
        victim.write_bytes(victim.read_bytes()[:100])
        with pytest.raises(ArtefactError, match=r"Expected 2\.png to be readable, but it is damaged"):
            readers.FOLDER.read([folder], "resize")

    def test_no_picture_is_an_error(self, tmp_path):
        with pytest.raises(ArtefactError, match=r"to hold pictures \(\.bmp, .*\), but got none"):
            readers.FOLDER.read([tmp_path], "resize")
