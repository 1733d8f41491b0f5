"""How a chunk is read, whatever holds the images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from neuralmean.data.images import ImageBatches
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import (
    InputError,
)
from neuralmean.jobs.cluster.chunks import Chunks
from neuralmean.jobs.cluster.pieces import Files, stretches
from neuralmean.jobs.cluster.reading import Batches, Reading
from tests.jobs.cluster.conftest import SMALL, N, pixels, png


class TestReading:
    @pytest.mark.parametrize("kind", ["array", "tar", "bytes", "struct", "lists", "tensor"])
    def test_every_source_gives_the_same_images(self, containers, kind):
        expected = SMALL.apply_array(np.stack([pixels(i) for i in range(N)]))
        rows = [
            images for chunk in Chunks(containers[kind], size=64) for _, images in Batches(chunk.piece, Reading(SMALL))
        ]
        assert torch.equal(torch.cat(rows), expected)

    def test_batches_are_those_of_image_batches(self, good):
        ours = [b for chunk in Chunks(good, size=128) for b in Batches(chunk.piece, Reading(SMALL, 32))]
        theirs = list(ImageBatches(good, SMALL, batch_size=32, workers=0))
        assert [names for names, _ in ours] == [batch.names for batch in theirs]
        assert all(torch.equal(images, batch.images) for (_, images), batch in zip(ours, theirs, strict=True))

    def test_what_cannot_be_read_is_noted_and_left_out(self, folder):
        batches = Batches(next(iter(Chunks(folder, size=64))).piece, Reading(SMALL))
        assert sum(len(names) for names, _ in batches) == 63
        assert [Path(note.path).name for note in batches.unreadable] == ["0007.png"]

    def test_images_of_different_sizes_do_not_share_a_batch(self, tmp_path):
        for i, side in enumerate((4, 4, 6, 4)):
            Image.fromarray(pixels(i, side)).save(tmp_path / f"{i}.png")
        how = Reading(Preprocessing(None, (0.0,) * 3, (1.0,) * 3))
        batches = Batches(Files(tuple(str(tmp_path / f"{i}.png") for i in range(4))), how)
        assert [tuple(images.shape) for _, images in batches] == [(2, 3, 4, 4), (1, 3, 6, 6), (1, 3, 4, 4)]

    def test_reading_with_care_gives_the_same_images(self, folder, containers):
        for source in (folder, containers["bytes"]):
            piece = next(iter(Chunks(source, size=10))).piece.select([5, 7])
            plain, careful = Batches(piece, Reading(SMALL)), Batches(piece, Reading(SMALL, careful=True))
            for (names, images), (again, same) in zip(plain, careful, strict=True):
                assert names == again
                assert torch.equal(images, same)
            assert plain.unreadable == careful.unreadable

    def test_every_name_has_one_answer_whatever_the_source_does(self):
        class Short(Files):
            def items(self):
                return iter([png(0)])

        batches = Batches(Short(("a", "b", "c")), Reading(SMALL))
        assert [names for names, _ in batches] == [["a"]]
        assert [(note.path, note.reason) for note in batches.unreadable] == [
            ("b", "the source ends before it"),
            ("c", "the source ends before it"),
        ]

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (None, "this row is empty"),
            ("photo.png", "the row holds text"),
            ([[1, 2], [3]], "not an array of one shape"),
            ([[300]], "must be uint8"),
            ([[[1, 2]]], "must be uint8"),
        ],
    )
    def test_a_row_that_is_no_image_says_why(self, value, reason):
        from neuralmean.jobs.cluster.parquet import _image

        assert reason in _image(value).reason

    def test_a_column_is_chosen_by_name_kind_or_the_caller(self, tmp_path):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"id": [1], "foto": [png(1)]}), tmp_path / "one.parquet")
        pq.write_table(pa.table({"x": [png(1)], "y": [png(2)]}), tmp_path / "two.parquet")
        assert Chunks(tmp_path / "one.parquet").count() == 1
        assert Chunks(tmp_path / "two.parquet", column="y").count() == 1
        with pytest.raises(InputError, match="Choose one with `column`"):
            Chunks(tmp_path / "two.parquet").count()
        with pytest.raises(InputError, match="to have a column 'z', but it has"):
            Chunks(tmp_path / "two.parquet", column="z").count()

    def test_neighbours_are_joined(self):
        assert list(stretches([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]
        assert list(stretches([])) == []
