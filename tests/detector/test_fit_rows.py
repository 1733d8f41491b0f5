"""What a fit holds: nothing but scores, or each number once, or next to nothing."""

from __future__ import annotations

import gc
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from neuralmean import Detector
from neuralmean.data import table
from neuralmean.errors import CalibrationWarning
from neuralmean.scorers import Observation, TypicalityScorer, mlp
from neuralmean.stats import held_out_profile as profile

COUNT, WIDTH = 1600, 1000
WHOLE = 4 * COUNT * WIDTH  # bytes of the rows of one set


class Wide(nn.Module):
    """Many channels at little cost."""

    def __init__(self, *, norms=1, classes=4):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTH, 1)
        self.norms = nn.Sequential(*(nn.Sequential(nn.BatchNorm2d(WIDTH), nn.ReLU()) for _ in range(norms)))
        self.fc = nn.Linear(WIDTH, classes)

    def forward(self, x):
        return self.fc(self.norms(self.conv(x)).relu().mean((2, 3)))


def make_wide(**options):
    torch.manual_seed(0)
    model = Wide(**options).train()
    with torch.no_grad():
        for _ in range(30):
            model(torch.rand(32, 3, 2, 2))
    return model.eval()


@pytest.fixture
def wide():
    return make_wide()


def pictures(n, seed):
    return torch.rand(n, 3, 2, 2, generator=torch.Generator().manual_seed(seed))


class LargestAllocation(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation made; a view is none, a mapped file neither."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        known = {
            leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        }
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, leaf.untyped_storage().nbytes())
        return made


def largest_of_fit(detector, *data, **options):
    with LargestAllocation() as spy, warnings.catch_warnings():
        warnings.simplefilter("ignore", CalibrationWarning)
        detector.fit(*data, batch_size=32, **options)
    return spy.bytes


@pytest.fixture
def on_disk(monkeypatch):
    """Call it, and from then on rows are on disk."""
    monkeypatch.setattr(mlp, "MAX_EPOCHS", 1)

    def spill():
        monkeypatch.setattr(table, "IN_MEMORY", 100_000)
        monkeypatch.setattr(table, "BLOCK", 400_000)

    return spill


@pytest.fixture
def short_sample(monkeypatch):
    monkeypatch.setattr(profile, "_SAMPLE", 16)  # of held-out rows: as many however many there are


@pytest.mark.usefixtures("short_sample")
class TestMemory:
    @pytest.mark.parametrize("held_out", [None, pictures(COUNT, 7)], ids=["alone", "held out"])
    def test_the_average_holds_a_batch_at_a_time(self, wide, held_out):
        average = Detector(wide, scorer="average")
        assert largest_of_fit(average, pictures(COUNT, 1), held_out=held_out) < WHOLE / 10
        assert average.fitted["n_id"] == COUNT

    @pytest.mark.parametrize("scorer", ["logistic", "mlp", "typicality"])
    @pytest.mark.parametrize("held_out", [None, pictures(COUNT, 7)], ids=["alone", "held out"])
    def test_rows_on_disk_are_never_whole_in_memory(self, wide, on_disk, scorer, held_out):
        in_memory = largest_of_fit(Detector(wide, scorer=scorer), pictures(COUNT, 1), held_out=held_out)
        on_disk()
        spilled = largest_of_fit(Detector(wide, scorer=scorer), pictures(COUNT, 1), held_out=held_out)
        assert in_memory >= WHOLE  # so the spy sees it
        assert spilled < WHOLE / 2  # what is left does not grow with the rows, or by a few numbers each

    def test_typicality_makes_no_copy_of_the_rows(self, wide, monkeypatch):
        monkeypatch.setattr(table, "BLOCK", 400_000)
        rows = Detector(wide).discrepancy(pictures(COUNT, 1))
        with LargestAllocation() as spy:
            TypicalityScorer().fit(Observation(rows))
        assert spy.bytes < WHOLE / 2


