"""What earlier releases wrote can be read, and answers what it answered then."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from neuralmean import Detector
from neuralmean.monitor.monitor import Monitor

CORPUS = Path(__file__).parent / "corpus"
SCRIPT = Path(__file__).parent.parent / "scripts" / "corpus.py"
RELEASES = sorted(path.name for path in CORPUS.iterdir() if path.is_dir())

pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="needs the repository")


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("corpus_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fresh(script, tmp_path_factory):
    """What this version writes."""
    folder = tmp_path_factory.mktemp("corpus") / "now"
    script.write(folder)
    return folder


@pytest.mark.parametrize("release", ["now", *RELEASES])
def test_files_of_a_release_are_read_and_answer_the_same(script, fresh, release, tmp_path):
    folder = fresh if release == "now" else CORPUS / release
    answers = json.loads((folder / "answers.json").read_text())
    model = script.Net()
    model.load_state_dict(load_file(folder / "weights.safetensors"))
    model.eval()
    inputs = load_file(folder / "inputs.safetensors")["inputs"]
    names = sorted(path.stem for path in folder.glob("*.nmd"))
    assert len(names) >= 8
    for name in names:
        detector = Detector.load(folder / f"{name}.nmd", model)
        assert detector.info == {"note": name}
        decision = detector.predict(inputs, groups=["left", "right"] * 4 if name == "groups" else None)
        assert decision.score.tolist() == pytest.approx(answers[name]["score"], rel=1e-4, abs=1e-4), name
        assert decision.p_value.tolist() == pytest.approx(answers[name]["p_value"], abs=0.02), name
        assert decision.is_ood.tolist() == answers[name]["is_ood"], name
        assert any(answers[name]["is_ood"]), name
    status = Monitor.load(folder / "monitor.nmm", Detector.load(folder / "typicality.nmd", model)).status()
    assert {key: getattr(status, key) for key in answers["monitor"]} == answers["monitor"]
    assert status.drift
    history = pytest.importorskip("neuralmean.service.history")
    shutil.copy(folder / "history.db", tmp_path)
    totals = history.read_totals(tmp_path / "history.db")
    assert {key: totals[key] for key in answers["history"]} == answers["history"]


def test_what_a_release_wrote_is_not_written_again(script, fresh):
    with pytest.raises(FileExistsError):
        script.write(fresh)
