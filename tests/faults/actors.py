"""What the processes do that the tests kill. Imported by a server process once, so that a victim starts in no time."""

from __future__ import annotations

from pathlib import Path

import torch

from neuralmean import Detector, Reference, distributed
from neuralmean.preprocessing import Preprocessing
from tests.conftest import make_trained

HOW = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)


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


def is_loadable(path: Path) -> bool:
    """Whether the file is a whole detector; any error comes through."""
    return Detector.load(path, make_trained()).threshold is not None