class TestSameResult:
    @pytest.mark.parametrize("statistic", ["mean", "variance", "both"])
    @pytest.mark.parametrize("scorer", ["average", "logistic", "mlp", "typicality"])
    def test_on_disk_as_in_memory(self, wide, on_disk, scorer, statistic):
        data, fresh, held_out = pictures(600, 1), pictures(50, 2), pictures(100, 3)
        made = [Detector(wide, scorer=scorer, statistic=statistic).fit(data, held_out=held_out)]
        on_disk()
        made.append(Detector(wide, scorer=scorer, statistic=statistic).fit(data, held_out=held_out))
        one, two = (detector.score(fresh) for detector in made)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5 * float(one.std()))
        assert made[0].threshold == pytest.approx(made[1].threshold, abs=1e-5 * float(one.std()))

    @pytest.mark.parametrize(("n", "source"), [(400, "folds"), (1000, "kept_aside")])
    @pytest.mark.parametrize("early_exit", [False, True])
    def test_where_a_part_is_kept_aside(self, on_disk, n, source, early_exit):
        model = make_wide(norms=2)
        made = []
        for _ in range(2):
            made.append(Detector(model, scorer="logistic"))
            with pytest.warns(CalibrationWarning):
                made[-1].fit(pictures(n, 1), 1.05 * pictures(300, 2), early_exit=early_exit)
            on_disk()
        assert made[1].calibration_source == source
        one, two = (detector.score(pictures(50, 3)) for detector in made)
        near = 3e-4 * float(one.std())  # solved to 1e-4: each fold may stop a little elsewhere
        torch.testing.assert_close(one, two, rtol=0, atol=near)
        assert made[0].threshold == pytest.approx(made[1].threshold, abs=near)

    @pytest.mark.parametrize("statistic", ["mean", "variance", "both"])
    def test_a_reference_made_of_the_data(self, on_disk, statistic):
        model, data = Wide(norms=0).eval(), pictures(300, 1)
        made = [Detector(model, statistic=statistic, scorer="average").fit(data, held_out=pictures(100, 2))]
        on_disk()
        made.append(Detector(model, statistic=statistic, scorer="average").fit(data, held_out=pictures(100, 2)))
        assert torch.equal(made[0].reference.mean, made[1].reference.mean)
        torch.testing.assert_close(made[0].score(data), made[1].score(data))

    def test_a_model_without_classes(self, on_disk):
        model, data = make_wide(classes=1), pictures(600, 1)
        made = [Detector(model).fit(data, held_out=pictures(100, 2))]
        on_disk()
        made.append(Detector(model).fit(data, held_out=pictures(100, 2)))
        assert len(made[0].scorer.clusters_) > 2
        torch.testing.assert_close(made[0].score(data), made[1].score(data), rtol=1e-5, atol=1e-4)

    def test_data_without_a_length(self, wide):
        data, held_out = pictures(300, 1), pictures(100, 2)
        known = Detector(wide).fit(data.split(7), held_out=held_out)
        unknown = Detector(wide).fit(iter(data.split(7)), held_out=held_out)
        assert torch.equal(known.score(data), unknown.score(data))


class Curious:
    """A scorer of one's own that remembers what it was fitted on."""

    def fit(self, inliers):
        self.seen = type(inliers), inliers.shape
        self.scale = inliers.std(0)

    def score(self, vectors):
        return (vectors / self.scale).abs().amax(1)


def test_a_scorer_of_ones_own_still_gets_a_tensor(wide, on_disk):
    on_disk()
    scorer = Curious()
    with pytest.warns(CalibrationWarning):
        detector = Detector(wide, scorer=scorer).fit(pictures(1200, 1))
    assert detector.calibration_source == "kept_aside"
    assert detector.scorer.seen == (torch.Tensor, (960, WIDTH))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
@pytest.mark.parametrize("raises", [False, True])
def test_no_file_stays(wide, on_disk, monkeypatch, tmp_path, raises):
    class Fails(Curious):
        def fit(self, inliers):
            assert str(tmp_path) in Path("/proc/self/maps").read_text()  # rows are in a file
            assert not list(tmp_path.iterdir())  # that has no name
            if raises:
                raise ZeroDivisionError
            self.scale = 1.0

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    on_disk()
    try:
        Detector(wide, scorer=Fails()).fit(pictures(300, 1), held_out=pictures(100, 2))
    except ZeroDivisionError:
        assert raises
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
