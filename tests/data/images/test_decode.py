"""From a file to an image."""

import os
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, ImageFile

from neuralmean.data.images import ImageBatches, Unreadable, decode_image, read_image
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError
from tests.data.images.conftest import SMALL, encoded, noise, posix, save


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
        (tmp_path / "image").write_bytes(encoded(Image.fromarray(noise()), kind, **options))
        assert np.array_equal(np.asarray(read_image(tmp_path / "image")), noise())

    def test_jpeg_comes_back_nearly(self):
        smooth = np.linspace(0, 255, 64 * 64 * 3).reshape(64, 64, 3).astype(np.uint8)
        image = decode_image(encoded(Image.fromarray(smooth), "JPEG", quality=95))
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
        image = decode_image(encoded(Image.fromarray(pixels), kind, exif=exif, **options))
        assert image.size == (turned.shape[1], turned.shape[0])
        assert np.abs(np.asarray(image).astype(int) - turned).max() <= 4

    def test_a_damaged_orientation_counts_as_none(self):
        data = encoded(Image.fromarray(noise()), "PNG")
        exif = b"II*\0\xff\xff\xff\xff"
        chunk = struct.pack(">I", len(exif)) + b"eXIf" + exif + struct.pack(">I", zlib.crc32(b"eXIf" + exif))
        image = decode_image(data[:33] + chunk + data[33:])  # after signature and header
        assert np.array_equal(np.asarray(image), noise())

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
        pixels = SMALL.pixels(decode_image(encoded(image, kind)))
        assert pixels.shape == (8, 8, 3)
        assert np.unique(pixels.reshape(-1, 3), axis=0).tolist() == [expected]

    def test_a_palette_with_a_transparent_colour_becomes_white_there(self):
        image = Image.new("P", (8, 8), 1)
        image.putpalette([9, 9, 9, 200, 100, 50])
        pixels = SMALL.pixels(decode_image(encoded(image, "PNG", transparency=1)))
        assert np.unique(pixels).tolist() == [255]

    def test_the_first_page_of_several_is_taken(self):
        pages = [Image.new("RGB", (8, 8), (i, i, i)) for i in (5, 6)]
        data = encoded(pages[0], "TIFF", save_all=True, append_images=pages[1:])
        assert decode_image(data).getpixel((0, 0)) == (5, 5, 5)

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
    def test_a_file_that_is_cut_short_is_an_error(self, kind):
        data = encoded(Image.fromarray(noise(size=(64, 64))), kind)
        with pytest.raises(InputError, match="damaged"):
            decode_image(data[: len(data) // 2])

    @pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF"])
    @pytest.mark.filterwarnings("ignore")
    def test_a_file_with_any_damage_gives_an_image_or_a_reason(self, kind):
        data = encoded(Image.fromarray(noise(size=(16, 16))), kind)
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
            decode_image(encoded(Image.new("RGB", (4, 4)), "PNG"))

    def test_an_image_that_does_not_fit_into_memory_when_resized_is_unreadable(self, tmp_path, monkeypatch):
        def fail(*args, **kwargs):
            raise MemoryError

        save(tmp_path / "a.png")
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
        data = encoded(Image.new("RGB", (20, 20)), "PNG")
        with pytest.raises(InputError, match="it has 20 x 20 pixels, more than the limit of 399"):
            decode_image(data, max_pixels=399)
        assert decode_image(data, max_pixels=400).size == (20, 20)
        assert before == Image.MAX_IMAGE_PIXELS

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda path: None, "the system reported: No such file or directory"),
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
        rows = noise(size=(5, 8, 8))
        np.savez_compressed(tmp_path / "a.npz", images=rows)
        assert np.array_equal(np.asarray(read_image(f"{tmp_path / 'a.npz'}#3")), rows[3])
        result = read_image(f"{tmp_path / 'a.npz'}#5")
        assert isinstance(result, Unreadable)
        assert result.reason == "there is no row 5: it has 5 images"

    def test_a_grey_row_of_an_array_is_a_grey_image(self, tmp_path):
        np.save(tmp_path / "a.npy", np.full((1, 4, 4, 1), 9, np.uint8))
        assert read_image(f"{tmp_path / 'a.npy'}#0").mode == "L"
