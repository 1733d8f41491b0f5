"""The deployment files, checked by promtool, systemd, hadolint, published schemas and a real Prometheus."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from neuralmean import Detector
from neuralmean.service import create_app
from tests.conftest import make_trained

yaml = pytest.importorskip("yaml")
pytest.importorskip("fastapi")

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
if not DEPLOY.is_dir():
    pytest.skip("this is not the repository", allow_module_level=True)


def tool(name):
    """The path of a program; the test skips where it is not installed."""
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def run(*command):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def load_local():
    """The script `deploy/local.py` as a module."""
    spec = importlib.util.spec_from_file_location("deploy_local", DEPLOY / "local.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path):
    return list(yaml.safe_load_all((DEPLOY / path).read_text()))


@pytest.fixture
def metric_names(images):
    """The names of the metrics that the service gives, once it has seen a few images."""
    httpx = pytest.importorskip("httpx")
    detector = Detector(make_trained(), scorer="average").calibrate(images[:200])
    app = create_app(detector, name="toy")

    async def go():
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                entry = {"name": "input", "datatype": "FP32", "shape": [4, 3, 8, 8]}
                entry["data"] = images[:4].flatten().tolist()
                answer = await client.post("/v2/models/toy/infer", json={"inputs": [entry]})
                assert answer.status_code == 200
                service = app.state.service
                while service.live.monitor.status().n_seen < 4:
                    await asyncio.sleep(0.01)
                return (await client.get("/metrics")).text

    return set(re.findall(r"^(nmd_\w+)", asyncio.run(go()), re.MULTILINE))


def expressions():
    """Every query of the dashboard and of the alert rules."""
    board = json.loads((DEPLOY / "grafana/dashboards/nmd.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    rules = read("prometheus/rules.yml")[0]["groups"][0]["rules"]
    return [*queries, *(rule["expr"] for rule in rules)]


def test_the_alert_rules_hold_what_their_own_tests_say():
    promtool = tool("promtool")
    assert "5 rules found" in run(promtool, "check", "rules", DEPLOY / "prometheus/rules.yml")
    assert "SUCCESS" in run(promtool, "test", "rules", DEPLOY / "prometheus/rules.test.yml")


def test_the_configuration_of_prometheus_is_valid(tmp_path):
    text = (DEPLOY / "prometheus/prometheus.yml").read_text().replace("/run/secrets/nmd_token", f"{tmp_path}/token")
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / "token").write_text("secret")
    shutil.copy(DEPLOY / "prometheus/rules.yml", tmp_path)
    run(tool("promtool"), "check", "config", tmp_path / "prometheus.yml")


def test_every_query_parses(tmp_path):
    rules = [
        {"record": f"r{i}", "expr": expr.replace("$__rate_interval", "1m")} for i, expr in enumerate(expressions())
    ]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", tmp_path / "rules.yml")


def test_dashboard_and_rules_use_metrics_that_the_service_gives(metric_names):
    used = {name for expr in expressions() for name in re.findall(r"\bnmd_\w+", expr)}
    assert len(used) >= 12
    assert used <= metric_names


def test_compose_fits_together():
    compose = read("compose.yaml")[0]
    services = compose["services"]
    (target,) = read("prometheus/prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0]["targets"]
    host = target.partition(":")[0]
    assert host in services
    assert f"--allow-host={host}" in services["nmd"]["command"]
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service["ports"])
    for service in services.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or source.startswith("${") or (DEPLOY / source).exists()


def test_the_options_that_the_files_pass_exist():
    shown = run(sys.executable, "-m", "neuralmean", "serve", "--help")
    texts = [path.read_text() for path in (ROOT / "Dockerfile", *DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.service"))]
    lines = [
        line for text in texts for line in text.splitlines() if re.search(r"- --[a-z]|nmd serve|CMD \[.serve", line)
    ]
    options = {option for line in lines for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", line)}
    assert {"--allow-host", "--token-file", "--state", "--grpc-port"} <= options
    assert all(option in shown for option in options), options


def test_the_unit_is_valid(tmp_path):
    analyze = tool("systemd-analyze")
    text = (DEPLOY / "systemd/nmd.service").read_text()
    unit = tmp_path / "nmd.service"
    unit.write_text(text.replace("/opt/nmd/bin/nmd", shutil.which("true")))
    run(analyze, "verify", unit)


def test_the_dockerfile_passes_hadolint():
    run(tool("hadolint"), ROOT / "Dockerfile")


def strict(value, kind, models, where):
    """Check a value against the classes that a client generated from an OpenAPI schema; every unknown key is an error."""
    if many := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        assert isinstance(value, list), where
        for number, item in enumerate(value):
            strict(item, many[1], models, f"{where}[{number}]")
    elif named := re.fullmatch(r"[dD]ict[\[(]str, (.+)[\])]", kind):
        assert isinstance(value, dict), where
        for key, item in value.items():
            strict(item, named[1], models, f"{where}.{key}")
    elif hasattr(models, kind):
        model = getattr(models, kind)
        known = {model.attribute_map[name]: type_ for name, type_ in model.openapi_types.items()}
        assert isinstance(value, dict), where
        assert set(value) <= set(known), f"{where}: {set(value) - set(known)}"
        for key, item in value.items():
            strict(item, known[key], models, f"{where}.{key}")
        model(**{name: value[key] for name, key in model.attribute_map.items() if key in value})  # required fields
    else:
        plain = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}
        assert isinstance(value, plain[kind]), f"{where}: {kind}, got {value!r}"


def test_the_kubernetes_manifests_fit_the_published_schema():
    client = pytest.importorskip("kubernetes.client", reason="the client of Kubernetes is not installed")
    kinds = {"PersistentVolumeClaim": "V1PersistentVolumeClaim", "Deployment": "V1Deployment", "Service": "V1Service"}
    found = read("kubernetes/nmd.yaml")
    assert {one["kind"] for one in found} == set(kinds)
    for one in found:
        strict(one, kinds[one["kind"]], client, one["kind"])
    with pytest.raises(AssertionError, match="replica"):
        strict({"spec": {"replica": 1}}, "V1Deployment", client, "Deployment")


def kserve_models(client):
    """The classes of KServe's own Python package, without its server, whose dependencies are many."""
    found = importlib.util.find_spec("kserve")
    if found is None:
        pytest.skip("kserve is not installed")
    package = types.ModuleType("kserve")
    package.__path__ = [str(Path(found.origin).parent)]
    before = sys.modules.get("kserve")
    sys.modules["kserve"] = package
    try:
        models = importlib.import_module("kserve.models")
    finally:
        if before is None:
            del sys.modules["kserve"]
        else:
            sys.modules["kserve"] = before

    class Both:
        def __getattr__(self, name):
            return getattr(models if hasattr(models, name) else client, name)

    return Both()


