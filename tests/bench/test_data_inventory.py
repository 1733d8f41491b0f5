"""Finding, counting and loading the paper's sets in the layouts that people have."""

import pickle
import re

import numpy as np
import pytest
from PIL import Image

from neuralmean.bench import data
from neuralmean.errors import InputError

RNG = np.random.default_rng(0)


def _images(n):
    return RNG.integers(0, 256, (n, 32, 32, 3), np.uint8)


def _npz(path, n=4):
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, images=_images(n), labels=np.arange(n) % 2)


def _npy(path, n=4):
    np.save(path, _images(n))


def _pictures(folder, n=4, size=(32, 32)):
    folder.mkdir(parents=True, exist_ok=True)
    for row in range(n):
        Image.fromarray(RNG.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"{row}.png")


def _batches(folder, names, n, key="labels"):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        content = {"data": _images(n).reshape(n, -1), key: [0] * n}
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))


def _binaries(folder, names, n, label_bytes):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(bytes(n * (label_bytes + 3072)))


def _mat(path, n=4):
    scipy_io = pytest.importorskip("scipy.io")
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy_io.savemat(path, {"X": _images(n).transpose(1, 2, 3, 0), "y": np.ones((n, 1))})


FIVE = [f"data_batch_{number}" for number in range(1, 6)]
LAYOUTS = {
    "npz": ("cifar10", "train", lambda root: _npz(root / "cifar10-train.npz"), "npz", 4),
    "npz_underscore": ("cifar10", "test", lambda root: _npz(root / "cifar10_test.npz"), "npz", 4),
    "npz_without_split": ("imagenet-crop", "test", lambda root: _npz(root / "imagenet-crop.npz"), "npz", 4),
    "npz_in_folder": ("svhn", "train", lambda root: _npz(root / "SVHN" / "train.npz"), "npz", 4),
    "npy": ("isun", "test", lambda root: _npy(root / "isun.npy"), "npy", 4),
    "cifar10_python": (
        "cifar10",
        "train",
        lambda root: _batches(root / "cifar-10-batches-py", FIVE, 2),
        "python batches",
        10,
    ),
    "cifar10_python_nested": (
        "cifar10",
        "test",
        lambda root: _batches(root / "CIFAR10" / "cifar-10-batches-py", ["test_batch"], 3),
        "python batches",
        3,
    ),
    "cifar10_binary": (
        "cifar10",
        "train",
        lambda root: _binaries(root / "cifar-10-batches-bin", [f"{name}.bin" for name in FIVE], 2, 1),
        "binary batches",
        10,
    ),
    "cifar100_python": (
        "cifar100",
        "test",
        lambda root: _batches(root / "cifar-100-python", ["test"], 3, "fine_labels"),
        "python batches",
        3,
    ),
    "cifar100_binary": (
        "cifar100",
        "train",
        lambda root: _binaries(root / "cifar-100-binary", ["train.bin"], 3, 2),
        "binary batches",
        3,
    ),
    "cifar_folders": ("cifar100", "train", lambda root: _pictures(root / "cifar100" / "train" / "apple"), "folder", 4),
    "svhn_mat": ("svhn", "test", lambda root: _mat(root / "test_32x32.mat"), "mat", 4),
    "svhn_mat_in_folder": ("svhn", "train", lambda root: _mat(root / "svhn" / "train_32x32.mat"), "mat", 4),
    "imagenet_crop": ("imagenet-crop", "test", lambda root: _pictures(root / "Imagenet" / "test"), "folder", 4),
    "imagenet_resize": (
        "imagenet-resize",
        "test",
        lambda root: _pictures(root / "Imagenet_resize" / "Imagenet_resize"),
        "folder",
        4,
    ),
    "lsun_crop": ("lsun-crop", "test", lambda root: _pictures(root / "LSUN" / "test", size=(36, 36)), "folder", 4),
    "lsun_resize": ("lsun-resize", "test", lambda root: _pictures(root / "LSUN_resize" / "LSUN_resize"), "folder", 4),
    "isun": ("isun", "test", lambda root: _pictures(root / "iSUN" / "iSUN_patches"), "folder", 4),
    "isun_nested": ("isun", "test", lambda root: _pictures(root / "isun" / "iSUN" / "iSUN_patches"), "folder", 4),
    "dtd": ("textures", "test", lambda root: _pictures(root / "dtd" / "images" / "banded", size=(40, 60)), "folder", 4),
    "dtd_nested": ("textures", "test", lambda root: _pictures(root / "dtd" / "dtd" / "images" / "banded"), "folder", 4),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_is_found_counted_and_loaded(case, tmp_path):
    name, split, make, layout, count = LAYOUTS[case]
    make(tmp_path)
    entry = next(entry for entry in data.find(tmp_path) if (entry.name, entry.split) == (name, split))
    assert (entry.layout, entry.count, entry.ok) == (layout, count, True)
    loaded = data.load(name, split, tmp_path)
    assert loaded.images.shape == (count, 32, 32, 3)
    assert (loaded.name, loaded.split) == (name, split)


@pytest.mark.parametrize("case", LAYOUTS)
def test_nothing_else_is_found(case, tmp_path):
    name, split, make, _, _ = LAYOUTS[case]
    make(tmp_path)
    assert {(entry.name, entry.split) for entry in data.find(tmp_path) if entry.path} == {(name, split)}


def test_the_data_folder_may_be_the_set_itself(tmp_path):
    _batches(tmp_path / "cifar-100-python", ["train", "test"], 2, "fine_labels")
    assert len(data.load("cifar100", "train", tmp_path / "cifar-100-python")) == 2


def test_crop_sets_are_cropped_and_resize_sets_resized(tmp_path):
    pixels = np.full((36, 36, 3), 255, np.uint8)
    pixels[2:34, 2:34] = 7
    for folder in ("LSUN", "LSUN_resize"):
        (tmp_path / folder / "x").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / folder / "x" / "0.png")
    assert (data.load("lsun-crop", "test", tmp_path).images == 7).all()
    assert data.load("lsun-resize", "test", tmp_path).images.max() > 7


