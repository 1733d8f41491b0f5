"""Chunks, jobs and the journal in this process; the same over Ray's workers in the second half."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import random
import signal
import sys
import tarfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from neuralmean import Detector, Reference
from neuralmean.data.images import ImageBatches
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import (
    ArtefactError,
    CalibrationWarning,
    InputError,
    MissingExtraError,
    NeuralMeanError,
    NeuralMeanWarning,
)
from neuralmean.jobs import Journal
from neuralmean.jobs import cluster as distributed
from neuralmean.jobs.cluster import extras
from neuralmean.jobs.cluster.chunks import Chunks
from neuralmean.jobs.cluster.engine import Cluster, _Team
from neuralmean.jobs.cluster.pieces import Files, stretches
from neuralmean.jobs.cluster.reading import Batches, Reading
from tests.conftest import TinyNet, make_trained

SMALL = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)
N = 150


def _pixels(i, side=8):
    return np.random.default_rng(i).integers(0, 256, (side, side, 3), dtype=np.uint8)


def _png(i):
    buffer = io.BytesIO()
    Image.fromarray(_pixels(i)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """150 images in two subfolders, of which number 7 is damaged, and a text file."""
    top = tmp_path_factory.mktemp("images")
    for i in range(N):
        path = top / ("a" if i < 100 else "b") / f"{i:04}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_png(i) if i != 7 else b"no image")
    (top / "notes.txt").write_text("hello")
    return top


@pytest.fixture(scope="module")
def good(folder):
    return sorted(path for path in folder.rglob("*.png") if path.stem != "0007")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "tiny.nmd"
    images = torch.stack([SMALL(Image.fromarray(_pixels(i))) for i in range(1000, 1200)])
    Detector(make_trained(), scorer="average").calibrate(images).save(path, info={"preprocessing": SMALL.to_json()})
    return path


def _score(saved, sources, out, **options):
    return distributed.score(saved, sources, out=out, model=make_trained, **{"workers": 0, **options})


def _rows(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def _names(chunks):
    return [name for chunk in chunks for name in chunk.piece.names]


class TestChunks:
    def test_inputs_are_cut_in_order_and_numbered(self, folder):
        chunks = list(Chunks(folder, size=64))
        assert [(chunk.number, len(chunk)) for chunk in chunks] == [(0, 64), (1, 64), (2, 22)]
        assert _names(chunks) == sorted(map(str, folder.rglob("*.png")))

    def test_keys_tell_chunks_apart_and_stay_the_same(self, folder):
        keys = [chunk.key for chunk in Chunks(folder, size=64)]
        assert len(set(keys)) == 3
        assert keys == [chunk.key for chunk in Chunks(str(folder), size=64)]

    def test_arrays_parquet_and_tars_are_cut_like_files(self, containers):
        for path in containers.values():
            assert [len(chunk) for chunk in Chunks(path, size=64)] == [64, 64, 22]

    def test_counting_agrees_with_listing(self, folder, containers):
        sources = [folder, *containers.values()]
        assert Chunks(sources, size=40).count() == len(_names(Chunks(sources, size=40))) == N * 7

    @pytest.mark.parametrize("sample", [1, 17, 149, 150, 500])
    def test_a_sample_has_the_size_asked_for_and_keeps_the_order(self, folder, containers, sample):
        for source in (folder, containers["array"], containers["tar"], containers["bytes"]):
            everything = _names(Chunks(source, size=32))
            chosen = Chunks(source, size=32, sample=sample)
            names = _names(chosen)
            assert len(names) == len(set(names)) == chosen.count() == min(sample, N)
            assert names == [name for name in everything if name in set(names)]

    def test_a_sample_is_spread_over_all_inputs(self, folder):
        places = [int(Path(name).stem) for name in _names(Chunks(folder, size=16, sample=50))]
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


@pytest.fixture(scope="module")
def containers(tmp_path_factory):
    """The same 150 images as an array, a tar, and parquet of bytes, structs, nested lists and tensors."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    top = tmp_path_factory.mktemp("containers")
    np.savez(top / "array.npz", images=np.stack([_pixels(i) for i in range(N)]))
    with tarfile.open(top / "shard.tar", "w") as archive:
        for i in range(N):
            for suffix, data in (("png", _png(i)), ("cls", b"3")):
                entry = tarfile.TarInfo(f"{i:04}.{suffix}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    kind = pa.fixed_shape_tensor(pa.uint8(), (8, 8, 3))
    flat = pa.FixedSizeListArray.from_arrays(pa.array(np.stack([_pixels(i) for i in range(N)]).reshape(-1)), 192)
    columns = {
        "bytes": pa.array([_png(i) for i in range(N)]),
        "struct": pa.array([{"bytes": _png(i), "path": f"{i}"} for i in range(N)]),
        "lists": pa.array([_pixels(i).tolist() for i in range(N)]),
        "tensor": pa.ExtensionArray.from_storage(kind, flat),
    }
    for name, column in columns.items():
        table = pa.table({"label": list(range(N)), "image": column})
        pq.write_table(table, top / f"{name}.parquet", row_group_size=1000)
    paths = {name: top / f"{name}.parquet" for name in columns}
    return {"array": top / "array.npz", "tar": top / "shard.tar", **paths}


class TestReading:
    @pytest.mark.parametrize("kind", ["array", "tar", "bytes", "struct", "lists", "tensor"])
    def test_every_source_gives_the_same_images(self, containers, kind):
        expected = SMALL.apply_array(np.stack([_pixels(i) for i in range(N)]))
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
            Image.fromarray(_pixels(i, side)).save(tmp_path / f"{i}.png")
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
                return iter([_png(0)])

        batches = Batches(Short(("a", "b", "c")), Reading(SMALL))
        assert [names for names, _ in batches] == [["a"]]
        assert [(note.path, note.reason) for note in batches.unreadable] == [
            ("b", "the source ends before it"),
            ("c", "the source ends before it"),
        ]

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            (None, "there is nothing in this row"),
            ("photo.png", "the row holds text"),
            ([[1, 2], [3]], "no array of one shape"),
            ([[300]], "must be uint8"),
            ([[[1, 2]]], "must be uint8"),
        ],
    )
    def test_a_row_that_is_no_image_says_why(self, value, reason):
        from neuralmean.jobs.cluster.parquet import _image

        assert reason in _image(value).reason

    def test_a_column_is_chosen_by_name_kind_or_the_caller(self, tmp_path):
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"id": [1], "foto": [_png(1)]}), tmp_path / "one.parquet")
        pq.write_table(pa.table({"x": [_png(1)], "y": [_png(2)]}), tmp_path / "two.parquet")
        assert Chunks(tmp_path / "one.parquet").count() == 1
        assert Chunks(tmp_path / "two.parquet", column="y").count() == 1
        with pytest.raises(InputError, match="Say which with `column`"):
            Chunks(tmp_path / "two.parquet").count()
        with pytest.raises(InputError, match="to have a column 'z', but it has"):
            Chunks(tmp_path / "two.parquet", column="z").count()

    def test_neighbours_are_joined(self):
        assert list(stretches([0, 1, 2, 5, 7, 8])) == [(0, 3), (5, 6), (7, 9)]
        assert list(stretches([])) == []


