"""The same numbers from Ray's workers as from this process."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from neuralmean.errors import (
    InputError,
)
from neuralmean.jobs import Journal
from neuralmean.jobs import cluster as distributed
from tests.conftest import TinyNet, make_trained
from tests.jobs.cluster.conftest import SMALL, N, make_convnet, pixels, png, rows_of, score


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
        score(saved, folder, alone, chunk_size=16)
        outcome = score(saved, folder, ours, chunk_size=16, workers=2)
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
        score(saved, containers["array"], tmp_path / "alone.jsonl", chunk_size=40)
        score(saved, containers[kind], tmp_path / "ours.jsonl", chunk_size=40, workers=2)
        ours, alone = ([row["score"] for row in rows_of(tmp_path / f"{name}.jsonl")] for name in ("ours", "alone"))
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
                "arrays": lambda: ray.data.from_numpy([np.stack([pixels(i) for i in range(N)])]).repartition(4),
            }[kind]()
            source = containers["array"]
        score(saved, source, tmp_path / "alone.jsonl", chunk_size=64)
        outcome = score(saved, dataset, tmp_path / "ours.jsonl", chunk_size=64, workers=2)
        ours, alone = (rows_of(tmp_path / f"{name}.jsonl") for name in ("ours", "alone"))
        assert outcome.n_unreadable == 0
        assert [row["score"] for row in ours] == [row["score"] for row in alone]
        assert len({row["path"] for row in ours}) == len(alone)

    @pytest.mark.slow
    def test_a_dataset_needs_a_cpu_of_its_own(self, ray, saved, tmp_path):
        import ray.data

        dataset = ray.data.from_items([{"image": png(0)}])
        with pytest.raises(InputError, match="and 1 CPU for the dataset, but it has 3 CPU"):
            score(saved, dataset, tmp_path / "o.csv", workers=3)

    @pytest.mark.slow
    def test_an_error_of_the_model_comes_back_as_it_is(self, ray, folder):
        broken = nn.Sequential(nn.Conv2d(4, 2, 1), nn.BatchNorm2d(2))  # four channels, the images have three
        with pytest.raises(InputError, match=r"Conv2d|channels"):
            distributed.reference(broken, None, folder, preprocessing=SMALL, workers=1)

    @pytest.mark.slow
    def test_a_killed_worker_costs_nothing_but_time(self, ray, saved, folder, tmp_path, monkeypatch):
        alone, ours = tmp_path / "alone.jsonl", tmp_path / "ours.jsonl"
        score(saved, folder, alone, chunk_size=4)
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
