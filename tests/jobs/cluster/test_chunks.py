"""How sources are cut into chunks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neuralmean.errors import (
    InputError,
)
from neuralmean.jobs.cluster.chunks import Chunks
from neuralmean.jobs.cluster.reading import Batches, Reading
from tests.jobs.cluster.conftest import SMALL, N, names_of


class TestChunks:
    def test_inputs_are_cut_in_order_and_numbered(self, folder):
        chunks = list(Chunks(folder, size=64))
        assert [(chunk.number, len(chunk)) for chunk in chunks] == [(0, 64), (1, 64), (2, 22)]
        assert names_of(chunks) == sorted(map(str, folder.rglob("*.png")))

    def test_keys_tell_chunks_apart_and_stay_the_same(self, folder):
        keys = [chunk.key for chunk in Chunks(folder, size=64)]
        assert len(set(keys)) == 3
        assert keys == [chunk.key for chunk in Chunks(str(folder), size=64)]

    def test_arrays_parquet_and_tars_are_cut_like_files(self, containers):
        for path in containers.values():
            assert [len(chunk) for chunk in Chunks(path, size=64)] == [64, 64, 22]

    def test_counting_agrees_with_listing(self, folder, containers):
        sources = [folder, *containers.values()]
        assert Chunks(sources, size=40).count() == len(names_of(Chunks(sources, size=40))) == N * 7

    @pytest.mark.parametrize("sample", [1, 17, 149, 150, 500])
    def test_a_sample_has_the_size_asked_for_and_keeps_the_order(self, folder, containers, sample):
        for source in (folder, containers["array"], containers["tar"], containers["bytes"]):
            everything = names_of(Chunks(source, size=32))
            chosen = Chunks(source, size=32, sample=sample)
            names = names_of(chosen)
            assert len(names) == len(set(names)) == chosen.count() == min(sample, N)
            assert names == [name for name in everything if name in set(names)]

    def test_a_sample_is_spread_over_all_inputs(self, folder):
        places = [int(Path(name).stem) for name in names_of(Chunks(folder, size=16, sample=50))]
        assert 60 < sum(places) / 50 < 90

    def test_a_selected_piece_reads_just_these_rows(self, containers):
        for path in containers.values():
            piece = next(iter(Chunks(path, size=64))).piece
            rows = next(rows for _, rows in Batches(piece, Reading(SMALL)))
            some = piece.select([0, 3, 4, 63])
            ((names, images),) = Batches(some, Reading(SMALL))
            assert names == [piece.names[i] for i in (0, 3, 4, 63)]
            assert torch.equal(images, rows[[0, 3, 4, 63]])

    def test_containers_inside_a_folder_are_found(self, containers):
        top = containers["tar"].parent
        assert Chunks(top, size=64).count() == (len(containers) - 1) * N  # arrays in folders are not looked into

    def test_braces_name_many_tars(self, containers, tmp_path):
        for i in range(3):
            (tmp_path / f"shard-{i:02}.tar").write_bytes(containers["tar"].read_bytes())
        assert Chunks(str(tmp_path / "shard-{00..02}.tar"), size=64).count() == 3 * N

    @pytest.mark.parametrize("size", [0, -1, 1.5, True])
    def test_a_size_must_be_a_positive_integer(self, folder, size):
        with pytest.raises(InputError, match="Expected `chunk_size` to be a positive integer"):
            Chunks(folder, size=size)

    @pytest.mark.parametrize("sample", [0, 2.5, False])
    def test_a_sample_must_be_a_positive_integer(self, folder, sample):
        with pytest.raises(InputError, match="Expected the number of rows to sample to be a positive integer"):
            Chunks(folder, sample=sample)

    @pytest.mark.parametrize("sources", [5, torch.zeros(3), [1, 2], None], ids=repr)
    def test_sources_must_be_paths_or_a_dataset(self, sources):
        with pytest.raises(InputError, match=r"Expected paths or one ray\.data\.Dataset"):
            Chunks(sources)

    def test_a_missing_path_is_an_error_at_once(self):
        with pytest.raises(InputError, match="there is no such file"):
            Chunks("nowhere")

    def test_a_damaged_container_is_one_unreadable_input(self, tmp_path):
        for name in ("a.tar", "b.parquet", "c.npz"):
            (tmp_path / name).write_bytes(b"\x1f\x8b damaged" * 100)
            chunks = list(Chunks(tmp_path / name))
            batches = Batches(chunks[0].piece, Reading(SMALL))
            assert list(batches) == []
            assert [note.path for note in batches.unreadable] == [str(tmp_path / name)]

    def test_a_truncated_tar_gives_what_is_whole(self, containers, tmp_path):
        whole = containers["tar"].read_bytes()
        path = tmp_path / "cut.tar"
        path.write_bytes(whole[: len(whole) // 2])
        names, notes = [], []
        for chunk in Chunks(path, size=64):
            batches = Batches(chunk.piece, Reading(SMALL))
            names += [name for batch, _ in batches for name in batch]
            notes += batches.unreadable
        assert 60 < len(names) < 80
        assert len(notes) >= 1