class TestScore:
    def test_scores_are_those_of_the_detector_bit_for_bit(self, saved, good, tmp_path):
        outcome = _score(saved, good, tmp_path / "out.jsonl")
        assert (outcome.n_images, outcome.n_unreadable, outcome.n_resumed) == (149, 0, 0)
        detector = Detector.load(saved, make_trained())
        decision = detector.predict(batch.images for batch in ImageBatches(good, SMALL, workers=0))
        rows = _rows(tmp_path / "out.jsonl")
        assert [row["path"] for row in rows] == list(map(str, good))
        assert [row["score"] for row in rows] == decision.score.tolist()
        assert [row["p_value"] for row in rows] == decision.p_value.tolist()
        assert [row["is_ood"] for row in rows] == decision.is_ood.tolist()
        assert outcome.n_ood == int(decision.is_ood.sum())

    def test_every_format_has_the_same_rows(self, saved, folder, tmp_path):
        pq = pytest.importorskip("pyarrow.parquet")
        for suffix in ("jsonl", "csv", "parquet"):
            outcome = _score(saved, folder, tmp_path / f"out.{suffix}")
            assert [Path(note.path).name for note in outcome.unreadable] == ["0007.png"]
        rows = _rows(tmp_path / "out.jsonl")
        assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows
        with (tmp_path / "out.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [(r["path"], float(r["score"]), r["is_ood"]) for r in read] == [
            (r["path"], r["score"], str(r["is_ood"]).lower()) for r in rows
        ]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.jsonl", "out.parquet"]

    def test_a_format_can_be_asked_for_whatever_the_ending(self, saved, good, tmp_path):
        _score(saved, good, tmp_path / "out.jsonl")
        _score(saved, good, tmp_path / "out.scores", format="json")
        assert (tmp_path / "out.scores").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
        _score(saved, good, tmp_path / "out.txt")
        assert (tmp_path / "out.txt").read_text().split()[:5] == ["verdict", "kind", "p-value", "score", "path"]
        with pytest.raises(InputError, match="Expected the format to be one of"):
            _score(saved, good, tmp_path / "out.jsonl", format="xml")

    def test_what_cannot_be_read_is_told_as_it_is_met(self, saved, folder, tmp_path):
        notes = []
        _score(saved, folder, tmp_path / "out.jsonl", on_unreadable=notes.append)
        list(distributed.stream(saved, folder, model=make_trained, workers=0, on_unreadable=notes.append))
        assert [Path(note.path).name for note in notes] == ["0007.png"] * 2

    def test_streaming_gives_the_same_chunks_without_a_file(self, saved, folder, tmp_path):
        _score(saved, folder, tmp_path / "out.jsonl", chunk_size=40)
        chunks = list(distributed.stream(saved, folder, model=make_trained, workers=0, chunk_size=40))
        assert [len(chunk) for chunk in chunks] == [40, 40, 40, 30]
        assert [s for chunk in chunks for s in chunk.score] == [row["score"] for row in _rows(tmp_path / "out.jsonl")]

    def test_an_unknown_format_is_refused_before_any_work(self, saved, folder):
        with pytest.raises(InputError, match=r"Expected `out` to end in one of"):
            _score(saved, folder, "out.xlsx")

    def test_a_file_that_does_not_name_its_model_wants_one(self, saved, folder, tmp_path):
        with pytest.raises(InputError, match="Pass `model`"):
            distributed.score(saved, folder, out=tmp_path / "o.csv", workers=0)

    def test_preprocessing_must_come_from_somewhere(self, folder, tmp_path):
        Detector(make_trained(), scorer="average").calibrate(torch.rand(50, 3, 8, 8)).save(tmp_path / "x.nmd")
        with pytest.raises(InputError, match="Pass `preprocessing`"):
            _score(tmp_path / "x.nmd", folder, tmp_path / "o.csv")

    def test_a_model_must_be_one(self, saved, folder, tmp_path):
        with pytest.raises(InputError, match=r"Expected `model` to give a torch\.nn\.Module, but got int"):
            distributed.score(saved, folder, out=tmp_path / "o.csv", model=lambda: 5, workers=0)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("workers", -1), ("threads", 0), ("gpus", -0.5), ("workers", 1.5), ("batch_size", 0), ("batch_size", 2.5)],
    )
    def test_settings_out_of_range_are_refused(self, saved, folder, tmp_path, option, value):
        with pytest.raises(InputError, match=f"Expected `{option}` to be"):
            _score(saved, folder, tmp_path / "o.csv", **{option: value})

    def test_without_ray_the_message_says_what_to_install(self, saved, folder, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[ray\]"):
            _score(saved, folder, tmp_path / "o.csv", workers=1)

    def test_a_missing_package_is_named(self):
        with pytest.raises(MissingExtraError, match="Expected 'no_such_package' to be installed"):
            extras.import_extra("no_such_package.part")


class TestResume:
    def _stop_after(self, monkeypatch, n):
        """Make the driver die after `n` chunks are noted."""
        whole, keys = Journal.add, []

        def add(self, key, content):
            whole(self, key, content)
            keys.append(key)
            if len(keys) == n:
                raise KeyboardInterrupt

        monkeypatch.setattr(Journal, "add", add)

    @pytest.fixture
    def undisturbed(self, saved, folder, tmp_path):
        _score(saved, folder, tmp_path / "whole.jsonl", chunk_size=20)
        return (tmp_path / "whole.jsonl").read_bytes()

    def _interrupt(self, saved, folder, out, monkeypatch, n=3):
        with monkeypatch.context() as patch:
            self._stop_after(patch, n)
            with pytest.raises(KeyboardInterrupt):
                _score(saved, folder, out, chunk_size=20)

    def test_a_run_goes_on_where_it_was_and_ends_the_same(self, saved, folder, tmp_path, monkeypatch, undisturbed):
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, folder, out, monkeypatch)
        assert not out.exists()
        outcome = _score(saved, folder, out, chunk_size=20)
        assert outcome.n_resumed == 60
        assert outcome.n_images == 149
        assert out.read_bytes() == undisturbed

    def test_a_torn_line_is_done_again(self, saved, folder, tmp_path, monkeypatch, undisturbed):
        out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
        self._interrupt(saved, folder, out, monkeypatch)
        whole = journal.read_bytes()
        for cut in (1, 30, len(whole.splitlines(keepends=True)[-1]) + 5):
            journal.write_bytes(whole[:-cut])
            assert _score(saved, folder, out, chunk_size=20).n_resumed in (20, 40)
            assert out.read_bytes() == undisturbed

    def test_a_line_that_rotted_is_done_again(self, saved, folder, tmp_path, monkeypatch, undisturbed):
        out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
        self._interrupt(saved, folder, out, monkeypatch)
        lines = journal.read_bytes().splitlines(keepends=True)
        lines[2] = lines[2][:40] + bytes([lines[2][40] ^ 1]) + lines[2][41:]
        journal.write_bytes(b"".join(lines))
        assert _score(saved, folder, out, chunk_size=20).n_resumed == 20
        assert out.read_bytes() == undisturbed

    def test_inputs_that_changed_are_done_again(self, saved, folder, tmp_path, monkeypatch):
        import shutil

        mine = tmp_path / "mine"
        shutil.copytree(folder, mine)
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, mine, out, monkeypatch)
        (mine / "a" / "0030x.png").write_bytes(_png(5000))
        assert _score(saved, mine, out, chunk_size=20).n_resumed == 20
        assert len({row["path"] for row in _rows(out)}) == len(_rows(out)) == 150

    @pytest.mark.parametrize("change", [{"chunk_size": 30}, {"batch_size": 8}, {"resume": False}], ids=str)
    def test_other_settings_start_afresh(self, saved, folder, tmp_path, monkeypatch, change):
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, folder, out, monkeypatch)
        assert _score(saved, folder, out, **{"chunk_size": 20, **change}).n_resumed == 0
        assert len(_rows(out)) == 149

    def test_another_detector_starts_afresh(self, saved, folder, tmp_path, monkeypatch):
        out = tmp_path / "out.jsonl"
        self._interrupt(saved, folder, out, monkeypatch)
        Detector.load(saved, make_trained()).calibrate(torch.rand(60, 3, 8, 8)).save(tmp_path / "other.nmd")
        assert _score(tmp_path / "other.nmd", folder, out, chunk_size=20).n_resumed == 0

    def test_a_second_run_at_the_same_output_is_refused(self, saved, folder, tmp_path):
        pytest.importorskip("fcntl")
        journal = Journal(tmp_path / "out.jsonl", "x", resume=True)
        with pytest.raises(ArtefactError, match="Expected to be the only run"):
            _score(saved, folder, tmp_path / "out.jsonl")
        journal.close()

    def test_a_folder_that_is_not_there_is_named(self, saved, folder, tmp_path):
        with pytest.raises(ArtefactError, match="No such file or directory"):
            _score(saved, folder, tmp_path / "nowhere" / "out.jsonl")

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
    def test_a_full_disk_is_a_clear_error(self):
        journal = object.__new__(Journal)
        journal.path = Path("/dev/full")
        with (
            Path("/dev/full").open("r+b", buffering=0) as journal._file,
            pytest.raises(ArtefactError, match="the disk is full"),
        ):
            journal._write(b"line")

    def test_the_old_output_stays_until_the_new_one_is_whole(self, saved, folder, tmp_path, monkeypatch):
        out = tmp_path / "out.jsonl"
        out.write_text("old")
        self._interrupt(saved, folder, out, monkeypatch)
        assert out.read_text() == "old"


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
    np.savez(path, images=np.stack([_pixels(i) for i in range(2000, 2050)]))
    return path


