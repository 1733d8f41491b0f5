"""Images in .npy and .npz files."""

import io
import os
import tracemalloc
import zipfile

import numpy as np
import pytest

from neuralmean.data.images import arrays as arrays_module
from neuralmean.data.images.arrays import ArrayFile, split_name
from neuralmean.errors import InputError
from tests.data.images.conftest import noise


class TestArrays:
    @pytest.mark.parametrize("name", ["a.npz", "packed.npz", "a.npy"])
    def test_rows_come_back_in_any_stretches(self, tmp_path, name):
        rows = noise(size=(10, 4, 6))
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
                "its images are in column order",
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
        rows = noise(size=(50, 16, 16))
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
