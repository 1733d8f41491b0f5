import io
import os
import signal
import struct
import subprocess
import sys
import tracemalloc
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

import neuralmean
from neuralmean.data.images import ImageBatches, Source, Unreadable, count_inputs, decode_image, find_inputs, read_image
from neuralmean.data.images import arrays as arrays_module
from neuralmean.data.images import batches as batches_module
from neuralmean.data.images import find as find_module
from neuralmean.data.images import pool as pool_module
from neuralmean.data.images.arrays import ArrayFile, split_name
from neuralmean.data.images.find import in_sorted_order
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError

posix = pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX system")
SMALL = Preprocessing((8, 8), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def _noise(seed=0, size=(8, 8), channels=3):
    shape = (*size, channels) if channels > 1 else size
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def _save(path, seed=0, size=(8, 8)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(_noise(seed, size)).save(path)
    return path


def _encoded(image, kind, **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def _collect(batches):
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
        _save(tmp_path / "photos" / name, i)
    (tmp_path / "photos" / "notes.txt").write_text("hello")
    (tmp_path / "photos" / ".hidden.png").write_bytes(b"")
    (tmp_path / "photos" / "features.npy").write_bytes(b"")
    return tmp_path / "photos"


class TestDecoding:
    @pytest.mark.parametrize(
        ("kind", "options"),
        [
            ("PNG", {}),
            ("BMP", {}),
            ("TIFF", {}),
            ("TIFF", {"compression": "tiff_lzw"}),
            ("WEBP", {"lossless": True}),
        ],
        ids=["png", "bmp", "tiff", "tiff_lzw", "webp"],
    )
    def test_lossless_formats_come_back_bit_for_bit(self, tmp_path, kind, options):
        (tmp_path / "image").write_bytes(_encoded(Image.fromarray(_noise()), kind, **options))
        assert np.array_equal(np.asarray(read_image(tmp_path / "image")), _noise())

    def test_jpeg_comes_back_nearly(self):
        smooth = np.linspace(0, 255, 64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
        image = decode_image(_encoded(Image.fromarray(smooth), "JPEG", quality=95))
        assert np.abs(np.asarray(image).astype(int) - smooth).mean() < 3

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
    def test_the_camera_is_turned_back(self, orientation, kind):
        # Left half black, right half white, twice as wide as high; how it must look for each orientation is in the
        # EXIF standard: 3 is upside down, 6 means that the camera's top is on the right, so turn by 90 degrees.
        pixels = np.zeros((16, 32, 3), np.uint8)
        pixels[:, 16:] = 255
        pixels[:4, :8] = 128  # a mark in the upper left corner
        turned = {
            1: pixels,
            2: pixels[:, ::-1],
            3: pixels[::-1, ::-1],
            4: pixels[::-1],
            5: pixels.transpose(1, 0, 2),
            6: np.rot90(pixels, -1),
            7: pixels[::-1, ::-1].transpose(1, 0, 2),
            8: np.rot90(pixels),
        }[orientation]
        exif = Image.Exif()
        exif[0x0112] = orientation
        options = {"lossless": True} if kind == "WEBP" else {"quality": 100, "subsampling": 0} if kind == "JPEG" else {}
        image = decode_image(_encoded(Image.fromarray(pixels), kind, exif=exif, **options))
        assert image.size == (turned.shape[1], turned.shape[0])
        assert np.abs(np.asarray(image).astype(int) - turned).max() <= 4

    def test_a_damaged_orientation_counts_as_none(self):
        data = _encoded(Image.fromarray(_noise()), "PNG")
        exif = b"II*\0\xff\xff\xff\xff"
        chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + struct.pack(">I", zlib.crc32(b"eXIf" + exif))
        image = decode_image(data[:33] + chunk + data[33:])  # after signature and header
        assert np.array_equal(np.asarray(image), _noise())

    @pytest.mark.parametrize(
        ("image", "kind", "expected"),
        [
            (Image.fromarray(np.full((8, 8), 257 * 40, np.uint16)), "PNG", [40, 40, 40]),
            (Image.fromarray(np.full((8, 8), 257 * 40, np.uint16)), "TIFF", [40, 40, 40]),
            (Image.new("L", (8, 8), 77), "PNG", [77, 77, 77]),
            (Image.new("1", (8, 8), 1), "PNG", [255, 255, 255]),
            (Image.new("LA", (8, 8), (10, 0)), "PNG", [255, 255, 255]),
            (Image.new("RGBA", (8, 8), (10, 20, 30, 0)), "PNG", [255, 255, 255]),
            (Image.new("RGBA", (8, 8), (10, 20, 30, 0)), "WEBP", [255, 255, 255]),
            (Image.new("RGB", (8, 8), (10, 20, 30)).quantize(), "PNG", [10, 20, 30]),
            (Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG", [255, 255, 255]),
            (Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "TIFF", [0, 0, 0]),
            (Image.new("F", (8, 8), 0.2), "TIFF", [51, 51, 51]),
        ],
        ids=[
            "png16",
            "tiff16",
            "grey",
            "bilevel",
            "grey_alpha",
            "alpha",
            "webp_alpha",
            "palette",
            "cmyk_jpeg",
            "cmyk_tiff",
            "float",
        ],
    )
    def test_every_kind_of_pixel_becomes_rgb(self, image, kind, expected):
        pixels = SMALL.pixels(decode_image(_encoded(image, kind)))
        assert pixels.shape == (8, 8, 3)
        assert np.unique(pixels.reshape(-1, 3), axis=0).tolist() == [expected]

    def test_a_palette_with_a_transparent_colour_becomes_white_there(self):
        image = Image.new("P", (8, 8), 1)
        image.putpalette([9, 9, 9, 200, 100, 50])
        pixels = SMALL.pixels(decode_image(_encoded(image, "PNG", transparency=1)))
        assert np.unique(pixels).tolist() == [255]

    def test_the_first_page_of_several_is_taken(self):
        pages = [Image.new("RGB", (8, 8), (i, i, i)) for i in (5, 6)]
        data = _encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
        assert decode_image(data).getpixel((0, 0)) == (5, 5, 5)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
    def test_a_file_that_is_cut_short_is_an_error(self, kind):
        data = _encoded(Image.fromarray(_noise(size=(64, 64))), kind)
        with pytest.raises(InputError, match="damaged"):
            decode_image(data[: len(data) // 2])

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
    @pytest.mark.filterwarnings("ignore")
    def test_a_file_with_any_damage_gives_an_image_or_a_reason(self, kind):
        data = _encoded(Image.fromarray(_noise(size=(16, 16))), kind)
        generator = np.random.default_rng(0)
        reasons = 0
        for _ in range(150):
            broken = bytearray(data)
            for place in generator.integers(len(data), size=3):
                broken[place] = generator.integers(256)
            try:
                SMALL.pixels(decode_image(bytes(broken)))
            except InputError:
                reasons += 1
        assert reasons > 0

    @pytest.mark.parametrize("data", [b"GIF89a" + bytes(100), b"%PDF-1.7", bytes(1000)], ids=["gif", "pdf", "zeros"])
    def test_other_files_are_named_for_what_they_are_not(self, data):
        with pytest.raises(InputError, match="it is not a PNG, JPEG, WebP, BMP or TIFF image"):
            decode_image(data)

    def test_no_bytes_are_an_empty_file(self):
        with pytest.raises(InputError, match="the file is empty"):
            decode_image(b"")

    def test_an_image_without_pixels_is_refused(self, monkeypatch):
        monkeypatch.setattr(Image, "open", lambda *args, **kwargs: Image.new("RGB", (0, 5)))
        with pytest.raises(InputError, match="it has no pixels"):
            decode_image(b"x")

    def test_a_header_that_makes_pillow_stumble_is_refused(self, monkeypatch):
        def stumble(*args, **kwargs):
            raise struct.error("unpack requires a buffer of 4 bytes")

        monkeypatch.setattr(Image, "open", stumble)
        with pytest.raises(InputError, match=r"its beginning is damaged \(unpack requires a buffer of 4 bytes\)"):
            decode_image(b"x")

    def test_an_image_that_does_not_fit_into_memory_is_refused(self, monkeypatch):
        def fail(*args, **kwargs):
            raise MemoryError

        monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
        with pytest.raises(InputError, match="there is not enough memory to unpack it"):
            decode_image(_encoded(Image.new("RGB", (4, 4)), "PNG"))

    def test_an_image_that_does_not_fit_into_memory_when_resized_is_unreadable(self, tmp_path, monkeypatch):
        def fail(*args, **kwargs):
            raise MemoryError

        _save(tmp_path / "a.png")
        monkeypatch.setattr(Preprocessing, "pixels", fail)
        batches = ImageBatches(tmp_path, SMALL)
        assert list(batches) == []
        assert batches.unreadable[0].reason == "there is not enough memory to unpack it"

    def _bomb(self, width, height):
        def chunk(kind, body):
            return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(bytes(1000)))
            + chunk(b"IEND", b"")
        )

    @pytest.mark.parametrize("side", [10_000, 12_000, 60_000], ids=["pillow_warns", "above_100MP", "pillow_refuses"])
    def test_a_decompression_bomb_is_refused_before_it_is_unpacked(self, side):
        tracemalloc.start()
        with pytest.raises(InputError, match=r"more than the limit of 89,478,485|more pixels than the limit"):
            decode_image(self._bomb(side, side))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5_000_000

    def test_the_limit_is_per_call_and_pillows_own_stays(self):
        before = Image.MAX_IMAGE_PIXELS
        data = _encoded(Image.new("RGB", (20, 20)), "PNG")
        with pytest.raises(InputError, match="it has 20 x 20 pixels, more than the limit of 399"):
            decode_image(data, max_pixels=399)
        assert decode_image(data, max_pixels=400).size == (20, 20)
        assert before == Image.MAX_IMAGE_PIXELS

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda path: None, "the system said: No such file or directory"),
            (lambda path: path.mkdir(), "it is not a file"),
            (lambda path: path.write_bytes(b""), "the file is empty"),
            (lambda path: path.write_text("hello"), "it is not a PNG"),
        ],
        ids=["missing", "folder", "empty", "text"],
    )
    def test_what_cannot_be_read_comes_back_with_a_reason(self, tmp_path, make, reason):
        path = tmp_path / "x.png"
        make(path)
        result = read_image(path)
        assert isinstance(result, Unreadable)
        assert result.path == str(path)
        assert reason in result.reason
        assert str(result) == f"{path}: {result.reason}"

    @posix
    def test_a_pipe_is_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "x.png")
        assert read_image(tmp_path / "x.png") == Unreadable(str(tmp_path / "x.png"), "it is not a file")

    def test_a_row_of_an_array_can_be_read_by_its_name(self, tmp_path):
        rows = _noise(size=(5, 8, 8))
        np.savez_compressed(tmp_path / "a.npz", images=rows)
        assert np.array_equal(np.asarray(read_image(f"{tmp_path / 'a.npz'}#3")), rows[3])
        result = read_image(f"{tmp_path / 'a.npz'}#5")
        assert isinstance(result, Unreadable)
        assert result.reason == "there is no row 5: it has 5 images"

    def test_a_grey_row_of_an_array_is_a_grey_image(self, tmp_path):
        np.save(tmp_path / "a.npy", np.full((1, 4, 4, 1), 9, np.uint8))
        assert read_image(f"{tmp_path / 'a.npy'}#0").mode == "L"


class TestArrays:
    @pytest.mark.parametrize("name", ["a.npz", "packed.npz", "a.npy"])
    def test_rows_come_back_in_any_stretches(self, tmp_path, name):
        rows = _noise(size=(10, 4, 6))
        path = tmp_path / name
        if name == "a.npy":
            np.save(path, rows)
        else:
            (np.savez_compressed if name == "packed.npz" else np.savez)(path, images=rows, labels=np.arange(10))
        with ArrayFile(str(path)) as file:
            assert file.shape == (10, 4, 6, 3)
            for start, stop in [(0, 3), (3, 10), (1, 2), (9, 10), (0, 10)]:
                assert np.array_equal(file.read(start, stop), rows[start:stop])

    @pytest.mark.parametrize(
        ("array", "reason"),
        [
            (np.zeros((2, 4, 4, 3), np.float32), "its images must be uint8 with shape (N, H, W, C)"),
            (np.zeros((2, 4, 4), np.uint8), "its images must be uint8 with shape (N, H, W, C)"),
            (np.zeros((2, 3, 4, 5), np.uint8), "1, 3 or 4 channels, but they are uint8 with shape (2, 3, 4, 5)"),
            (np.zeros((0, 4, 4, 3), np.uint8), "it has no images"),
            (
                np.asfortranarray(np.zeros((2, 4, 4, 3), np.uint8)),
                "they lie in column order".replace("they", "its images"),
            ),
            (np.array([object()]), "its images must be uint8"),
        ],
        ids=["float", "three_axes", "five_channels", "none", "fortran", "objects"],
    )
    @pytest.mark.parametrize("name", ["a.npz", "a.npy"])
    def test_arrays_that_are_not_images_are_refused(self, tmp_path, name, array, reason):
        if name == "a.npy":
            np.save(tmp_path / name, array)
        else:
            np.savez(tmp_path / name, images=array)
        with pytest.raises(InputError) as caught:
            ArrayFile(str(tmp_path / name))
        assert reason in str(caught.value)

    def test_a_pickle_in_an_array_is_never_run(self, tmp_path):
        class Boom:
            def __reduce__(self):
                return (os.mkdir, (str(tmp_path / "boom"),))

        np.save(tmp_path / "a.npy", np.array([[[[Boom()]]]], dtype=object), allow_pickle=True)
        with pytest.raises(InputError, match="its images must be uint8"):
            ArrayFile(str(tmp_path / "a.npy"))
        assert not (tmp_path / "boom").exists()

    def test_an_archive_without_images_says_what_it_has(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=np.zeros(1), y=np.zeros(1))
        with pytest.raises(InputError, match=r"it has no array 'images', only \['x', 'y'\]"):
            ArrayFile(str(tmp_path / "a.npz"))

    def _with_header(self, path, shape, body=b""):
        buffer = io.BytesIO()
        np.lib.format.write_array_header_1_0(buffer, {"descr": "|u1", "fortran_order": False, "shape": shape})
        if path.suffix == ".npy":
            path.write_bytes(buffer.getvalue() + body)
        else:
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("images.npy", buffer.getvalue() + body)

    @pytest.mark.parametrize("name", ["a.npz", "a.npy"])
    def test_a_header_that_promises_more_than_there_is_costs_no_memory(self, tmp_path, name):
        self._with_header(tmp_path / name, (10**12, 32, 32, 3), bytes(1000))
        tracemalloc.start()
        with pytest.raises(InputError, match=r"its header promises .* bytes, but there are"):
            ArrayFile(str(tmp_path / name))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5_000_000

    def test_images_of_absurd_size_are_refused(self, tmp_path):
        self._with_header(tmp_path / "a.npy", (1, 100_000, 100_000, 3))
        with pytest.raises(InputError, match="its images are absurdly large"):
            ArrayFile(str(tmp_path / "a.npy"))

    def test_an_archive_that_unpacks_to_far_more_than_it_takes_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setattr(arrays_module, "BOMB_BYTES", 1_000_000)
        np.savez_compressed(tmp_path / "a.npz", images=np.zeros((1000, 32, 32, 3), np.uint8))
        with pytest.raises(InputError, match=r"it would unpack from [\d,]+ to 3,072,128 bytes"):
            ArrayFile(str(tmp_path / "a.npz"))

    @pytest.mark.parametrize(
        ("name", "data", "reason"),
        [
            ("a.npz", b"PK\3\4 rubbish", "the file is damaged or cut short"),
            ("a.npy", b"rubbish rubbish", "the file is damaged or cut short"),
            ("a.npy", b"\x93NUMPY\x09\x09" + bytes(20), "unknown format version"),
            ("a.npy", b"", "the file is empty"),
        ],
        ids=["archive", "array", "version", "empty"],
    )
    def test_damaged_files_are_refused(self, tmp_path, name, data, reason):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=reason):
            ArrayFile(str(tmp_path / name))

    def test_a_missing_file_is_refused(self, tmp_path):
        with pytest.raises(InputError, match="there is no such file"):
            ArrayFile(str(tmp_path / "a.npz"))

    def test_damage_in_the_middle_is_found_when_it_is_reached(self, tmp_path):
        rows = _noise(size=(50, 16, 16))
        np.savez(tmp_path / "a.npz", images=rows)
        data = bytearray((tmp_path / "a.npz").read_bytes())
        data[len(data) // 2] ^= 0xFF
        (tmp_path / "a.npz").write_bytes(bytes(data))
        with ArrayFile(str(tmp_path / "a.npz")) as file, pytest.raises(InputError, match="damaged or cut short"):
            file.read(0, 50)

    @pytest.mark.parametrize(
        ("name", "expected"),
        [
            ("a.npz#0", ("a.npz", 0)),
            ("x/a#1.NPY#12", ("x/a#1.NPY", 12)),
            ("a.png#1", ("a.png#1", None)),
            ("a.npz#", ("a.npz#", None)),
            ("a.npz#-1", ("a.npz#-1", None)),
            ("a.npz", ("a.npz", None)),
        ],
    )
    def test_names_of_rows_are_told_from_names_of_files(self, name, expected):
        assert split_name(name) == expected


class TestFinding:
    def test_a_folder_is_walked_in_the_order_of_names(self, folder):
        found = list(find_inputs(folder))
        images = [os.path.relpath(source.path, folder) for source in found if source.kind == "image"]
        assert images == ["a.jpg", "b.png", "c/1.PNG", "c/2.jpeg", "sub/deep/x.tiff", "sub/deep/y.bmp", "sub/z.webp"]

    def test_other_files_in_a_folder_are_listed_as_skipped(self, folder):
        skipped = {Path(source.path).name: source.reason for source in find_inputs(folder) if source.kind == "skipped"}
        assert skipped == {
            ".hidden.png": "it is hidden",
            "notes.txt": "it does not have the extension of an image",
            "features.npy": "it does not have the extension of an image",
        }

    def test_a_file_that_is_named_is_always_tried(self, folder):
        paths = [folder / "notes.txt", str(folder / "b.png"), folder / ".hidden.png", folder / "features.npy"]
        kinds = [source.kind for source in find_inputs(paths)]
        assert kinds == ["image", "image", "image", "array"]

    def test_paths_keep_the_order_and_the_spelling_of_the_caller(self, folder, monkeypatch):
        monkeypatch.chdir(folder)
        found = [source.path for source in find_inputs(["./b.png", "c", "a.jpg"])]
        assert found == ["./b.png", str(Path("c", "1.PNG")), str(Path("c", "2.jpeg")), "a.jpg"]

    def test_globs_are_expanded_in_order(self, folder):
        assert [Path(s.path).name for s in find_inputs(str(folder / "?.*"))] == ["a.jpg", "b.png"]
        deep = [Path(s.path).name for s in find_inputs(str(folder / "sub" / "**"))]
        assert deep == ["x.tiff", "y.bmp", "z.webp"]

    def test_a_glob_that_matches_a_folder_walks_it(self, folder):
        assert [Path(s.path).name for s in find_inputs(str(folder / "[c]"))] == ["1.PNG", "2.jpeg"]

    def test_a_name_with_brackets_that_is_there_is_not_a_glob(self, tmp_path):
        _save(tmp_path / "[1].png")
        assert list(find_inputs(tmp_path / "[1].png")) == [Source(str(tmp_path / "[1].png"), "image")]

    def test_a_path_that_is_not_there_is_an_error_at_once(self, folder):
        with pytest.raises(
            InputError, match=r"Expected '.*nowhere' to be a folder, a file or a glob, but there is no such"
        ):
            find_inputs([folder, folder / "nowhere"])

    def test_a_glob_that_matches_nothing_is_an_error_at_once(self, folder):
        with pytest.raises(InputError, match=r"Expected '.*\*\.gif' to match at least one file, but it matches none"):
            find_inputs(str(folder / "*.gif"))

    def test_no_paths_are_an_error(self):
        with pytest.raises(InputError, match="Expected at least one folder, file or glob, but got none"):
            find_inputs([])

    def test_counting_counts_images_and_rows(self, folder, tmp_path):
        np.savez(tmp_path / "a.npz", images=np.zeros((12, 4, 4, 3), np.uint8))
        (tmp_path / "broken.npz").write_bytes(b"x")
        assert (
            count_inputs([folder, tmp_path / "a.npz", tmp_path / "broken.npz", folder / "notes.txt"]) == 7 + 12 + 1 + 1
        )

    @posix
    def test_a_link_to_a_folder_further_up_is_not_followed_and_another_one_is(self, tmp_path):
        _save(tmp_path / "a" / "1.png")
        (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "other").symlink_to(tmp_path / "a")
        found = [(os.path.relpath(s.path, tmp_path), s.kind) for s in find_inputs([tmp_path / "b"])]
        assert found == [("b/other/1.png", "image"), ("b/other/loop", "skipped")]

    @posix
    def test_a_link_that_leads_nowhere_does_not_hide_the_others(self, tmp_path):
        _save(tmp_path / "1.png")
        (tmp_path / "itself").symlink_to(tmp_path / "itself")
        (tmp_path / "gone.png").symlink_to(tmp_path / "nothing")
        found = [(Path(s.path).name, s.kind) for s in find_inputs(tmp_path)]
        assert found == [("1.png", "image"), ("gone.png", "image"), ("itself", "skipped")]

    def test_a_folder_that_cannot_be_listed_is_unreadable_and_the_rest_goes_on(self, folder, monkeypatch):
        scandir = os.scandir

        def refuse(path):
            if Path(path).name == "deep":
                raise PermissionError(13, "Permission denied")
            return scandir(path)

        monkeypatch.setattr(os, "scandir", refuse)
        found = [(Path(s.path).name, s.kind, s.reason) for s in find_inputs(folder / "sub")]
        assert found == [("deep", "unreadable", "the system said: Permission denied"), ("z.webp", "image", "")]

    def test_folders_may_be_nested_deeper_than_python_recurses(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        place = tmp_path
        for _ in range(300):
            place = place / "d"
        place.mkdir(parents=True)
        _save(place / "x.png")
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(250)
        try:
            found = [source.kind for source in find_inputs(".")]
        finally:
            sys.setrecursionlimit(limit)
        assert found == ["image"]

    def test_names_are_sorted_on_disk_just_as_in_memory(self):
        generator = np.random.default_rng(0)
        letters = ["a", "b", "\\", "\n", "n", "\udc80", "é", " "]
        names = ["".join(generator.choice(letters, size=generator.integers(1, 6))) for _ in range(1000)]
        for run in (1, 7, 999, 1000, 1001):
            assert list(in_sorted_order(iter(names), run=run)) == sorted(names)
        assert list(in_sorted_order([])) == []

    def test_a_folder_of_many_files_needs_no_more_memory_than_one_of_few(self, tmp_path, monkeypatch):
        monkeypatch.setattr(find_module, "RUN", 100)

        class Entry:
            def __init__(self, name):
                self.name = name

            def is_dir(self):
                return False

        class Folder:
            def __init__(self, n):
                self.n = n

            def __enter__(self):
                return (Entry(f"{i * 7919 % self.n:07}.png") for i in range(self.n))

            def __exit__(self, *args):
                pass

        def peak(n):
            monkeypatch.setattr(os, "scandir", lambda path: Folder(n))
            tracemalloc.start()
            last = ""
            for source in find_inputs(tmp_path):
                assert last < source.path
                last = source.path
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            return peak

        # Each stretch on disk costs an open file with its buffers, and a million names of 50,000 each have 20.
        assert peak(5_000) < peak(500) + 50 * 25_000
        assert peak(500) < 1_000_000


@pytest.fixture
def many(tmp_path):
    """A folder of 150 images of 8 x 8: more than two tasks, so that processes are started."""
    for i in range(150):
        _save(tmp_path / "many" / f"{i:03}.png", i)
    return tmp_path / "many"


def _reference_batches(folder, preprocessing):
    return [preprocessing(Image.open(path)) for path in sorted(folder.iterdir())]


class TestBatches:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    @pytest.mark.parametrize("size", [8, 6], ids=["as_it_is", "resized"])
    def test_images_come_in_order_whoever_decodes_them(self, many, workers, size):
        preprocessing = Preprocessing((size, size), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic")
        batches = ImageBatches(many, preprocessing, batch_size=40, workers=workers)
        names, rows = _collect(batches)
        assert names == [str(path) for path in sorted(many.iterdir())]
        assert torch.equal(torch.stack(rows), torch.stack(_reference_batches(many, preprocessing)))
        assert (batches.n_images, batches.n_unreadable, batches.n_skipped) == (150, 0, 0)

    @pytest.mark.parametrize("batch_size", [1, 7, 64, 100, 1000])
    def test_every_batch_but_the_last_is_full(self, many, batch_size):
        sizes = [len(names) for _, names in ImageBatches(many, SMALL, batch_size=batch_size, workers=0)]
        assert sizes[:-1] == [batch_size] * (150 // batch_size if 150 % batch_size else 150 // batch_size - 1)
        assert sum(sizes) == 150

    def test_a_second_pass_gives_the_same_again(self, many):
        batches = ImageBatches(many, SMALL, workers=1)
        first, second = _collect(batches), _collect(batches)
        assert first[0] == second[0]
        assert torch.equal(torch.stack(first[1]), torch.stack(second[1]))
        assert batches.n_images == 150

    @pytest.mark.parametrize("workers", [0, 1])
    def test_what_cannot_be_read_is_left_out_and_listed(self, many, workers):
        (many / "010.png").write_bytes(b"")
        (many / "070.png").write_bytes(b"no image")
        (many / "notes.txt").write_text("hello")
        seen = []
        batches = ImageBatches(many, SMALL, batch_size=50, workers=workers, on_unreadable=seen.append)
        names, rows = _collect(batches)
        assert len(names) == len(rows) == batches.n_images == 148
        assert not {"010.png", "070.png"} & {Path(name).name for name in names}
        assert [(Path(note.path).name, note.reason[:20]) for note in batches.unreadable] == [
            ("010.png", "the file is empty"),
            ("070.png", "it is not a PNG, JPE"),
        ]
        assert seen == batches.unreadable
        assert (batches.n_unreadable, batches.n_skipped) == (2, 1)
        assert [Path(path).name for path in batches.skipped] == ["notes.txt"]
        assert torch.equal(rows[names.index(str(many / "071.png"))], SMALL(Image.open(many / "071.png")))

    def test_nothing_readable_gives_no_batch(self, tmp_path):
        (tmp_path / "a.png").write_bytes(b"")
        batches = ImageBatches(tmp_path, SMALL)
        assert list(batches) == []
        assert batches.n_unreadable == 1

    def test_a_file_that_vanishes_is_unreadable(self, many):
        batches = ImageBatches(many, SMALL, workers=0, batch_size=10)
        iterator = iter(batches)
        next(iterator)
        (many / "149.png").unlink()
        assert sum(len(names) for _, names in iterator) == 139
        assert batches.unreadable[0].reason == "the system said: No such file or directory"

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("name", ["a.npz", "a.npy"])
    @pytest.mark.parametrize("size", [(8, 8), (5, 7)], ids=["as_it_is", "resized"])
    def test_arrays_give_what_their_images_give(self, tmp_path, workers, name, size):
        rows = _noise(size=(150, 8, 8))
        np.save(tmp_path / name, rows) if name == "a.npy" else np.savez_compressed(tmp_path / name, images=rows)
        preprocessing = Preprocessing(size, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
        names, images = _collect(ImageBatches(tmp_path / name, preprocessing, workers=workers, batch_size=32))
        assert names == [f"{tmp_path / name}#{i}" for i in range(150)]
        assert torch.equal(torch.stack(images), preprocessing.apply_array(rows))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_files_folders_and_arrays_keep_their_order(self, many, tmp_path, workers):
        np.savez(tmp_path / "a.npz", images=_noise(size=(3, 8, 8)))
        np.save(tmp_path / "b.npy", _noise(size=(2, 9, 9)))
        (tmp_path / "c.npz").write_bytes(b"rubbish")
        paths = [many / "003.png", tmp_path / "a.npz", many / "001.png", tmp_path / "c.npz", tmp_path / "b.npy", many]
        batches = ImageBatches(paths, SMALL, workers=workers)
        names = [Path(name).name for name in _collect(batches)[0]]
        assert names[:7] == ["003.png", "a.npz#0", "a.npz#1", "a.npz#2", "001.png", "b.npy#0", "b.npy#1"]
        assert names[7:] == [f"{i:03}.png" for i in range(150)]
        assert [Path(note.path).name for note in batches.unreadable] == ["c.npz"]
        assert batches.count() == 158  # with the one that cannot be read

    def test_damage_in_an_array_costs_the_rows_behind_it(self, tmp_path):
        rows = _noise(size=(200, 16, 16))
        np.savez(tmp_path / "a.npz", images=rows)
        data = bytearray((tmp_path / "a.npz").read_bytes())
        data[-1200] ^= 0xFF  # in the last row; the checksum shows it when the end is reached
        (tmp_path / "a.npz").write_bytes(bytes(data))
        batches = ImageBatches(tmp_path / "a.npz", Preprocessing((16, 16), (0,) * 3, (1,) * 3))
        assert len(_collect(batches)[0]) == 192  # three tasks of 64 rows
        assert batches.n_unreadable == 8
        assert batches.unreadable[0].path == f"{tmp_path / 'a.npz'}#192"

    def test_images_of_different_sizes_never_share_a_batch(self, tmp_path):
        for i, size in enumerate([(8, 8), (8, 8), (4, 6), (8, 8), (8, 8), (8, 8)]):
            _save(tmp_path / f"{i}.png", i, size)
        any_size = Preprocessing(None, (0.5,) * 3, (0.5,) * 3)
        shapes = [tuple(images.shape) for images, _ in ImageBatches(tmp_path, any_size, batch_size=2)]
        assert shapes == [(2, 3, 8, 8), (1, 3, 4, 6), (2, 3, 8, 8), (1, 3, 8, 8)]

    def test_greyscale_models_get_one_channel(self, many):
        grey = Preprocessing((8, 8), (0.5,), (0.5,), channels=1)
        images, _ = next(iter(ImageBatches(many, grey, workers=0)))
        assert images.shape == (64, 1, 8, 8)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_images_to_skip_are_not_read(self, many, tmp_path, workers):
        np.savez(tmp_path / "a.npz", images=_noise(size=(100, 8, 8)))
        (many / "000.png").write_bytes(b"")
        done = {str(many / f"{i:03}.png") for i in range(140)} | {f"{tmp_path / 'a.npz'}#{i}" for i in range(0, 90, 2)}
        batches = ImageBatches([many, tmp_path / "a.npz"], SMALL, workers=workers, skip=done.__contains__)
        names, _ = _collect(batches)
        assert batches.n_unreadable == 0
        assert names == [str(many / f"{i:03}.png") for i in range(140, 150)] + [
            name for i in range(100) if (name := f"{tmp_path / 'a.npz'}#{i}") not in done
        ]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_too_large_images_are_refused(self, many, workers):
        _save(many / "zzz.png", size=(9, 9))
        batches = ImageBatches(many, SMALL, workers=workers, max_pixels=64)
        assert len(_collect(batches)[0]) == 150
        assert batches.unreadable == [
            Unreadable(str(many / "zzz.png"), "it has 9 x 9 pixels, more than the limit of 64")
        ]

    def test_only_the_first_notes_are_kept_and_all_are_counted(self, tmp_path, monkeypatch):
        monkeypatch.setattr(batches_module, "KEPT_NOTES", 3)
        for i in range(10):
            (tmp_path / f"{i}.png").write_bytes(b"")
            (tmp_path / f"{i}.txt").write_bytes(b"")
        batches = ImageBatches(tmp_path, SMALL)
        assert list(batches) == []
        assert (len(batches.unreadable), batches.n_unreadable) == (3, 10)
        assert (len(batches.skipped), batches.n_skipped) == (3, 10)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"batch_size": 0}, "Expected `batch_size` to be at least 1, but got 0"),
            ({"workers": -1}, "Expected `workers` to be at least 0, but got -1"),
            ({"max_pixels": 0}, "Expected `max_pixels` to be at least 1, but got 0"),
        ],
        ids=["batch_size", "workers", "max_pixels"],
    )
    def test_numbers_out_of_range_are_refused(self, many, options, message):
        with pytest.raises(InputError, match=message):
            ImageBatches(many, SMALL, **options)

    def test_a_path_that_is_not_there_is_an_error_at_once(self, tmp_path):
        with pytest.raises(InputError, match="there is no such file or folder"):
            ImageBatches(tmp_path / "nowhere", SMALL)


class TestProcesses:
    def _children(self):
        me = os.getpid()
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == me:
                found.append(int(entry.parent.name))
        return found

    def test_few_images_start_no_process(self, tmp_path, monkeypatch):
        for i in range(5):
            _save(tmp_path / f"{i}.png")
        monkeypatch.setattr(subprocess, "Popen", None)
        assert len(_collect(ImageBatches(tmp_path, SMALL, workers=2))[0]) == 5

    def test_rows_that_keep_their_size_start_no_process(self, tmp_path, monkeypatch):
        np.savez(tmp_path / "a.npz", images=_noise(size=(300, 8, 8)))
        monkeypatch.setattr(subprocess, "Popen", None)
        assert len(_collect(ImageBatches(tmp_path / "a.npz", SMALL, workers=2))[0]) == 300

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
    @pytest.mark.parametrize("how", ["to the end", "stopped early", "error in the loop"])
    def test_no_process_is_left(self, many, how):
        before = set(self._children())
        iterator = iter(ImageBatches(many, SMALL, batch_size=10, workers=2))
        next(iterator)
        assert len(set(self._children()) - before) == 2
        if how == "to the end":
            list(iterator)
        elif how == "stopped early":
            iterator.close()
        else:
            with pytest.raises(RuntimeError, match="mine"):
                iterator.throw(RuntimeError("mine"))
        assert set(self._children()) == before

    @pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
    def test_workers_end_when_the_main_process_is_killed(self, many, tmp_path):
        code = (
            "import sys, os, signal, pathlib; from neuralmean.data.images import ImageBatches; "
            "from neuralmean.data.preprocessing import Preprocessing; import neuralmean.data.images.pool as pool; "
            "batches = iter(ImageBatches(sys.argv[1], Preprocessing((8, 8), (0,) * 3, (1,) * 3), workers=1, batch_size=8)); "
            "next(batches); children = pathlib.Path(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read_text(); "
            "pathlib.Path(sys.argv[2]).write_text(children); os.kill(os.getpid(), signal.SIGKILL)"
        )
        done = subprocess.run([sys.executable, "-c", code, str(many), str(tmp_path / "pids")], check=False)
        assert done.returncode == -signal.SIGKILL
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 1
        program = Path(f"/proc/{pids[0]}/exe")  # also gone when the process ended and nobody has reaped it
        for _ in range(200):
            if not program.exists():
                break
            subprocess.run([sys.executable, "-S", "-c", ""], check=True)  # a moment passes
        assert not program.exists()

    @posix
    @pytest.mark.parametrize("workers", [1, 2])
    def test_a_decoder_that_crashes_costs_the_file_that_killed_it(self, many, tmp_path, monkeypatch, workers):
        # A worker whose decoder kills its own process on two of the files.
        boot = pool_module._BOOT.replace(
            "from neuralmean.data.images.worker import main; main()",
            "import os, neuralmean.data.images.worker as worker; read = worker.open_image; "
            "worker.open_image = lambda name, n: os.kill(os.getpid(), 9) if name[-7:] in ('070.png', '149.png') "
            "else read(name, n); worker.main()",
        )
        monkeypatch.setattr(pool_module, "_BOOT", boot)
        batches = ImageBatches(many, SMALL, batch_size=50, workers=workers)
        names, rows = _collect(batches)
        assert len(names) == len(rows) == 148
        assert batches.unreadable == [
            Unreadable(str(many / "070.png"), "the decoder crashed on it"),
            Unreadable(str(many / "149.png"), "the decoder crashed on it"),
        ]
        expected = [path for path in sorted(many.iterdir()) if path.name not in ("070.png", "149.png")]
        assert names == [str(path) for path in expected]
        assert torch.equal(torch.stack(rows), torch.stack([SMALL(Image.open(path)) for path in expected]))

    @pytest.mark.parametrize("how", ["dies at once", "cannot be started"])
    def test_where_no_process_can_run_the_work_is_done_here(self, many, monkeypatch, how):
        if how == "dies at once":
            monkeypatch.setattr(pool_module, "_BOOT", "import sys; sys.exit(1)")
        else:
            monkeypatch.setattr(sys, "executable", "/nowhere/python")
        batches = ImageBatches(many, SMALL, workers=2)
        assert len(_collect(batches)[0]) == 150
        assert batches.n_unreadable == 0

    def test_only_a_few_tasks_are_under_way_at_a_time(self, many, monkeypatch):
        monkeypatch.setattr(batches_module, "_FILES_PER_TASK", 5)
        asked = []
        iterator = iter(ImageBatches(many, SMALL, batch_size=5, workers=2, skip=lambda name: asked.append(name)))
        next(iterator)
        assert len(asked) <= 5 * (2 * 2 + 1)
        iterator.close()

    def test_workers_do_not_import_torch_nor_the_callers_script(self, tmp_path, many):
        script = tmp_path / "script.py"
        # No `if __name__ == "__main__"`: with multiprocessing this would start itself again.
        script.write_text(
            "import sys\n"
            "print('started')\n"
            "from neuralmean.data.images import ImageBatches\n"
            "from neuralmean.data.preprocessing import Preprocessing\n"
            "batches = ImageBatches(sys.argv[1], Preprocessing((8, 8), (0,) * 3, (1,) * 3), workers=2)\n"
            "print(sum(len(names) for _, names in batches))\n"
        )
        (many / "numpy.py").write_text("raise RuntimeError('a module of the working folder was imported')")
        done = subprocess.run(
            [sys.executable, str(script), str(many)], capture_output=True, text=True, check=False, cwd=many
        )
        assert (done.stdout, done.stderr) == ("started\n150\n", "")

    def test_the_package_imports_no_torch(self):
        code = (
            "import sys, types; package = types.ModuleType('neuralmean'); package.__path__ = [sys.argv[1]]; "
            "sys.modules['neuralmean'] = package; import neuralmean.data.images; sys.exit('torch' in sys.modules)"
        )
        assert subprocess.run([sys.executable, "-c", code, *neuralmean.__path__], check=False).returncode == 0

    def test_file_names_that_are_no_text_are_read(self, many, tmp_path):
        odd = many / os.fsdecode(b"z\xff\n.png")
        try:
            odd.write_bytes((many / "000.png").read_bytes())
        except OSError:
            pytest.skip("the file system takes only text as names")
        names, _ = _collect(ImageBatches(many, SMALL, workers=1))
        assert names[-1] == str(odd)