class TestReferenceAndFit:
    def test_the_reference_is_that_of_one_pass(self, good):
        ours = distributed.reference(
            make_trained, None, good, preprocessing=SMALL, workers=0, chunk_size=64, batch_size=32
        )
        batches = (batch.images for batch in ImageBatches(good, SMALL, batch_size=32, workers=0))
        theirs = Reference.from_data(make_trained(), None, batches)
        assert ours.count == theirs.count == 149
        torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.std, theirs.std, rtol=1e-12, atol=1e-12)

    def test_unreadable_images_are_told(self, folder):
        notes = []
        made = distributed.reference(
            make_trained(), "bn1", folder, preprocessing=SMALL, workers=0, on_unreadable=notes.append
        )
        assert made.count == 149
        assert [Path(note.path).name for note in notes] == ["0007.png"]

    def test_nothing_readable_is_an_error(self, tmp_path):
        (tmp_path / "a.png").write_bytes(b"x")
        with pytest.raises(InputError, match="Expected `sources` to hold at least one image"):
            distributed.reference(make_trained, None, tmp_path, preprocessing=SMALL, workers=0)
        with pytest.raises(InputError, match="Expected `id_data` to hold at least one image"):
            distributed.fit(
                make_trained, tmp_path, preprocessing=SMALL, workers=0, scorer="average", false_alarm_rate=0.5
            )

    def test_a_spec_brings_its_own_model_and_preprocessing(self, folder):
        pytest.importorskip("timm")
        made = distributed.reference("timm:resnet10t", "bn1", list((folder / "a").glob("000[0-3].png")), workers=0)
        assert made.count == 4

    @pytest.mark.parametrize("scorer", ["average", "logistic"])
    def test_a_fit_equals_that_of_the_detector(self, good, scorer, fresh):
        common = {"preprocessing": SMALL, "workers": 0, "scorer": scorer}
        ours = distributed.fit(make_trained, good[:100], good[100:130], held_out=fresh, **common)
        read = lambda paths: [batch.images for batch in ImageBatches(paths, SMALL, workers=0)]  # noqa: E731
        theirs = Detector(make_trained(), scorer=scorer)
        theirs.fit(read(good[:100]), read(good[100:130]), held_out=read(fresh))
        assert ours.threshold == theirs.threshold
        assert ours.fitted["n_id"] == 100
        x = torch.rand(5, 3, 8, 8)
        assert torch.equal(ours.score(x), theirs.score(x))

    def test_the_default_scorer_needs_no_held_out_images(self, good):
        with pytest.warns(CalibrationWarning, match="pass `held_out` data"):
            detector = distributed.fit(make_trained, good, preprocessing=SMALL, workers=0)
        assert detector.calibration_source == "folds"
        assert detector.fitted["n_id"] == 149

    def test_the_reference_is_from_all_data_and_the_rest_from_a_sample_and_it_says_so(self, good, fresh, tmp_path):
        with pytest.warns(NeuralMeanWarning, match="`id_data` has 149 images; scorer and threshold come from 60"):
            detector = distributed.fit(
                make_convnet, good, held_out=fresh, preprocessing=SMALL, workers=0, max_rows=60, scorer="average"
            )
        assert detector.reference.count == 149
        assert detector.fitted["n_id"] == 60
        detector.save(tmp_path / "x.nmd")
        assert Detector.load(tmp_path / "x.nmd", make_convnet()).threshold == detector.threshold


