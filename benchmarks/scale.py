"""`python -m benchmarks.scale`: how cost grows, two Ray nodes on one machine, and workers that are killed on the way.

    python -m benchmarks.scale cost                       seconds for images, channels, moments; one process
    python -m benchmarks.scale cluster --images 20000     one process, one worker, two nodes: same numbers? how much faster?
    python -m benchmarks.scale kills --images 100000 --every 20     a worker killed every 20 s; each image exactly once?
                                                          and are the first `--compare` scores those of one process?

Every part prints one JSON object. Images are noise, the model is the benchmark's (`--model`), one thread a worker. The
speed-up is that of the steady state: after a fifth of the chunks, when every worker is up and warm, to the last one.
Whole times, which include starting torch in each worker, are printed beside it, and so is who used the processors.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import subjects
from neuralmean import Detector, Moments, Reference
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.jobs import cluster as distributed

HOW = Preprocessing((32, 32), (0.5,) * 3, (0.25,) * 3)
WARM = 0.2  # share of the chunks that are not timed


def main() -> int:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("cost", "cluster", "kills"))
    parser.add_argument("--images", type=int, default=4096)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two kills")
    parser.add_argument("--compare", type=int, default=10_000, help="images of `kills` to score undisturbed too")
    options = parser.parse_args()
    if options.images < 8 * options.chunk:
        parser.error(f"--images must be at least 8 chunks ({8 * options.chunk}): the first fifth is not timed")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nodes are ended on the way out
    with tempfile.TemporaryDirectory() as folder:
        part = {"cost": _cost, "cluster": _cluster, "kills": _kills}[options.part]
        print(json.dumps(part(options, Path(folder)), indent=1))
    return 0


def _prepare(options: argparse.Namespace, folder: Path) -> tuple[Path, Path]:
    """Write the images and a calibrated detector; return their paths."""
    images = np.lib.format.open_memmap(
        folder / "images.npy", mode="w+", dtype=np.uint8, shape=(options.images, 32, 32, 3)
    )
    rng = np.random.default_rng(0)
    for begin in range(0, options.images, 10_000):
        images[begin : begin + 10_000] = rng.integers(0, 256, images[begin : begin + 10_000].shape, dtype=np.uint8)
    images.flush()
    detector = Detector(subjects.build(options.model), scorer="average")
    detector.calibrate(HOW.apply_array(rng.integers(0, 256, (128, 32, 32, 3), dtype=np.uint8)))
    detector.save(folder / "x.nmd", info={"preprocessing": HOW.to_json()})
    return folder / "images.npy", folder / "x.nmd"


def _score(artefact: Path, images: Path, out: Path, options: argparse.Namespace, **where: Any) -> float:
    begin = time.perf_counter()
    distributed.score(artefact, images, out=out, model=subjects.build(options.model), chunk_size=options.chunk, **where)
    return time.perf_counter() - begin


def _cost(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds in one process, one thread: by number of images, and of merging moments by channels and shards."""
    images, artefact = _prepare(options, folder)
    rows: list[dict[str, Any]] = []
    for share in (4, 2, 1):
        n = options.images // share
        part = folder / f"part{share}.npy"
        np.save(part, np.load(images, mmap_mode="r")[:n])
        seconds = _score(artefact, part, folder / "out.jsonl", options, workers=0)
        rows.append({"images": n, "seconds": seconds, "images_per_second": n / seconds})
    merges = []
    for channels in (1_000, 10_000, 100_000):
        parts = [Moments.of(torch.randn(4, channels)) for _ in range(100)]
        begin = time.perf_counter()
        sum(parts)
        merges.append({"channels": channels, "microseconds_per_merge": (time.perf_counter() - begin) * 1e4})
    channels = len(Detector.load(artefact, subjects.build(options.model)).channels)
    return {"model": options.model, "channels": channels, "scoring": rows, "merging": merges}