def test_arrays_come_before_other_layouts(tmp_path):
    _pictures(tmp_path / "iSUN" / "iSUN_patches", 2)
    _npz(tmp_path / "isun.npz", 5)
    assert len(data.load("isun", "test", tmp_path)) == 5


def test_sheets_of_many_images_are_not_taken_for_images(tmp_path):
    _pictures(tmp_path / "imagenet-crop", 2, size=(1024, 1024))
    (tmp_path / "imagenet-crop" / "set.json").write_text('{"count": 2048, "sha256": ""}')
    entry = data.find(tmp_path, only=["imagenet-crop"])[0]
    assert (entry.layout, entry.count) == ("sheets", 2048)


class TestInventory:
    def test_counts_against_the_official_number(self, tmp_path):
        _npz(tmp_path / "svhn-train.npz", 4)
        entry = data.find(tmp_path, only=["svhn"])[0]
        assert (entry.count, entry.expected, entry.check) == (4, 73_257, "4 of 73,257 images")
        assert entry.path == tmp_path / "svhn-train.npz"

    def test_says_complete_and_too_many(self, tmp_path, monkeypatch):
        monkeypatch.setitem(data.dataset("isun").counts, "test", 4)
        _npz(tmp_path / "isun.npz", 4)
        assert data.find(tmp_path, only=["isun"])[0].check == "complete"
        _npz(tmp_path / "isun.npz", 5)
        assert data.find(tmp_path, only=["isun"])[0].check == "5 images, officially 4"

    def test_tells_official_files_from_others(self, tmp_path):
        _mat(tmp_path / "test_32x32.mat")
        train, test = data.find(tmp_path, only=["svhn"])
        assert test.check == "not the official files"
        assert train.check == "missing"
        assert not train.ok

    def test_says_how_to_get_what_is_missing(self, tmp_path):
        entries = data.find(tmp_path)
        assert [(entry.name, entry.split) for entry in entries[:4]] == [
            ("cifar10", "train"),
            ("cifar10", "test"),
            ("cifar100", "train"),
            ("cifar100", "test"),
        ]
        assert all(entry.path is None and not entry.ok and entry.name in entry.hint for entry in entries)
        hints = {entry.name: entry.hint for entry in entries}
        assert "https://github.com/facebookresearch/odin" in hints["isun"]

    def test_goes_on_after_a_damaged_file(self, tmp_path):
        (tmp_path / "cifar10-test.npz").write_bytes(b"PK")
        _npz(tmp_path / "svhn-test.npz")
        by_name = {(entry.name, entry.split): entry for entry in data.find(tmp_path)}
        broken = by_name["cifar10", "test"]
        assert "cifar10-test.npz to be readable, but it is damaged" in broken.check
        assert not broken.ok
        assert broken.hint
        assert by_name["svhn", "test"].ok


