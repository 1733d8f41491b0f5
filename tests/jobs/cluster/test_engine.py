"""The driver of Ray's workers, with a fake Ray whose workers die on demand."""

from __future__ import annotations

import random

import pytest
from torch import nn

from neuralmean.errors import (
    InputError,
    NeuralMeanError,
)
from neuralmean.jobs.cluster.engine import Cluster, _Team
from tests.jobs.cluster.conftest import score


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
        chunks = [FakeChunk(i) for i in range(n)]
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
        score(saved, folder, tmp_path / "o.csv", workers=1, address="far:1")


class FakeChunk:
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