@contextmanager
def _nodes(count: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """So many Ray nodes of one CPU each on this machine, by `ray start`; yields the address and the nodes."""
    port = random.Random(os.getpid()).randrange(20_000, 30_000)
    ray = str(Path(sys.executable).parent / "ray")
    common = [
        "--num-cpus=1",
        "--object-store-memory=200000000",
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--block",
    ]
    head = [ray, "start", "--head", f"--port={port}", "--include-dashboard=false", *common]
    address = f"127.0.0.1:{port}"
    # Ray asks for a token; this cluster, and this process, get one of their own. Ray reads it when it is imported.
    before = dict(os.environ)
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            agent = f"--dashboard-agent-listen-port={port + 100 + index}"
            command = head if index == 0 else [ray, "start", f"--address={address}", *common]
            nodes.append(subprocess.Popen([*command, agent], start_new_session=True, **quiet))
            _wait_for_nodes(ray, address, index + 1)
        yield address, nodes
    finally:
        for node in reversed(nodes):
            end_node(node)
        os.environ.clear()
        os.environ.update(before)


def _wait_for_nodes(ray: str, address: str, count: int) -> None:
    code = (
        f"import ray; ray.init(address={address!r}, log_to_driver=False, logging_level='ERROR'); "
        f"import sys; sys.exit(sum(n['Alive'] for n in ray.nodes()) < {count})"
    )
    for _ in range(10):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(3)
    raise SystemExit(f"the Ray node did not come up: {done.stderr.decode()[-500:]}")


def end_node(node: subprocess.Popen[bytes], how: int = signal.SIGTERM) -> None:
    """End a node and all processes below it, and nothing else."""
    below = descendants(node.pid)
    with suppress(ProcessLookupError):
        node.send_signal(how)
    with suppress(subprocess.TimeoutExpired):
        node.wait(timeout=20)
    for pid in [node.pid, *below]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    node.wait()


def descendants(pid: int) -> list[int]:
    """Every process below a process (Linux)."""
    children = collections.defaultdict(list)
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(int(status.parent.name))
    found, todo = [], [pid]
    while todo:
        below = children[todo.pop()]
        found += below
        todo += below
    return found


def workers_below(pid: int) -> list[int]:
    """Ray's processes below a process that hold one of our workers."""
    found = []
    for child in descendants(pid):
        with suppress(OSError):
            if Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"ray::Worker"):
                found.append(child)
    return found


