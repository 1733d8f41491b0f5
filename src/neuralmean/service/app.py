"""The application: every route with its handler, behind the gate."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import Response

from neuralmean import __version__
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.errors import InputError
from neuralmean.monitor.monitor import Monitor
from neuralmean.service import schema
from neuralmean.service.gate import Gate
from neuralmean.service.handlers import add_handlers
from neuralmean.service.metrics import BatcherCollector, MonitorCollector, RequestMetrics
from neuralmean.service.pages import PAGES, page_handler
from neuralmean.service.protocol import VERSION
from neuralmean.service.service import Service
from neuralmean.service.settings import Settings
from neuralmean.service.verdicts import Verdicts
from neuralmean.service.watch import Watch

if TYPE_CHECKING:
    from fastapi import FastAPI


def build_app(
    detector: Detector,
    preprocessing: Preprocessing | None,
    *,
    name: str,
    settings: Settings,
    monitor: Monitor | None,
) -> FastAPI:
    """Return the application; see `neuralmean.service.create_app`."""
    from fastapi import FastAPI
    from prometheus_client import CollectorRegistry

    if not name or "/" in name:
        raise InputError(f"Expected `name` to be a name without slashes, but got {name!r}.")
    service = Service(detector, preprocessing, name=name, settings=settings, monitor=monitor)
    app = FastAPI(
        title="neuralmean",
        version=__version__,
        description="Detects inputs that are unlike the training data of a model.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # FastAPI would write it anew, in 20 ms, for every client, and nobody needs a token for it
        redirect_slashes=False,
        lifespan=service.running,
    )
    registry = CollectorRegistry()
    registry.register(MonitorCollector(lambda: service.live.monitor))
    registry.register(BatcherCollector(lambda: service.batcher))
    verdicts = Verdicts(service)
    _add_routes(app, service, verdicts, registry)
    add_handlers(app)
    routes = {path for route in app.routes if (path := getattr(route, "path", None))}
    direct = {
        "/score": verdicts.score,
        f"/v2/models/{name}/infer": verdicts.infer,
        f"/v2/models/{name}/versions/{VERSION}/infer": verdicts.infer,
    }
    counts = RequestMetrics(registry)
    app.add_middleware(
        Gate,
        token=settings.token,
        allow_hosts=settings.allow_hosts,
        routes=routes,
        direct=direct,
        count=counts.count,
    )
    app.state.service = service
    return app


def _add_routes(app: FastAPI, service: Service, verdicts: Verdicts, registry: Any) -> None:
    watch = Watch(service)

    def add(
        path: str, endpoint: Callable[..., Awaitable[Response]], content: dict[str, Any], *statuses: int, **options: Any
    ) -> None:
        options = {"methods": ["GET"], "response_model": None, "response_class": Response, **options}
        app.add_api_route(path, endpoint, responses=schema.responses(content, *statuses), **options)

    async def metrics() -> Response:
        """Metrics for Prometheus."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(await service.watching(partial(generate_latest, registry)), media_type=CONTENT_TYPE_LATEST)

    async def score(request: Request, explain: bool = False, watch: bool = True) -> Response:
        return await verdicts.score(request)

    score.__doc__ = verdicts.score.__doc__
    models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    metadata, state = schema.json_of(schema.METADATA), schema.json_of(schema.STATE)
    add("/v2/health/live", verdicts.health_live, state, tags=["Open Inference Protocol"])
    add("/v2/health/ready", verdicts.health_ready, state, 503, tags=["Open Inference Protocol"])
    add("/v2", verdicts.server, metadata, tags=["Open Inference Protocol"])
    tensors: dict[str, Any] = {
        "methods": ["POST"],
        "openapi_extra": schema.INFER_BODY,
        "tags": ["Open Inference Protocol"],
    }
    inferred = {**schema.json_of(schema.INFER_RESPONSE), "application/octet-stream": {}}
    for path in models:
        add(path, verdicts.model, metadata, 404, tags=["Open Inference Protocol"])
        add(f"{path}/ready", verdicts.model_ready, metadata, 404, 503, tags=["Open Inference Protocol"])
        add(f"{path}/infer", verdicts.infer_by_name, inferred, 400, 404, 408, 413, 415, 503, **tensors)
    scored = schema.json_of(schema.SCORE_RESPONSE)
    images: dict[str, Any] = {"methods": ["POST"], "openapi_extra": schema.SCORE_BODY, "tags": ["Images"]}
    add("/score", score, scored, 400, 408, 413, 415, 503, **images)
    add("/metrics", metrics, {"text/plain": {"schema": {"type": "string"}}}, tags=["Monitor"])
    add("/live/setup", watch.setup, schema.json_of(schema.SETUP), tags=["Monitor"])
    add("/live", watch.latest, schema.json_of(schema.LIVE), 400, tags=["Monitor"])
    add("/live/flagged/{number}", watch.flagged, {"image/png": {}}, 400, 404, tags=["Monitor"])
    add("/live/reset", watch.reset, state, 403, methods=["POST"], tags=["Monitor"])
    add("/live/accept", watch.accept, state, 400, 403, methods=["POST"], tags=["Monitor"])
    add("/live/revert", watch.revert, state, 403, methods=["POST"], tags=["Monitor"])
    add("/history", watch.history, state, 400, 404, tags=["Monitor"])
    add("/history/pictures/{number}", watch.history_picture, {"image/png": {}}, 400, 404, tags=["Monitor"])

    @cache
    def description() -> bytes:
        return json.dumps(app.openapi()).encode()

    async def openapi() -> Response:
        return Response(description(), media_type="application/json")

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    for path, (file, media_type) in PAGES.items():
        app.add_api_route(path, page_handler(file, media_type), methods=["GET", "HEAD"], include_in_schema=False)
