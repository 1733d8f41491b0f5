"""Settings, specs and journals from anywhere: our own errors only."""

from __future__ import annotations

import random
import re
import tempfile
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from neuralmean import Detector
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.errors import NeuralMeanError
from neuralmean.jobs import Journal
from neuralmean.jobs import cluster as distributed
from neuralmean.jobs.cluster.engine import Cluster
from neuralmean.jobs.cluster.work import Work
from neuralmean.models.spec import resolve
from neuralmean.service.settings import Settings, read_token
from tests.conftest import make_trained
from tests.fuzz.mutations import mutate, mutate_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
quick = settings(deadline=None, max_examples=150)
KEYS = ["size", "mean", "std", "interpolation", "crop_fraction", "channels", "crop", "other"]


@quick
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


@quick
@given(st.text(max_size=40) | st.from_regex(r"[a-z_.]{1,12}:[a-z_.]{1,12}", fullmatch=True))
@example("os:system")
@example("builtins:exec")
@example("subprocess:Popen")
@example("neuralmean.files.atomic:write_atomically")
@example("timm:hf-hub:somebody/something")
def test_a_spec_from_a_file_is_refused_in_our_words(spec):
    with pytest.raises(NeuralMeanError):
        resolve(spec, trusted=False)


@quick
@given(st.from_regex(r"[a-z_.:/\\ -]{0,20}", fullmatch=True) | st.text(max_size=20))
@example("/:x")
@example("timm:")
@example("timm:" + "x" * 5000)
@example("timm:../resnet18")
@example("torchvision:resnet18 ")
@example("bench:\0")
@example("tests.conftest:TinyNet.")
@example("tests.conftest:__doc__")
def test_a_spec_that_somebody_typed_is_a_model_or_an_error_of_ours(spec):
    # What a person types is imported: leave alone what could be a module that does something.
    assume(spec.startswith(("timm", "torchvision", "bench", "tests.")) or not re.match(r"\w+(\.\w+)*:", spec))
    with pytest.raises(NeuralMeanError):
        resolve(spec)


@quick
@given(st.tuples(*[JSON | st.integers() | st.floats()] * 3))
@example((10**400, 1, 0.0))
@example((None, None, 0.0))
@example((2, 1, float("nan")))
def test_a_cluster_of_any_values_is_one_or_an_error_of_ours(values):
    workers, threads, gpus = values
    try:
        made = Cluster(None, workers, threads, gpus)
    except NeuralMeanError:
        return
    assert made.workers is None or made.workers >= 0
    assert made.threads >= 1
    assert 0 <= made.gpus < 1000


@quick
@given(JSON | st.integers() | st.floats(), JSON | st.integers(), JSON | st.integers())
def test_portions_of_any_size_are_right_or_an_error_of_ours(batch, chunk, sample):
    work = Work(Cluster(workers=0), batch, chunk)
    how = Preprocessing((8, 8), (0.0,) * 3, (1.0,) * 3)
    for make in (lambda: work.reading(how), lambda: work.chunks(__file__, sample=sample)):
        try:
            made = make()
        except NeuralMeanError:
            continue
        assert made is not None


@quick
@given(st.dictionaries(st.sampled_from([field.name for field in fields(Settings)] + ["other"]), JSON | st.integers()))
@example({"max_batch": 10**400})
@example({"timeout_s": float("nan")})
@example({"queue": 2**63, "max_batch": 2**63})
def test_settings_of_the_service_are_right_or_an_error_of_ours(raw):
    raw = {name: value for name, value in raw.items() if name != "token"}
    try:
        made = Settings.from_options(**raw)
    except NeuralMeanError:
        return
    assert made.queue >= made.max_batch >= 1
    assert made.timeout_s >= 0


@quick
@given(st.text(), st.binary())
@example("x" * 100_000, b"\xff\xfe")
def test_a_token_from_anywhere_is_fit_for_a_header_or_an_error_of_ours_that_does_not_show_it(text, content):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "token"
        file.write_bytes(content)
        for where in ((text, None, {}), (None, None, {"NMD_TOKEN": text}), (None, file, {})):
            token, said = _outcome(lambda where=where: read_token(*where))
            assert len(text) < 8 or text not in said
            if token is None:
                assert said
                continue
            token.encode("ascii")
            assert len(token) >= 8
            assert not set(token) & set("\r\n\0 ")


def _outcome(action):
    """What an action returns, or None and the sentence of our error."""
    try:
        return action(), ""
    except NeuralMeanError as error:
        return None, str(error)


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
    original = Journal.remove
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "remove", lambda self: kept.append(self.path.read_bytes()) or original(self))
        run()
    expected = out.read_bytes()
    for seed in range(40):
        journal.write_bytes(mutate(kept[0], random.Random(seed)))
        assert run().n_images == 24
        assert out.read_bytes() == expected
