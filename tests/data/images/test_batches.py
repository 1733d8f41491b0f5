"""Batches of images, read in this process or by workers."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from neuralmean.data.images import ImageBatches, Unreadable
from neuralmean.data.images import batches as batches_module
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import InputError
from tests.data.images.conftest import SMALL, collect, noise, save


def reference_batches(folder, preprocessing):
    return [preprocessing(Image.open(path)) for path in sorted(folder.iterdir())]


class TestBatches:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    @pytest.mark.parametrize("size", [8, 6], ids=["as_it_is", "resized"])
    def test_images_come_in_order_whoever_decodes_them(self, many, workers, size):
        preprocessing = Preprocessing((size, size), (0.5, 0.4, 0.3), (0.2, 0.3, 0.4), "bicubic")
        batches = ImageBatches(many, preprocessing, batch_size=40, workers=workers)
        names, rows = collect(batches)
        assert names == [str(path) for path in sorted(many.iterdir())]
        assert torch.equal(torch.stack(rows), torch.stack(reference_batches(many, preprocessing)))
        assert (batches.n_images, batches.n_unreadable, batches.n_skipped) == (150, 0, 0)

    @pytest.mark.parametrize("batch_size", [1, 7, 64, 100, 1000])
    def test_every_batch_but_the_last_is_full(self, many, batch_size):
        sizes = [len(names) for _, names in ImageBatches(many, SMALL, batch_size=batch_size, workers=0)]
        assert sizes[:-1] == [batch_size] * (150 // batch_size if 150 % batch_size else 150 // batch_size - 1)
        assert sum(sizes) == 150

    def test_a_second_pass_gives_the_same_again(self, many):
        batches = ImageBatches(many, SMALL, workers=1)
        first, second = collect(batches), collect(batches)
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
        names, rows = collect(batches)
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
        assert batches.unreadable[0].reason == "the system reported: No such file or directory"

    @pytest.mark.parametrize("workers", [0, 2])
    @pytest.mark.parametrize("name", ["a.npz", "a.npy"])
    @pytest.mark.parametrize("size", [(8, 8), (5, 7)], ids=["as_it_is", "resized"])
    def test_arrays_give_what_their_images_give(self, tmp_path, workers, name, size):
        rows = noise(size=(150, 8, 8))
        np.save(tmp_path / name, rows) if name == "a.npy" else np.savez_compressed(tmp_path / name, images=rows)
        preprocessing = Preprocessing(size, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
        names, images = collect(ImageBatches(tmp_path / name, preprocessing, workers=workers, batch_size=32))
        assert names == [f"{tmp_path / name}#{i}" for i in range(150)]
        assert torch.equal(torch.stack(images), preprocessing.apply_array(rows))

    @pytest.mark.parametrize("workers", [0, 1])
    def test_files_folders_and_arrays_keep_their_order(self, many, tmp_path, workers):
        np.savez(tmp_path / "a.npz", images=noise(size=(3, 8, 8)))
        np.save(tmp_path / "b.npy", noise(size=(2, 9, 9)))
        (tmp_path / "c.npz").write_bytes(b"rubbish")
        paths = [many / "003.png", tmp_path / "a.npz", many / "001.png", tmp_path / "c.npz", tmp_path / "b.npy", many]
        batches = ImageBatches(paths, SMALL, workers=workers)
        names = [Path(name).name for name in collect(batches)[0]]
        assert names[:7] == ["003.png", "a.npz#0", "a.npz#1", "a.npz#2", "001.png", "b.npy#0", "b.npy#1"]
        assert names[7:] == [f"{i:03}.png" for i in range(150)]
        assert [Path(note.path).name for note in batches.unreadable] == ["c.npz"]
        assert batches.count() == 158  # with the one that cannot be read

    def test_damage_in_an_array_costs_the_rows_behind_it(self, tmp_path):
        rows = noise(size=(200, 16, 16))
        np.savez(tmp_path / "a.npz", images=rows)
        data = bytearray((tmp_path / "a.npz").read_bytes())
        data[-1200] ^= 0xFF  # in the last row; the checksum shows it when the end is reached
        (tmp_path / "a.npz").write_bytes(bytes(data))
        batches = ImageBatches(tmp_path / "a.npz", Preprocessing((16, 16), (0,) * 3, (1,) * 3))
        assert len(collect(batches)[0]) == 192  # three tasks of 64 rows
        assert batches.n_unreadable == 8
        assert batches.unreadable[0].path == f"{tmp_path / 'a.npz'}#192"

    def test_images_of_different_sizes_never_share_a_batch(self, tmp_path):
        for i, size in enumerate([(8, 8), (8, 8), (4, 6), (8, 8), (8, 8), (8, 8)]):
            save(tmp_path / f"{i}.png", i, size)
        any_size = Preprocessing(None, (0.5,) * 3, (0.5,) * 3)
        shapes = [tuple(images.shape) for images, _ in ImageBatches(tmp_path, any_size, batch_size=2)]
        assert shapes == [(2, 3, 8, 8), (1, 3, 4, 6), (2, 3, 8, 8), (1, 3, 8, 8)]

    def test_greyscale_models_get_one_channel(self, many):
        grey = Preprocessing((8, 8), (0.5,), (0.5,), channels=1)
        images, _ = next(iter(ImageBatches(many, grey, workers=0)))
        assert images.shape == (64, 1, 8, 8)

    @pytest.mark.parametrize("workers", [0, 1])
    def test_images_to_skip_are_not_read(self, many, tmp_path, workers):
        np.savez(tmp_path / "a.npz", images=noise(size=(100, 8, 8)))
        (many / "000.png").write_bytes(b"")
        done = {str(many / f"{i:03}.png") for i in range(140)} | {f"{tmp_path / 'a.npz'}#{i}" for i in range(0, 90, 2)}
        batches = ImageBatches([many, tmp_path / "a.npz"], SMALL, workers=workers, skip=done.__contains__)
        names, _ = collect(batches)
        assert batches.n_unreadable == 0
        assert names == [str(many / f"{i:03}.png") for i in range(140, 150)] + [
            name for i in range(100) if (name := f"{tmp_path / 'a.npz'}#{i}") not in done
        ]

    @pytest.mark.parametrize("workers", [0, 1])
    def test_too_large_images_are_refused(self, many, workers):
        save(many / "zzz.png", size=(9, 9))
        batches = ImageBatches(many, SMALL, workers=workers, max_pixels=64)
        assert len(collect(batches)[0]) == 150
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
