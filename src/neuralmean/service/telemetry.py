"""OpenTelemetry traces and metrics of the service, sent over OTLP. Needs `pip install neuralmean[otel]`.

One span for each HTTP request, which continues the caller's trace (`traceparent`), the duration of requests, and metrics of
the monitor and the queue. The standard `OTEL_*` variables set the endpoint, the interval and the service name.
The providers belong to this service alone; nothing global is set.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neuralmean import __version__
from neuralmean.errors import MissingExtraError
from neuralmean.monitor.monitor import Monitor
from neuralmean.monitor.status import MonitorStatus
from neuralmean.service.batching import Batcher

GRACE_S = 3.0
"""Maximum time to send the remaining data when the service ends."""

_UNTRACED = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics", "/live"})
"""Frequent requests that are left out of traces."""

# Semantic conventions for HTTP servers: seconds.
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

_GAUGES: dict[str, tuple[str, Callable[[MonitorStatus], float | None]]] = {
    "neuralmean.window.ood_rate": ("Share of the window that was flagged.", lambda status: status.window_ood_rate),
    "neuralmean.expected.ood_rate": (
        "Share that is flagged while nothing has changed.",
        lambda status: status.expected_ood_rate,
    ),
    "neuralmean.drift": ("1 from a drift alarm until it is reset.", lambda status: float(status.drift)),
    "neuralmean.drift.log10_evidence": ("Evidence of drift, as a power of ten.", lambda status: status.log10_evidence),
}


class Telemetry:
    """Sends traces and metrics of one service.

    Args:
        monitor: Returns the monitor of the service.
        batcher: Returns the batcher of the service; None while it does not run.
        span_exporter: Where spans go; None sends them over OTLP.
        metric_reader: What reads the metrics; None sends them over OTLP.
    """

    def __init__(
        self,
        monitor: Callable[[], Monitor],
        batcher: Callable[[], Batcher | None],
        *,
        span_exporter: Any = None,
        metric_reader: Any = None,
    ) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.metrics import MeterProvider
            from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise MissingExtraError(
                "Telemetry needs the 'opentelemetry-sdk' and 'opentelemetry-exporter-otlp-proto-http' packages. "
                "Install them with `pip install neuralmean[otel]`."
            ) from error
        own = Resource.create({"service.name": "neuralmean", "service.version": __version__})
        resource = own.merge(OTELResourceDetector().detect())  # OTEL_SERVICE_NAME wins
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)  # `stop` does it
        self._traces.add_span_processor(BatchSpanProcessor(span_exporter or OTLPSpanExporter()))
        self._tracer = self._traces.get_tracer("neuralmean", __version__)
        self._propagator = TraceContextTextMapPropagator()
        reader = metric_reader or PeriodicExportingMetricReader(OTLPMetricExporter())
        self._metrics = MeterProvider(metric_readers=[reader], resource=resource, shutdown_on_exit=False)
        meter = self._metrics.get_meter("neuralmean", __version__)
        self._seconds = meter.create_histogram(
            "http.server.request.duration", "s", "Time to answer.", explicit_bucket_boundaries_advisory=_BUCKETS
        )
        _observe(meter, monitor, batcher)

    async def start(self) -> None:
        """Do nothing: the exporters run from the beginning."""

    async def stop(self) -> None:
        """Send the remaining data within `GRACE_S`: a missing collector must not block the shutdown."""
        ends = [
            threading.Thread(target=_shut_down, args=(provider,), daemon=True)
            for provider in (self._traces, self._metrics)
        ]
        until = time.monotonic() + GRACE_S
        for thread in ends:
            thread.start()
        for thread in ends:
            await asyncio.to_thread(thread.join, max(0.0, until - time.monotonic()))

    def span(self, scope: Scope) -> Any:
        """Start the span of a request, as a child of the caller's span where the headers name one."""
        from opentelemetry.trace import SpanKind

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"][:200], "url.scheme": "http"}
        return self._tracer.start_span(
            f"{scope['method']} {route_of(scope['path'])}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={**attributes, "http.route": route_of(scope["path"])},
        )

    def end(self, span: Any, scope: Scope, status: int, seconds: float) -> None:
        """End the span of a request and count its duration."""
        from opentelemetry.trace import Status, StatusCode

        if span is not None:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))
            span.end()
        known = {"http.request.method": scope["method"], "http.route": route_of(scope["path"])}
        self._seconds.record(seconds, {**known, "http.response.status_code": status})


class TraceRequests:
    """A plain ASGI middleware that gives each request a span.

    Args:
        app: The application that answers.
        telemetry: Where spans and durations go.
    """

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 499
        span = None if scope["path"] in _UNTRACED else self._telemetry.span(scope)

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            self._telemetry.end(span, scope, status, time.perf_counter() - begin)


def _shut_down(provider: Any) -> None:
    with suppress(Exception):  # unsent data is lost
        provider.shutdown()


def route_of(path: str) -> str:
    """Return the route of a path: a bounded number of names, whatever clients ask for.

    Example:
        >>> route_of("/v2/models/mine/infer"), route_of("/live/flagged/7"), route_of("/etc/passwd")
        ('/v2/models/{name}/infer', '/live/flagged/{number}', 'other')
    """
    parts = path.split("/")[1:]
    if parts[:2] == ["v2", "models"] and len(parts) >= 3:
        last = parts[-1] if parts[-1] in ("infer", "ready") else ""
        return "/v2/models/{name}" + (f"/{last}" if last else "")
    if parts[:2] == ["live", "flagged"]:
        return "/live/flagged/{number}"
    known = ("/", "/score", "/live", "/live/setup", "/live/reset", "/metrics", "/docs", "/openapi.json", "/v2")
    return path if path in known or path in _UNTRACED else "other"


def _observe(meter: Any, monitor: Callable[[], Monitor], batcher: Callable[[], Batcher | None]) -> None:
    """Create the instruments that are read when metrics are sent."""
    from opentelemetry.metrics import Observation

    def of_monitor(read: Callable[[MonitorStatus], float | None]) -> Callable[[Any], Iterator[Any]]:
        def callback(_: Any) -> Iterator[Any]:
            value = read(monitor().status())
            if value is not None:
                yield Observation(value)

        return callback

    def waiting(_: Any) -> Iterator[Any]:
        running = batcher()
        if running is not None:
            yield Observation(running.n_waiting)

    seen, flagged = of_monitor(lambda status: status.n_seen), of_monitor(lambda status: status.n_ood)
    meter.create_observable_counter("neuralmean.inputs", [seen], "{input}", "Inputs of the stream that were scored.")
    meter.create_observable_counter("neuralmean.ood", [flagged], "{input}", "Inputs that were flagged as OOD.")
    for name, (text, read) in _GAUGES.items():
        meter.create_observable_gauge(name, [of_monitor(read)], "1", text)
    meter.create_observable_gauge("neuralmean.queue", [waiting], "{input}", "Inputs that wait.")
