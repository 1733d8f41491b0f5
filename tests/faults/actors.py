"""What the processes do that the tests kill. Imported by a server process once, so that a victim starts in no time."""

from __future__ import annotations

from pathlib import Path

import torch

from neuralmean import Detector, Monitor, Reference
from neuralmean.bench import experiments
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.jobs import cluster as distributed
from tests.conftest import make_trained

HOW = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)
STREAM_BATCH = 7


def fit_and_save(path: str, seed: int) -> None:
    """Fit on data that the seed decides, and save."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(seed)
    images, held = (torch.rand(n, 3, 8, 8, generator=generator) for n in (200, 60))
    model = make_trained()
    detector = Detector(model, scorer="logistic", reference=Reference.from_data(model, None, images))
    detector.fit(images, 2 * images[:40], held_out=held).save(path)


def save_again_and_again(path: str, content: str) -> None:
    """Save one detector over and over: the time is spent in writing, where a kill does the most harm."""
    torch.set_num_threads(1)
    detector = Detector.load(content, make_trained())
    while True:
        detector.save(path, info={"padding": "x" * 2_000_000})


def score(artefact: str, folder: str, out: str) -> None:
    """Score a folder of images, in this process, in chunks."""
    torch.set_num_threads(1)
    distributed.score(artefact, folder, out=out, model=make_trained, preprocessing=HOW, workers=0, chunk_size=8)


def run_benchmark(root: str, out: str) -> None:
    """Run an experiment on toy data: features, fits, scores, rows."""
    torch.set_num_threads(1)
    where = {"data": Path(root) / "data", "weights": Path(root) / "weights", "cache": f"{out}-cache"}
    experiments.run(["transfer", "batch-size"], out=out, limit=50, methods=["msp", "energy", "ours-lr"], **where)


def watch(artefact: str, state: str) -> None:
    """Feed a stream to a monitor from where its state says it is, and save the state after every batch."""
    torch.set_num_threads(1)
    detector = Detector.load(artefact, make_trained())
    monitor = Monitor.load(state, detector) if Path(state).exists() else Monitor(detector, window=64)
    for batch in stream()[monitor.status().n_seen // STREAM_BATCH :]:
        monitor.update(detector.predict(batch), vectors=detector.discrepancy(batch))
        monitor.save(state)


def stream() -> list[torch.Tensor]:
    """Batches of a stream that turns halfway."""
    images = torch.rand(60 * STREAM_BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(7))
    images[len(images) // 2 :] *= 1.2
    return list(images.split(STREAM_BATCH))


def is_loadable(path: Path) -> bool:
    """Whether the file is a whole detector; any error comes through."""
    return Detector.load(path, make_trained()).threshold is not None