class TestTeam:
    """The driver's side of Ray, against a stand-in whose workers die on demand."""

    class FakeRay:
        """Answers at once, or raises as a dead worker would."""

        class exceptions:  # noqa: N801
            class RayTaskError(Exception):
                cause = None

            class RayActorError(Exception):
                pass

            class ObjectLostError(Exception):
                pass

            class OutOfMemoryError(Exception):
                pass

        def __init__(self, dies, cpus=2):
            self.dies, self.cpus, self.calls, self.killed = dies, cpus, [], 0

        def remote(self, **options):
            return lambda kind: FakeKind(self)

        def put(self, value):
            return value

        def cluster_resources(self):
            return {"CPU": self.cpus}

        def wait(self, references, num_returns, timeout):
            return [random.choice(references)], []

        def get(self, reference):
            if isinstance(reference, FakeCall) and reference.error is not None:
                raise reference.error
            return reference.value

        def kill(self, actor):
            self.killed += 1

    def _run(self, monkeypatch, dies, n=60, cpus=2):
        random.seed(0)
        ray = self.FakeRay(dies, cpus)
        monkeypatch.setattr("neuralmean.jobs.cluster.engine.import_extra", lambda name: ray)
        chunks = [_FakeChunk(i) for i in range(n)]
        team = _Team(nn.Identity(), Cluster(), 0)
        return ray, [(chunk.number, result) for chunk, result in team.run(None, iter(chunks))]

    def test_results_come_in_order(self, monkeypatch):
        _, results = self._run(monkeypatch, lambda call: False)
        assert results == [(i, f"done {i}") for i in range(60)]

    def test_a_chunk_whose_worker_died_is_done_by_another_and_once(self, monkeypatch):
        ray, results = self._run(monkeypatch, lambda call: random.random() < 0.3)
        assert results == [(i, f"done {i}") for i in range(60)]
        assert ray.killed > 5

    @pytest.mark.parametrize("cause", ["RayActorError", "ObjectLostError", "OutOfMemoryError"])
    def test_of_whatever_it_died(self, monkeypatch, cause):
        ray, results = self._run(monkeypatch, lambda call: call.number is not None and random.random() < 0.3 and cause)
        assert results == [(i, f"done {i}") for i in range(60)]
        assert ray.killed > 5

    def test_after_two_deaths_a_chunk_is_read_with_care(self, monkeypatch):
        deaths = {}

        def dies(call):
            if call.number != 7:
                return False
            deaths.setdefault(call.careful, 0)
            deaths[call.careful] += 1
            return not call.careful

        _, results = self._run(monkeypatch, dies)
        assert len(results) == 60
        assert deaths == {False: 2, True: 1}

    def test_a_chunk_that_kills_every_worker_is_given_up_with_a_clear_error(self, monkeypatch):
        with pytest.raises(NeuralMeanError, match="Expected chunk 3 to be done, but 10 workers died with it"):
            self._run(monkeypatch, lambda call: call.number == 3)

    def test_workers_that_never_start_are_given_up(self, monkeypatch):
        with pytest.raises(NeuralMeanError, match="Expected workers that start"):
            self._run(monkeypatch, lambda call: call.number is None)

    def test_a_cluster_without_room_is_an_error(self, monkeypatch):
        with pytest.raises(InputError, match="Expected a cluster with room for 1 worker"):
            self._run(monkeypatch, lambda call: False, cpus=0)