def test_the_kserve_manifest_fits_the_published_schema():
    client = pytest.importorskip("kubernetes.client", reason="the client of Kubernetes is not installed")
    models = kserve_models(client)
    (service,) = read("kserve/inference-service.yaml")
    assert service["apiVersion"] == "serving.kserve.io/v1beta1"
    strict(service, "V1beta1InferenceService", models, "InferenceService")
    service["spec"]["predictor"]["container"] = []
    with pytest.raises(AssertionError, match="predictor: {'container'}"):
        strict(service, "V1beta1InferenceService", models, "InferenceService")


@pytest.mark.slow
def test_a_drifting_stream_fires_the_alert_in_a_real_prometheus(tmp_path, monkeypatch):
    tool("prometheus")
    monkeypatch.chdir(ROOT)  # `nmd serve` builds the model from `tests.conftest`
    from tests.service.conftest import PREPROCESSING

    rng = np.random.default_rng(0)
    usual = rng.integers(0, 256, (700, 8, 8, 3), dtype=np.uint8)
    strange = rng.integers(200, 256, (400, 8, 8, 3), dtype=np.uint8)
    detector = Detector(make_trained(), scorer="average").calibrate(PREPROCESSING.apply_array(usual[:500]))
    saved = tmp_path / "toy.nmd"
    detector.save(saved, info={"preprocessing": PREPROCESSING.to_json()})
    local = load_local()
    parts = local.Parts(tmp_path)
    with parts.started(saved, ["--model", "tests.conftest:make_trained"]):
        assert local.firing(parts.prometheus, "NmdDown") is None
        seen = local.walk(parts, usual[500:], strange)
        assert local.firing(parts.prometheus, "NmdDrift")["labels"]["severity"] == "critical"
    assert seen["usual_flagged"] < 0.15
    assert seen["strange_flagged"] > 0.9
    assert seen["strange_images_until_alarm"] < 100
