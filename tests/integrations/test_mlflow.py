"""MLflow: what is logged, and the detector back as a pyfunc model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neuralmean import Detector
from neuralmean.errors import InputError
from neuralmean.models.spec import resolve

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow warns of its backends and of missing signatures
mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed: it runs in `make integrations`")
bridge = pytest.importorskip("neuralmean.integrations.mlflow")
pd = pytest.importorskip("pandas")

SPEC = "tests.integrations.test_mlflow:make_model"


def make_model():
    return nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture(autouse=True)
def _tracking(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("test")
    yield
    mlflow.end_run()


@pytest.fixture
def detector():
    model = make_model()
    with torch.no_grad():
        for _ in range(60):
            model(torch.randn(64, 10))
    return Detector(model.eval(), scorer="average").fit(torch.randn(200, 10), held_out=torch.randn(200, 10))


def test_a_logged_detector_comes_back_as_a_pyfunc_model_with_the_same_numbers():
    model = resolve("bench:convnet4").model.train()
    with torch.no_grad():
        for _ in range(20):
            model(torch.rand(32, 3, 32, 32))
    images = torch.rand(120, 3, 32, 32)
    detector = Detector(model.eval(), scorer="average").fit(images[:60], held_out=images[60:])
    with mlflow.start_run() as run:
        logged = bridge.log_detector(detector, model="bench:convnet4")
    x = torch.cat([torch.rand(5, 3, 32, 32), 9 + torch.rand(5, 3, 32, 32)])
    decision = detector.predict(x)
    found = mlflow.pyfunc.load_model(logged.model_uri).predict(x.numpy())
    assert found["score"].tolist() == decision.score.tolist()
    assert found["p_value"].tolist() == decision.p_value.tolist()
    assert found["is_ood"].tolist() == decision.is_ood.tolist()
    assert decision.is_ood[5:].all()
    kept = mlflow.get_run(run.info.run_id).data
    assert kept.metrics["detector.threshold"] == pytest.approx(detector.threshold)
    assert kept.params["detector.scorer"] == "average"
    assert "model" not in detector.info


def test_a_frame_gives_the_numbers_of_its_rows(detector):
    x = torch.randn(7, 10)
    found = bridge.DetectorModel(detector).predict(pd.DataFrame(x.numpy()))
    assert found["score"].tolist() == detector.score(x).tolist()


def test_a_model_can_be_named_when_it_is_loaded(detector):
    with mlflow.start_run():
        logged = bridge.log_detector(detector, model="no.such:model")
    with pytest.raises(InputError, match=r"Expected .*'no\.such:model'"):
        mlflow.pyfunc.load_model(logged.model_uri)
    x = torch.randn(3, 10)
    assert torch.equal(bridge.load_detector(logged.model_uri, model=SPEC).score(x), detector.score(x))


def test_what_is_no_logged_detector_is_refused(tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(InputError, match="to be a model that `log_detector` logged, but it is not"):
        bridge.load_detector(str(tmp_path / "other"))


def test_nothing_that_is_logged_is_a_pickle(detector, tmp_path):
    with mlflow.start_run():
        logged = bridge.log_detector(detector, model=SPEC)
    folder = mlflow.artifacts.download_artifacts(logged.model_uri, dst_path=str(tmp_path / "down"))
    names = {path.name for path in (tmp_path / "down").rglob("*") if path.is_file()}
    assert folder
    assert {"detector.nmd", "weights.safetensors"} <= names
    assert not {name for name in names if name.endswith((".pkl", ".pickle", ".pt", ".pth"))}


def test_results_and_report_are_logged(detector):
    strange = 50 + torch.randn(100, 10)
    with mlflow.start_run() as run:
        found = bridge.log_results(detector, torch.randn(200, 10), {"far": strange})
    kept = mlflow.get_run(run.info.run_id).data.metrics
    assert kept == pytest.approx(found)
    assert kept["far.auroc"] == 100
    assert kept["far.flagged"] == 100
    assert kept["id.flagged"] < 20
    pytest.importorskip("jinja2")
    with mlflow.start_run() as run:
        bridge.log_report(detector, torch.randn(100, 10), {"far": strange})
    assert [file.path for file in mlflow.MlflowClient().list_artifacts(run.info.run_id)] == ["report.html"]


def test_a_model_that_nobody_can_build_is_refused(detector):
    with pytest.raises(InputError, match="Expected a spec to build the model from"):
        bridge.log_detector(detector)