@pytest.fixture(scope="class")
def ray():
    """Ray on this machine, with three CPUs by name, for all tests of a class."""
    ray = pytest.importorskip("ray", reason="ray is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(
            address="local",
            num_cpus=3,
            object_store_memory=200 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    yield ray
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")
class TestRay:
    """The same numbers from Ray's workers. About 20 s to start; one cluster for all of them."""

    def test_scores_are_the_same_bit_for_bit(self, ray, saved, folder, tmp_path):
        alone, ours = tmp_path / "alone.jsonl", tmp_path / "ours.jsonl"
        _score(saved, folder, alone, chunk_size=16)
        outcome = _score(saved, folder, ours, chunk_size=16, workers=2)
        assert ours.read_bytes() == alone.read_bytes()
        assert (outcome.n_images, outcome.n_unreadable) == (149, 1)

    @pytest.mark.slow
    def test_the_reference_is_the_same(self, ray, folder):
        common = {"preprocessing": SMALL, "chunk_size": 16}
        alone = distributed.reference(make_trained, None, folder, workers=0, **common)
        ours = distributed.reference(make_trained, None, folder, workers=2, **common)
        assert ours.count == alone.count == 149
        assert torch.equal(ours.mean, alone.mean)
        assert torch.equal(ours.std, alone.std)

    @pytest.mark.slow
    def test_a_fit_is_the_same(self, ray, good, fresh):
        common = {"preprocessing": SMALL, "chunk_size": 16, "held_out": fresh, "scorer": "logistic"}
        alone = distributed.fit(make_convnet, good, workers=0, **common)
        ours = distributed.fit(make_convnet, good, workers=2, **common)
        assert ours.threshold == alone.threshold
        x = torch.rand(5, 3, 8, 8)
        assert torch.equal(ours.score(x), alone.score(x))

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["tar", "bytes", "tensor"])
    def test_containers_are_scored(self, ray, saved, containers, kind, tmp_path):
        _score(saved, containers["array"], tmp_path / "alone.jsonl", chunk_size=40)
        _score(saved, containers[kind], tmp_path / "ours.jsonl", chunk_size=40, workers=2)
        ours, alone = ([row["score"] for row in _rows(tmp_path / f"{name}.jsonl")] for name in ("ours", "alone"))
        assert ours == alone

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["images", "parquet", "webdataset", "arrays"])
    def test_datasets_are_scored_in_their_order(self, ray, saved, containers, good, kind, tmp_path):
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        if kind == "images":
            dataset = ray.data.read_images([str(path) for path in good], include_paths=True, override_num_blocks=7)
            source = good
        else:
            dataset = {
                "parquet": lambda: ray.data.read_parquet(str(containers["bytes"]), override_num_blocks=5),
                "webdataset": lambda: ray.data.read_webdataset(str(containers["tar"]), decoder=False),
                "arrays": lambda: ray.data.from_numpy([np.stack([_pixels(i) for i in range(N)])]).repartition(4),
            }[kind]()
            source = containers["array"]
        _score(saved, source, tmp_path / "alone.jsonl", chunk_size=64)
        outcome = _score(saved, dataset, tmp_path / "ours.jsonl", chunk_size=64, workers=2)
        ours, alone = (_rows(tmp_path / f"{name}.jsonl") for name in ("ours", "alone"))
        assert outcome.n_unreadable == 0
        assert [row["score"] for row in ours] == [row["score"] for row in alone]
        assert len({row["path"] for row in ours}) == len(alone)

    @pytest.mark.slow
    def test_a_dataset_needs_a_cpu_of_its_own(self, ray, saved, tmp_path):
        import ray.data

        dataset = ray.data.from_items([{"image": _png(0)}])
        with pytest.raises(InputError, match="and 1 CPU for the dataset, but it has 3 CPU"):
            _score(saved, dataset, tmp_path / "o.csv", workers=3)

    @pytest.mark.slow
    def test_an_error_of_the_model_comes_back_as_it_is(self, ray, folder):
        broken = nn.Sequential(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))  # four channels, the images have three
        with pytest.raises(InputError, match=r"Conv2d|channels"):
            distributed.reference(broken, None, folder, preprocessing=SMALL, workers=1)

    @pytest.mark.slow
    def test_a_killed_worker_costs_nothing_but_time(self, ray, saved, folder, tmp_path, monkeypatch):
        alone, ours = tmp_path / "alone.jsonl", tmp_path / "ours.jsonl"
        _score(saved, folder, alone, chunk_size=4)
        whole, keys = Journal.add, []

        def add(self, key, content):
            whole(self, key, content)
            keys.append(key)
            if len(keys) in (4, 13, 21):
                (tmp_path / f"kill-{len(keys)}").touch()

        monkeypatch.setattr(Journal, "add", add)
        model = make_fragile(tmp_path)
        outcome = distributed.score(saved, folder, out=ours, model=model, chunk_size=4, workers=2)
        assert not list(tmp_path.glob("kill-*"))
        assert outcome.n_images == 149
        assert ours.read_bytes() == alone.read_bytes()


