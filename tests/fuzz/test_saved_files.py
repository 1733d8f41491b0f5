"""Damaged and hostile saved files: one of our errors, or a detector; never another error, a long wait or a lot of memory."""

from __future__ import annotations

import random

import pytest
import torch

from neuralmean import Detector
from neuralmean.errors import NeuralMeanError
from neuralmean.files.artefact import Artefact
from tests.conftest import make_trained
from tests.fuzz.mutations import mutate, mutate_json
from tests.fuzz.watch import measure, peak, reset_peak

MODEL = make_trained()
X = torch.rand(2, 3, 8, 8)
COUNTS = [pytest.param(150, id="150"), pytest.param(5000, id="5000", marks=pytest.mark.slow)]
MAX_SECONDS = 5.0
SLACK = 16 * 2**20


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A few saved detectors of different kinds, as bytes."""
    folder = tmp_path_factory.mktemp("good")
    images, strange = torch.rand(120, 3, 8, 8), 3 * torch.rand(60, 3, 8, 8)
    held = torch.rand(80, 3, 8, 8)
    kinds = [("average", "mean"), ("logistic", "both"), ("mlp", "variance")]
    paths = []
    for scorer, statistic in kinds:
        path = folder / f"{scorer}.nmd"
        detector = Detector(MODEL, scorer=scorer, statistic=statistic).fit(images, strange, held_out=held)
        detector.save(path, info={"model": "timm:resnet18", "preprocessing": {"size": [8, 8]}})
        paths.append(path)
    return paths


def _load_and_use(path):
    return Detector.load(path, MODEL).predict(X).score


class Watch:
    """Loads files, holds time and memory against the limits, and keeps the worst of both.

    A process that holds torch takes some hundred megabytes, beside which a surprise would not show. So besides the whole
    also what the load adds is bounded: by twice what a good file adds, and a few megabytes for the allocator's pages.
    """

    def __init__(self, good):
        for path in good:
            _load_and_use(path)  # what is loaded once
        peaks = [self._measure(lambda path=path: _load_and_use(path)) for path in good]
        self.good_peak, self.good_growth = (max(values) for values in list(zip(*peaks, strict=True))[1:])
        self.worst_seconds, self.worst_peak, self.worst_growth = 0.0, 0, 0

    def load(self, path):
        """Load a file; returns its scores, or None where it was refused in our own words."""
        outcome = []

        def action():
            try:
                outcome.append(_load_and_use(path))
            except NeuralMeanError:
                outcome.append(None)

        seconds, memory, growth = self._measure(action)
        self.worst_seconds, self.worst_peak = max(self.worst_seconds, seconds), max(self.worst_peak, memory)
        self.worst_growth = max(self.worst_growth, growth)
        assert seconds < MAX_SECONDS
        assert memory <= 2 * self.good_peak
        assert growth <= 2 * self.good_growth + SLACK
        return outcome[0]

    @staticmethod
    def _measure(action):
        before = peak() if reset_peak() else 0
        seconds, memory = measure(action)
        return seconds, memory or 0, max(0, (memory or 0) - before)

    def report(self, record, name):
        """Put the figures where `pytest --junit-xml` shows them."""
        record(f"{name}: slowest seconds", round(self.worst_seconds, 4))
        record(f"{name}: peak memory over that of a good file", round(self.worst_peak / max(1, self.good_peak), 4))
        added = [round(size / 2**20, 2) for size in (self.worst_growth, self.good_growth)]
        record(f"{name}: megabytes added, by the worst and by a good file", added)


@pytest.mark.parametrize("count", COUNTS)
def test_damaged_bytes_are_noticed(good, tmp_path, count, record_testsuite_property):
    contents = [path.read_bytes() for path in good]
    expected = [_load_and_use(path) for path in good]
    watch, refused = Watch(good), 0
    for seed in range(count):
        rng = random.Random(seed)
        which = rng.randrange(len(contents))
        path = tmp_path / "x.nmd"
        path.write_bytes(mutate(contents[which], rng))
        scores = watch.load(path)
        refused += scores is None
        # What is not refused must be what was saved: blanks in the header may differ, numbers may not.
        assert scores is None or torch.equal(scores, expected[which])
    assert refused > 0.9 * count
    watch.report(record_testsuite_property, "damaged bytes")


@pytest.mark.parametrize("count", COUNTS)
def test_a_file_with_a_right_digest_and_hostile_content_does_no_harm(
    good, tmp_path, count, record_testsuite_property, monkeypatch
):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # a busy disk would take minutes for so many files
    originals = [Artefact.read(path) for path in good]
    watch = Watch(good)
    for seed in range(count):
        rng = random.Random(seed)
        original = rng.choice(originals)
        header = {key: value for key, value in original.header.items() if key not in ("digest", "format_version")}
        tensors = dict(original.tensors)
        if rng.random() < 0.6:
            changed = mutate_json(header, rng)
            header = changed if isinstance(changed, dict) else header
        else:
            name = rng.choice(sorted(tensors))
            tensors[name] = _hostile_tensor(tensors[name], rng)
        Artefact(header, tensors).write(tmp_path / "x.nmd")
        watch.load(tmp_path / "x.nmd")
    watch.report(record_testsuite_property, "hostile content")


def _hostile_tensor(tensor, rng):
    kinds = [
        lambda: tensor.reshape(-1)[:0],
        lambda: tensor[:-1] if tensor.dim() else tensor.new_zeros(3),
        lambda: tensor.reshape(1, *tensor.shape),
        lambda: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor.clone().fill_(-1),
        lambda: torch.full_like(tensor, 1e30) if tensor.is_floating_point() else tensor.clone().fill_(2**30),
        lambda: tensor.to(torch.int64),
        lambda: tensor.to(torch.float16),
        lambda: tensor.to(torch.bool),
        lambda: torch.zeros(2000, 50),
        lambda: -tensor if tensor.dtype != torch.bool else ~tensor,
    ]
    return rng.choice(kinds)()


def test_a_spec_in_a_file_runs_no_code(good, tmp_path):
    from neuralmean.models.spec import resolve

    artefact = Artefact.read(good[0])
    header = {key: value for key, value in artefact.header.items() if key not in ("digest", "format_version")}
    header["info"] = {"model": "os:getcwd"}
    Artefact(header, artefact.tensors).write(tmp_path / "x.nmd")
    with pytest.raises(NeuralMeanError, match="Expected the file to name a model"):
        resolve(Artefact.read(tmp_path / "x.nmd").header["info"]["model"], trusted=False)