def _cluster(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One process against one worker and two nodes: the same numbers, and the time."""
    images, artefact = _prepare(options, folder)
    model = subjects.build(options.model)
    alone = Reference.from_data(
        model, None, (HOW.apply_array(part) for part in _batches(images, options.chunk)), all_ranks=False
    )
    runs = {"alone": _stream(artefact, images, options, [], workers=0)}
    with _nodes(2) as (address, nodes):
        import ray

        ray.init(address=address, log_to_driver=False)
        pids = [node.pid for node in nodes]
        try:
            for name, workers in (("one", 1), ("two", 2), ("one", 1), ("two", 2)):
                run = _stream(artefact, images, options, pids, workers=workers)
                if name not in runs or run.rate > runs[name].rate:
                    runs[name] = run
            ours = distributed.reference(model, None, images, preprocessing=HOW, workers=2, chunk_size=options.chunk)
        finally:
            ray.shutdown()
    difference = max((ours.mean - alone.mean).abs().max().item(), _gap(ours.std, alone.std))
    return {
        "images": options.images,
        "model": options.model,
        "steady_images_per_second": {name: run.rate for name, run in runs.items()},
        "two_workers_over_one": runs["two"].rate / runs["one"].rate,
        "whole_seconds": {name: run.seconds for name, run in runs.items()},
        "processors_used_with_two": runs["two"].processors,
        "scores_bit_equal": runs["alone"].rows == runs["one"].rows == runs["two"].rows,
        "reference_largest_difference": difference,
    }


@dataclass(frozen=True)
class _Run:
    """One pass over all images.

    Attributes:
        rows: What was said of each image.
        rate: Images a second in the steady state.
        seconds: All of it, from the call to the last row.
        processors: How many processors' worth of time the workers, the driver and Ray's own processes used meanwhile.
    """

    rows: list[Any]
    rate: float
    seconds: float
    processors: dict[str, float]


def _stream(artefact: Path, images: Path, options: argparse.Namespace, nodes: list[int], *, workers: int) -> _Run:
    rows: list[Any] = []
    marks: list[tuple[float, int, dict[int, float]]] = []  # when, how many images, processor time of each process
    begin = time.perf_counter()
    made = distributed.stream(
        artefact, images, model=subjects.build(options.model), chunk_size=options.chunk, workers=workers
    )
    for chunk in made:
        rows += chunk.rows()
        # Looked at twice, the last time before the loop ends: then the workers are gone.
        if len(rows) >= (options.images if marks else WARM * options.images):
            ours = [os.getpid(), *nodes, *(pid for node in nodes for pid in descendants(node))]
            marks.append((time.perf_counter(), len(rows), {pid: _time_of(pid) for pid in ours}))
            holding = {pid for node in nodes for pid in workers_below(node)}
    (start, before, early), (end, after, late) = marks
    used = dict.fromkeys(("workers", "driver", "ray"), 0.0)
    for pid, seconds in late.items():
        name = "driver" if pid == os.getpid() else "workers" if pid in holding else "ray"
        used[name] += (seconds - early.get(pid, 0.0)) / (end - start)
    return _Run(rows, (after - before) / (end - start), end - begin, used)


def _time_of(pid: int) -> float:
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _gap(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    return float("nan") if one is None or other is None else (one - other).abs().max().item()


def _batches(images: Path, chunk: int) -> Iterator[np.ndarray[Any, Any]]:
    """The batches of 64 that the chunks are cut into."""
    array = np.load(images, mmap_mode="r")
    for begin in range(0, len(array), chunk):
        for first in range(begin, min(begin + chunk, len(array)), 64):
            yield np.array(array[first : min(first + 64, begin + chunk)])


def _kills(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Score while a worker is killed again and again; count how often each image is in the output."""
    images, artefact = _prepare(options, folder)
    out, kills, done = folder / "out.jsonl", [], threading.Event()

    def assassin() -> None:
        rng = random.Random(0)
        while not done.wait(options.every):
            victims = workers_below(os.getpid())
            if victims:
                kills.append(rng.choice(victims))
                with suppress(ProcessLookupError):
                    os.kill(kills[-1], signal.SIGKILL)

    thread = threading.Thread(target=assassin)
    thread.start()
    try:
        seconds = _score(artefact, images, out, options, workers=2)
    finally:
        done.set()
        thread.join()
    with out.open() as file:
        names = collections.Counter(json.loads(line)["path"] for line in file)
    expected = {f"{images}#{row}" for row in range(options.images)}
    compared = min(
        options.images, options.compare // options.chunk * options.chunk
    )  # whole chunks: same forward passes
    np.save(folder / "part.npy", np.load(images, mmap_mode="r")[:compared])
    _score(artefact, folder / "part.npy", folder / "alone.jsonl", options, workers=0)
    return {
        "images": options.images,
        "model": options.model,
        "seconds": seconds,
        "kills": len(kills),
        "every_image_exactly_once": set(names) == expected and set(names.values()) == {1},
        f"first_{compared}_scores_as_undisturbed": _scores(out, compared) == _scores(folder / "alone.jsonl", compared),
    }


def _scores(path: Path, count: int) -> list[Any]:
    with path.open() as file:
        return [list(json.loads(line).values())[1:] for line in islice(file, count)]


if __name__ == "__main__":
    sys.exit(main())
