"""Scoring into files, in this process."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch

from neuralmean import Detector
from neuralmean.data.images import ImageBatches
from neuralmean.errors import (
    InputError,
    MissingExtraError,
)
from neuralmean.jobs import cluster as distributed
from neuralmean.jobs.cluster import extras
from tests.conftest import make_trained
from tests.jobs.cluster.conftest import SMALL, rows_of, score


class TestScore:
    def test_scores_are_those_of_the_detector_bit_for_bit(self, saved, good, tmp_path):
        outcome = score(saved, good, tmp_path / "out.jsonl")
        assert (outcome.n_images, outcome.n_unreadable, outcome.n_resumed) == (149, 0, 0)
        detector = Detector.load(saved, make_trained())
        decision = detector.predict(batch.images for batch in ImageBatches(good, SMALL, workers=0))
        rows = rows_of(tmp_path / "out.jsonl")
        assert [row["path"] for row in rows] == list(map(str, good))
        assert [row["score"] for row in rows] == decision.score.tolist()
        assert [row["p_value"] for row in rows] == decision.p_value.tolist()
        assert [row["is_ood"] for row in rows] == decision.is_ood.tolist()
        assert outcome.n_ood == int(decision.is_ood.sum())

    def test_every_format_has_the_same_rows(self, saved, folder, tmp_path):
        pq = pytest.importorskip("pyarrow.parquet")
        for suffix in ("jsonl", "csv", "parquet"):
            outcome = score(saved, folder, tmp_path / f"out.{suffix}")
            assert [Path(note.path).name for note in outcome.unreadable] == ["0007.png"]
        rows = rows_of(tmp_path / "out.jsonl")
        assert pq.read_table(tmp_path / "out.parquet").to_pylist() == rows
        with (tmp_path / "out.csv").open(newline="") as file:
            read = list(csv.DictReader(file))
        assert [(r["path"], float(r["score"]), r["is_ood"]) for r in read] == [
            (r["path"], r["score"], str(r["is_ood"]).lower()) for r in rows
        ]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv", "out.jsonl", "out.parquet"]

    def test_a_format_can_be_asked_for_whatever_the_ending(self, saved, good, tmp_path):
        score(saved, good, tmp_path / "out.jsonl")
        score(saved, good, tmp_path / "out.scores", format="json")
        assert (tmp_path / "out.scores").read_bytes() == (tmp_path / "out.jsonl").read_bytes()
        score(saved, good, tmp_path / "out.txt")
        assert (tmp_path / "out.txt").read_text().split()[:5] == ["verdict", "kind", "p-value", "score", "path"]
        with pytest.raises(InputError, match="Expected the format to be one of"):
            score(saved, good, tmp_path / "out.jsonl", format="xml")

    def test_what_cannot_be_read_is_told_as_it_is_met(self, saved, folder, tmp_path):
        notes = []
        score(saved, folder, tmp_path / "out.jsonl", on_unreadable=notes.append)
        list(distributed.stream(saved, folder, model=make_trained, workers=0, on_unreadable=notes.append))
        assert [Path(note.path).name for note in notes] == ["0007.png"] * 2

    def test_streaming_gives_the_same_chunks_without_a_file(self, saved, folder, tmp_path):
        score(saved, folder, tmp_path / "out.jsonl", chunk_size=40)
        chunks = list(distributed.stream(saved, folder, model=make_trained, workers=0, chunk_size=40))
        assert [len(chunk) for chunk in chunks] == [40, 40, 40, 30]
        assert [s for chunk in chunks for s in chunk.score] == [row["score"] for row in rows_of(tmp_path / "out.jsonl")]

    def test_an_unknown_format_is_refused_before_any_work(self, saved, folder):
        with pytest.raises(InputError, match=r"Expected `out` to end in one of"):
            score(saved, folder, "out.xlsx")

    def test_a_file_that_does_not_name_its_model_wants_one(self, saved, folder, tmp_path):
        with pytest.raises(InputError, match="Pass `model`"):
            distributed.score(saved, folder, out=tmp_path / "o.csv", workers=0)

    def test_preprocessing_must_come_from_somewhere(self, folder, tmp_path):
        Detector(make_trained(), scorer="average").calibrate(torch.rand(50, 3, 8, 8)).save(tmp_path / "x.nmd")
        with pytest.raises(InputError, match="Pass `preprocessing`"):
            score(tmp_path / "x.nmd", folder, tmp_path / "o.csv")

    def test_a_model_must_be_one(self, saved, folder, tmp_path):
        with pytest.raises(InputError, match=r"Expected `model` to give a torch\.nn\.Module, but got int"):
            distributed.score(saved, folder, out=tmp_path / "o.csv", model=lambda: 5, workers=0)

    @pytest.mark.parametrize(
        ("option", "value"),
        [("workers", -1), ("threads", 0), ("gpus", -0.5), ("workers", 1.5), ("batch_size", 0), ("batch_size", 2.5)],
    )
    def test_settings_out_of_range_are_refused(self, saved, folder, tmp_path, option, value):
        with pytest.raises(InputError, match=f"Expected `{option}` to be"):
            score(saved, folder, tmp_path / "o.csv", **{option: value})

    def test_without_ray_the_message_says_what_to_install(self, saved, folder, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[ray\]"):
            score(saved, folder, tmp_path / "o.csv", workers=1)

    def test_a_missing_package_is_named(self):
        with pytest.raises(MissingExtraError, match="Expected 'no_such_package' to be installed"):
            extras.import_extra("no_such_package.part")