class Fragile(TinyNet):
    """Kills its process, once, where it finds a file that tells it to."""

    def forward(self, x):
        for order in Path(self.orders).glob("kill-*"):
            with contextlib.suppress(FileNotFoundError):
                order.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(x)


def make_fragile(orders):
    model = Fragile()
    model.load_state_dict(make_trained().state_dict())
    model.orders = str(orders)
    return model.eval()


def test_a_cluster_that_cannot_be_reached_is_a_clear_error(saved, folder, tmp_path, monkeypatch):
    class Unreachable:
        def is_initialized(self):
            return False

        def init(self, address, **options):
            raise ConnectionError(f"no answer from {address}")

    monkeypatch.setattr("neuralmean.jobs.cluster.engine.import_extra", lambda name: Unreachable())
    with pytest.raises(
        InputError, match="Expected a Ray cluster at 'far:1', but it cannot be reached: no answer from far:1"
    ):
        _score(saved, folder, tmp_path / "o.csv", workers=1, address="far:1")


class _FakeChunk:
    def __init__(self, number):
        self.number = number


class FakeKind:
    def __init__(self, ray):
        self.ray = ray

    def remote(self, *arguments):
        return FakeActor(self.ray)


class FakeActor:
    def __init__(self, ray):
        self.ready = FakeMethod(ray, None)
        self.run = FakeMethod(ray, "run")


class FakeMethod:
    def __init__(self, ray, name):
        self.ray, self.name = ray, name

    def remote(self, *arguments):
        return FakeCall(self.ray, arguments)


class FakeCall:
    def __init__(self, ray, arguments):
        self.number = arguments[2].number if arguments else None
        self.careful = bool(arguments and arguments[3])
        self.value = f"done {self.number}"
        cause = ray.dies(self)
        self.error = (
            getattr(ray.exceptions, cause if isinstance(cause, str) else "RayActorError")("killed") if cause else None
        )