class TestRefusing:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("cifar11", "Did you mean 'cifar10'"),
            ("lsun-cropp", "Did you mean 'lsun-crop'"),
            ("zzz", "Known sets: cifar10, "),
        ],
    )
    def test_unknown_set(self, name, message, tmp_path):
        with pytest.raises(InputError, match=f"Expected the name of a data set, but got '{name}'. {message}"):
            data.load(name, "test", tmp_path)

    def test_unknown_split(self, tmp_path):
        with pytest.raises(InputError, match="Expected the split of 'isun' to be 'test', but got 'train'"):
            data.load("isun", "train", tmp_path)

    def test_missing_folder(self, tmp_path):
        with pytest.raises(InputError, match=r"Expected the data folder '.*nowhere' to be there, but it is not"):
            data.load("cifar10", "test", tmp_path / "nowhere")

    def test_missing_set_says_how_to_get_it(self, tmp_path):
        message = f"Expected the test split of 'textures' in {str(tmp_path)!r}, but it is missing. Get it with"
        with pytest.raises(InputError, match=re.escape(message)):
            data.load("textures", "test", tmp_path)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("CIFAR-10", "cifar10"),
        ("Tiny-ImageNet-crop", "imagenet-crop"),
        ("tinyimagenet_resize", "imagenet-resize"),
        ("LSUN_C", "lsun-crop"),
        ("iSUN", "isun"),
        ("DTD", "textures"),
        ("Texture", "textures"),
    ],
)
def test_the_papers_names_are_known(alias, name):
    assert data.dataset(alias).name == name


@pytest.mark.parametrize("name", ["ImageNet-C", "ImageNet-R"])
def test_what_the_paper_calls_sets_that_mean_others_today_is_unknown(name):
    with pytest.raises(InputError, match=f"Expected the name of a data set, but got '{name}'. Did you mean"):
        data.dataset(name)


def test_every_set_has_a_title_and_a_page():
    for name in data.names():
        found = data.dataset(name)
        assert found.title
        assert found.page.startswith("http")
        assert all(re.fullmatch("[0-9a-f]{32}", source.md5) for source in found.sources)


class TestRead:
    def test_takes_files_and_folders_of_no_set(self, tmp_path):
        _npz(tmp_path / "mine.npz", 3)
        _pictures(tmp_path / "more", 2)
        assert (data.read(tmp_path / "mine.npz").name, len(data.read(tmp_path / "mine.npz"))) == ("mine", 3)
        assert data.read(tmp_path / "more", name="other").name == "other"

    def test_refuses_what_is_not_there(self, tmp_path):
        with pytest.raises(
            InputError, match=r"Expected an .npz file, an .npy file or a folder of pictures, but got '.*none"
        ):
            data.read(tmp_path / "none")

    def test_refuses_other_files(self, tmp_path):
        (tmp_path / "a.txt").write_text("x")
        with pytest.raises(InputError, match=r"but got the file '.*a.txt'"):
            data.read(tmp_path / "a.txt")
