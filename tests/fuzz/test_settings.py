"""Settings, specs and journals from anywhere: our own errors only."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neuralmean import Detector, distributed
from neuralmean.errors import NeuralMeanError
from neuralmean.modelspec import resolve
from neuralmean.preprocessing import Preprocessing
from tests.conftest import make_trained
from tests.fuzz.mutations import mutate, mutate_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
KEYS = ["size", "mean", "std", "interpolation", "crop_fraction", "channels", "crop", "other"]


@settings(deadline=None, max_examples=200)
@given(JSON | st.dictionaries(st.sampled_from(KEYS), JSON, min_size=3))
def test_preprocessing_from_any_json_is_one_or_an_error_of_ours(raw):
    try:
        made = Preprocessing.from_json(raw)
    except NeuralMeanError:
        return
    assert Preprocessing.from_json(made.to_json()) == made


def test_preprocessing_that_was_tampered_with_is_one_or_an_error_of_ours():
    good = Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3).to_json()
    for seed in range(500):
        try:
            made = Preprocessing.from_json(mutate_json(good, random.Random(seed)))
        except NeuralMeanError:
            continue
        assert made.channels in (1, 3)


@settings(deadline=None, max_examples=150)
@given(st.text(max_size=40) | st.from_regex(r"[a-z_.]{1,12}:[a-z_.]{1,12}", fullmatch=True))
@example("os:system")
@example("builtins:exec")
@example("subprocess:Popen")
@example("neuralmean.files:write_atomically")
@example("timm:hf-hub:somebody/something")
def test_a_spec_from_a_file_is_refused_in_our_words(spec):
    with pytest.raises(NeuralMeanError):
        resolve(spec, trusted=False)


def test_a_journal_that_was_damaged_in_any_way_still_ends_in_the_same_result(tmp_path):
    from PIL import Image

    how = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)
    for i in range(24):
        Image.effect_noise((8, 8), 40 + i).convert("RGB").save(tmp_path / f"{i:02}.png")
    detector = Detector(make_trained(), scorer="average").calibrate(torch.rand(40, 3, 8, 8))
    detector.save(tmp_path / "x.nmd", info={"preprocessing": how.to_json()})
    out, journal = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"

    def run():
        return distributed.score(
            tmp_path / "x.nmd", sorted(tmp_path.glob("*.png")), out=out, model=make_trained, workers=0, chunk_size=4
        )

    kept = []
    original = distributed.journal.Journal.remove
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            distributed.journal.Journal, "remove", lambda self: kept.append(self.path.read_bytes()) or original(self)
        )
        run()
    expected = out.read_bytes()
    for seed in range(40):
        journal.write_bytes(mutate(kept[0], random.Random(seed)))
        assert run().n_images == 24
        assert out.read_bytes() == expected
