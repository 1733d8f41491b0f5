"""`Reference.from_data` inside a torch.distributed job: two ranks, gloo, no network but this machine's own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from neuralmean import Reference
from tests.conftest import make_trained

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="this torch has no gloo"
)

CASES = ("halves", "one_rank_has_nothing", "stream", "alone", "broken", "nothing", "layers", "halves_again")


def _images():
    return 3 + torch.rand(60, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def _part(case, rank):
    """What each rank passes as its data."""
    images = _images()
    if case.startswith("halves"):
        return images[:32] if rank == 0 else images[32:]
    if case == "stream":
        return iter(images.split(16)) if rank == 0 else iter(())
    if case == "broken":
        return images if rank == 0 else torch.zeros(4, 99, 8, 8)
    return images[:0] if rank == 0 or case == "nothing" else images


def _outcome(case, rank):
    layers = ["bn1"] if case == "layers" and rank else None
    try:
        made = Reference.from_data(make_trained(), layers, _part(case, rank), batch_size=16, all_ranks=case != "alone")
    except ValueError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"mean": made.mean, "std": made.std, "m2": made.moments.m2, "count": made.count}


def _rank(rank, port, folder):
    """One rank: goes through all cases with the other one, and writes what it got to a file."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    torch.save({case: _outcome(case, rank) for case in CASES}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.start_processes(_rank, args=(port, str(folder)), nprocs=2, start_method="spawn")
    first, second = (torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2))
    return {case: (first[case], second[case]) for case in CASES}


@pytest.mark.parametrize("case", ["halves", "one_rank_has_nothing", "stream", "halves_again"])
def test_every_rank_gets_the_reference_of_all_data(outcomes, case):
    first, second = outcomes[case]
    alone = Reference.from_data(make_trained(), None, _images(), batch_size=16)
    assert first["count"] == second["count"] == 60
    for name, expected in (("mean", alone.mean), ("std", alone.std), ("m2", alone.moments.m2)):
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], expected, rtol=1e-12, atol=1e-12)


def test_a_rank_may_keep_its_reference_to_itself(outcomes):
    first, second = outcomes["alone"]
    assert "Expected `data` to hold at least one example" in first["error"]
    assert second["count"] == 60


def test_a_rank_that_fails_makes_the_others_fail_and_not_wait(outcomes):
    first, second = outcomes["broken"]
    assert "Expected every rank to make its reference, but rank(s) [1] failed." in first["error"]
    assert second["error"].startswith("ModelInputError")


def test_no_data_on_any_rank_is_an_error(outcomes):
    for outcome in outcomes["nothing"]:
        assert "Expected `data` to hold at least one example on some rank" in outcome["error"]


def test_other_layers_on_another_rank_are_an_error(outcomes):
    for outcome in outcomes["layers"]:
        assert "Expected the same layers on every rank, but they have [10, 4] channels." in outcome["error"]
