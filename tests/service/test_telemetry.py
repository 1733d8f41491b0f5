"""OpenTelemetry with the real SDK: spans, metrics, and OTLP over a socket."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from neuralmean.errors import MissingExtraError
from neuralmean.service import Settings, create_app
from neuralmean.service.launch import add_companions
from neuralmean.service.telemetry import Telemetry, TraceRequests
from tests.service.conftest import PREPROCESSING, png, running

pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `otel` is not installed")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra `otel` is not installed")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def traced(detector):
    """An application whose spans and metrics stay in memory: the application, the spans, the reader."""
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(allow_hosts=("test",)))
    service, spans, reader = app.state.service, InMemorySpanExporter(), InMemoryMetricReader()
    telemetry = Telemetry(
        lambda: service.live.monitor, lambda: service.batcher, span_exporter=spans, metric_reader=reader
    )
    app.add_middleware(TraceRequests, telemetry=telemetry)
    return app, telemetry, spans, reader


def test_each_request_is_a_span_of_the_callers_trace(traced):
    app, telemetry, spans, _ = traced

    async def go():
        async with running(app) as client:
            headers = {"traceparent": PARENT, "content-type": "image/png"}
            assert (await client.post("/score", content=png()[0], headers=headers)).status_code == 200
            assert (await client.get("/v2/models/other")).status_code == 404
            assert (await client.get("/v2/health/ready")).status_code == 200
        await telemetry.stop()

    asyncio.run(go())
    score, unknown = spans.get_finished_spans()  # health is not traced
    assert score.name == "POST /score"
    assert f"{score.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{score.parent.span_id:016x}" == PARENT.split("-")[2]
    assert score.attributes["http.response.status_code"] == 200
    assert unknown.name == "GET /v2/models/{name}"
    assert unknown.attributes["http.response.status_code"] == 404
    assert score.resource.attributes["service.name"] == "neuralmean"


def test_metrics_are_those_of_the_monitor(traced):
    app, telemetry, _, reader = traced

    async def go():
        async with running(app) as client:
            for seed in range(3):
                await client.post("/score", content=png(seed)[0], headers={"content-type": "image/png"})
            batcher = app.state.service.batcher
            while app.state.service.live.monitor.status().n_seen < 3:
                await asyncio.sleep(0.01)
            assert batcher is not None
            return reader.get_metrics_data()

    data = asyncio.run(go())
    asyncio.run(telemetry.stop())
    found = {
        metric.name: metric.data.data_points[0]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    assert found["neuralmean.inputs"].value == 3
    assert found["neuralmean.drift"].value == 0.0
    assert found["neuralmean.expected.ood_rate"].value == pytest.approx(0.05, abs=0.01)
    assert found["http.server.request.duration"].count == 3
    assert found["neuralmean.queue"].value == 0


def test_otlp_reaches_a_collector_and_the_variables_count(detector, monkeypatch):
    got: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "camera-seven")
    try:
        app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(allow_hosts=("test",)))
        add_companions(app, host="127.0.0.1", grpc_port=None, telemetry=True)

        async def go():
            async with running(app) as client:
                await client.post("/score", content=png()[0], headers={"content-type": "image/png"})

        asyncio.run(go())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    by_path = dict(got)
    assert set(by_path) == {"/v1/traces", "/v1/metrics"}
    assert b"POST /score" in by_path["/v1/traces"]
    assert b"camera-seven" in by_path["/v1/traces"]
    assert b"neuralmean.inputs" in by_path["/v1/metrics"]


def test_a_collector_that_is_gone_does_not_keep_the_service_from_ending(detector, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("neuralmean.service.telemetry.GRACE_S", 0.3)
    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(allow_hosts=("test",)))
    add_companions(app, host="127.0.0.1", grpc_port=None, telemetry=True)

    async def go():
        async with running(app) as client:
            await client.get("/v2")
            return time.monotonic()

    begin = asyncio.run(go())
    assert time.monotonic() - begin < 3  # the exporter alone would try for ten seconds and more


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[otel\]"):
        Telemetry(lambda: None, lambda: None)
