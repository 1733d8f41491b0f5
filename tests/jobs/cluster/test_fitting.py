"""References and fits over many images are those of one pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from neuralmean import Detector, Reference
from neuralmean.data.images import ImageBatches
from neuralmean.errors import (
    CalibrationWarning,
    InputError,
    NeuralMeanWarning,
)
from neuralmean.jobs import cluster as distributed
from tests.conftest import make_trained
from tests.jobs.cluster.conftest import SMALL, make_convnet


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
