"""The routes: read a request, make jobs of it, wait for the answer, write it. The work is done elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from neuralmean import __version__
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.detector.kinds import SENTENCES
from neuralmean.errors import InputError
from neuralmean.monitor.monitor import Monitor
from neuralmean.service import schema
from neuralmean.service.batching import Answer, Batcher, Job
from neuralmean.service.bodies import BodyReader, NamedBytes, decode_images, decode_small, split_files
from neuralmean.service.describe import describe_detector, describe_p_value, describe_reason, layer_profile
from neuralmean.service.freezing import freeze_later
from neuralmean.service.gate import Gate
from neuralmean.service.handlers import add_handlers, json_answer
from neuralmean.service.history import N_PICTURES, History, read_alarms, read_picture, read_span
from neuralmean.service.live import Live
from neuralmean.service.maps import draw_maps
from neuralmean.service.metrics import BatcherCollector, MonitorCollector, RequestMetrics
from neuralmean.service.passes import run_pass
from neuralmean.service.protocol import (
    HEADER_LENGTH,
    VERSION,
    InputSpec,
    encode_infer,
    model_metadata,
    parse_infer,
    server_metadata,
)
from neuralmean.service.refusal import Refusal, busy
from neuralmean.service.settings import Settings
from neuralmean.service.workers import Runner, make_runners, on_own_thread

if TYPE_CHECKING:
    from fastapi import FastAPI

_PAGE_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:"
_PAGE_HEADERS = {"Content-Security-Policy": _PAGE_POLICY, "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}
_STATIC = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/page/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/page/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
    "/page/style.css": ("style.css", "text/css; charset=utf-8"),
}


class Companion(Protocol):
    """Something that starts once the worker runs and stops before it ends."""

    async def start(self) -> None:
        """Begin."""

    async def stop(self) -> None:
        """End, once what was accepted is done."""


class Service:
    """A detector with all that serves it."""

    def __init__(
        self,
        detector: Detector,
        preprocessing: Preprocessing | None,
        *,
        name: str,
        settings: Settings,
        monitor: Monitor | None,
    ) -> None:
        self.detector = detector
        self.preprocessing = preprocessing
        self.name = name
        self.settings = settings
        self.spec = InputSpec(_input_shape(preprocessing), settings.max_batch)
        self.batcher: Batcher | None = None
        self.output_shape: tuple[int, ...] | None = None
        self.reader = BodyReader(settings)
        self.live = Live(
            monitor or _open_monitor(detector, settings),
            preprocessing,
            n_flagged=settings.n_flagged if settings.thumbnails else 0,
            state=settings.state,
            history=_open_history(settings),
        )
        self._decoders: ThreadPoolExecutor | None = None
        self.companions: list[Companion] = []  # run as long as the worker does: gRPC, telemetry

    @asynccontextmanager
    async def running(self, _: Any = None) -> AsyncIterator[None]:
        """Run the worker; at the end finish what was accepted and save the monitor's state."""
        n_threads = torch.get_num_threads()
        example = None if self.preprocessing is None else self.preprocessing.example()
        runners = await asyncio.to_thread(on_own_thread, lambda: self._warm_up(example, n_threads))
        decoders = self._decoders = ThreadPoolExecutor(2, thread_name_prefix="neuralmean-decode")
        self.batcher = Batcher(
            runners,
            max_batch=self.settings.max_batch,
            max_wait_ms=self.settings.max_wait_ms,
            queue=self.settings.queue,
            after=self.live.take,
        )
        if self.settings.freeze and example is not None:
            freeze_later(self.detector, runners, example)
        saving = asyncio.create_task(self._save_now_and_then())
        started: list[Companion] = []
        try:
            for companion in self.companions:
                await companion.start()
                started.append(companion)
            yield
        finally:
            saving.cancel()
            for companion in reversed(started):
                await companion.stop()
            await asyncio.to_thread(self.batcher.close)
            self.batcher = None
            decoders.shutdown()
            await asyncio.to_thread(self.live.save)
            if self.live.history is not None:
                await asyncio.to_thread(self.live.history.close)

    def _warm_up(self, example: torch.Tensor | None, n_threads: int) -> list[Runner]:
        """Run the model where the size of its input is known, so that the first request is as fast as the next."""
        if example is None:
            return make_runners(self.detector, None, n_threads)
        output = run_pass(self.detector, example).output
        self.output_shape = None if output is None else tuple(output.shape[1:])
        return make_runners(self.detector, example, n_threads)

    async def _save_now_and_then(self) -> None:
        while self.settings.state is not None and self.settings.state_every_s:
            await asyncio.sleep(self.settings.state_every_s)
            await asyncio.to_thread(self.live.save)

    async def health_live(self) -> Response:
        """Whether the process runs."""
        return json_answer({"live": True})

    async def health_ready(self) -> Response:
        """Whether requests are taken."""
        self._running()
        return json_answer({"ready": True})

    async def server(self) -> Response:
        """Name, version and extensions of the server."""
        return json_answer(server_metadata())

    async def model(self, name: str, version: str = VERSION) -> Response:
        """Inputs and outputs of the model."""
        self._check_name(name, version)
        return json_answer(model_metadata(self.name, self.spec, self.output_shape))

    async def model_ready(self, name: str, version: str = VERSION) -> Response:
        """Whether the model takes requests."""
        self._check_name(name, version)
        self._running()
        return json_answer({"name": self.name, "ready": True})

    async def infer(self, request: Request) -> Response:
        """The model's output, score, p-value and decision for a tensor (Open Inference Protocol, JSON or binary)."""
        batcher = self._running()
        with self.reader.holding() as hold:
            with batcher.arriving():
                body = await self.reader.read(request, hold)
                wanted = parse_infer(body, request.headers.get(HEADER_LENGTH), self.spec)
                del body
            job = Job(torch.from_numpy(wanted.inputs))
            (answer,) = await self._run(batcher, request, [job])
        body, header_length = encode_infer(wanted, answer.arrays(), self.name)
        if header_length is None:
            return Response(body, media_type="application/json")
        headers = {HEADER_LENGTH: str(header_length)}
        return Response(body, media_type="application/octet-stream", headers=headers)

    async def score(self, request: Request) -> Response:
        """Score, p-value and decision for image files: a form with files, or the bytes of one file as the body.

        With `watch=false` they do not count as part of the stream that the monitor watches.
        """
        explain, watched = _flag(request, "explain"), _flag(request, "watch", "true")
        batcher, preprocessing = self._running(), self.preprocessing
        if preprocessing is None:
            raise Refusal(415, "Expected a detector that knows how to prepare images, but this one does not.")
        with self.reader.holding() as hold:
            with batcher.arriving():
                body = await self.reader.read(request, hold)
                named = await split_files(request, body, self.settings.max_batch)
                del body
                inputs = await self._decode(named, preprocessing)
            self.reader.add(hold, sum(array.nbytes for array in inputs))
            jobs = [Job(preprocessing.normalise(array), explain, watched) for array in inputs]
            answers = await self._run(batcher, request, jobs)
            answer = self._score_answer(named, answers, explain=explain)
            if explain:
                draw = partial(draw_maps, self.detector, [job.inputs for job in jobs], preprocessing)
                maps = await asyncio.get_running_loop().run_in_executor(self._decoders, draw)
                for result, uri in zip(answer["results"], maps, strict=False):
                    result["map"] = uri
        return json_answer(answer)

    async def _decode(self, named: list[NamedBytes], preprocessing: Preprocessing) -> list[NDArray[np.uint8]]:
        """Return the images as one batch, or as one batch each where they differ in size."""
        limits = {"max_pixels": self.settings.max_pixels, "max_bytes": self.settings.max_bytes_in_flight // 2}
        if preprocessing.size is None:  # such images stay as large as they are
            limits["max_pixels"] = min(limits["max_pixels"], self.settings.max_body_bytes // 4)
        images = decode_small(named, preprocessing, **limits)
        if images is not None:
            return images
        decode = partial(decode_images, named, preprocessing, **limits)
        return await asyncio.get_running_loop().run_in_executor(self._decoders, decode)

    async def _run(self, batcher: Batcher, request: Request, jobs: list[Job]) -> list[Answer]:
        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        return await batcher.submit(jobs, timeout=self.settings.timeout_s, gone=gone)

    def _score_answer(self, named: list[NamedBytes], answers: list[Answer], *, explain: bool) -> dict[str, Any]:
        decision = answers[0].shared.decision
        names = iter(named)
        results = []
        for answer in answers:
            for offset, row in enumerate(range(answer.rows.start, answer.rows.stop)):
                results.append(self._result(next(names).name, answer, row, answer.explained.start + offset, explain))
        return {"threshold": decision.threshold, "false_alarm_rate": decision.false_alarm_rate, "results": results}

    def _result(self, path: str, answer: Answer, row: int, explained: int, explain: bool) -> dict[str, Any]:
        explanation = answer.shared.explanation
        arrays = answer.shared.arrays
        score, p_value, is_ood = (arrays[key][row].item() for key in ("score", "p_value", "is_ood"))
        kind = answer.shared.decision.kind[row]
        result: dict[str, Any] = {"path": path, "score": score, "p_value": p_value, "is_ood": is_ood, "kind": kind}
        result["kind_sentence"] = SENTENCES[kind]
        if "output" in arrays and arrays["output"].ndim == 2 and arrays["output"].shape[1] > 1:
            result["predicted"] = int(arrays["output"][row].argmax())
        if explain and explanation is not None and self.detector.calibration is not None:
            result["sentence"] = describe_p_value(p_value, len(self.detector.calibration.scores))
            result["reason"] = describe_reason(explanation, explained, is_ood=is_ood)
            result["layers"] = layer_profile(explanation, explained)
            result["terms"] = {name: values[explained].item() for name, values in explanation.terms.items()}
            result["exact"] = explanation.exact
        return result

    async def setup(self) -> Response:
        """What the page must know of the detector: in-distribution scores, threshold, what it is worth."""
        own = {"images": self.preprocessing is not None, "thumbnails": self.settings.thumbnails, "version": __version__}
        own["history"] = self.live.history is not None
        return json_answer({**describe_detector(self.detector, self.name), **own})

    async def latest(self, since: int = 0) -> Response:
        """The latest items after number `since`, the flagged ones, and what the monitor knows."""
        return json_answer(await asyncio.to_thread(self.live.snapshot, since))

    async def flagged(self, number: int) -> Response:
        """A flagged input as PNG."""
        picture = self.live.thumbnail(number)
        if picture is None:
            raise Refusal(404, f"Expected a flagged input that is still kept, but number {number} is not.")
        return Response(picture, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    async def reset(self) -> Response:
        """Switch the drift alarm off and begin the test anew."""
        self.live.reset()
        return json_answer({"drift": False})

    async def accept(self) -> Response:
        """Take the stream as it is now as normal."""
        await asyncio.to_thread(self.live.accept)
        return json_answer({"drift": False})

    async def revert(self) -> Response:
        """Compare the stream with the held-out data again."""
        self.live.revert()
        return json_answer({"drift": False})

    async def history(self, span: str = "hours") -> Response:
        """Inputs, flagged inputs and alarms over a day, a month or half a year (`hours`, `days`, `weeks`), and alarms."""
        path = self._history()
        rows = await asyncio.to_thread(read_span, path, span)
        return json_answer({"span": span, "rows": rows, "alarms": await asyncio.to_thread(read_alarms, path)})

    async def history_picture(self, number: int) -> Response:
        """A flagged input from the history as PNG."""
        picture = await asyncio.to_thread(read_picture, self._history(), number)
        if picture is None:
            raise Refusal(404, f"Expected a flagged input that is still kept, but number {number} is not.")
        return Response(picture, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    def _history(self) -> Path:
        if self.live.history is None:
            raise Refusal(404, "Expected a server that keeps a history. Start it with --history FILE.")
        return self.live.history.path

    def _running(self) -> Batcher:
        if self.batcher is None:
            raise busy("The server is not ready. Try again later.", 1)
        return self.batcher

    def _check_name(self, name: str, version: str) -> None:
        if name != self.name or version != VERSION:
            raise Refusal(404, f"Expected the model {self.name!r} (version {VERSION}), but got {name[:80]!r}.")


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
        description="Tells whether inputs are like what a model was trained for.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=service.running,
    )
    registry = CollectorRegistry()
    registry.register(MonitorCollector(lambda: service.live.monitor))
    registry.register(BatcherCollector(lambda: service.batcher))
    _add_routes(app, service, registry)
    add_handlers(app)
    routes = {path for route in app.routes if (path := getattr(route, "path", None))}
    direct = {
        "/score": service.score,
        f"/v2/models/{name}/infer": service.infer,
        f"/v2/models/{name}/versions/{VERSION}/infer": service.infer,
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


def _add_routes(app: FastAPI, service: Service, registry: Any) -> None:
    def add(
        path: str, endpoint: Callable[..., Awaitable[Response]], content: dict[str, Any], *statuses: int, **options: Any
    ) -> None:
        options = {"methods": ["GET"], "response_model": None, "response_class": Response, **options}
        app.add_api_route(path, endpoint, responses=schema.responses(content, *statuses), **options)

    async def metrics() -> Response:
        """Metrics for Prometheus."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_LATEST)

    async def infer(request: Request, name: str, version: str = VERSION) -> Response:
        service._check_name(name, version)
        return await service.infer(request)

    async def score(request: Request, explain: bool = False, watch: bool = True) -> Response:
        return await service.score(request)

    infer.__doc__, score.__doc__ = service.infer.__doc__, service.score.__doc__
    models = ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
    metadata, state = schema.json_of(schema.METADATA), schema.json_of(schema.STATE)
    add("/v2/health/live", service.health_live, state, tags=["Open Inference Protocol"])
    add("/v2/health/ready", service.health_ready, state, 503, tags=["Open Inference Protocol"])
    add("/v2", service.server, metadata, tags=["Open Inference Protocol"])
    tensors: dict[str, Any] = {
        "methods": ["POST"],
        "openapi_extra": schema.INFER_BODY,
        "tags": ["Open Inference Protocol"],
    }
    inferred = {**schema.json_of(schema.INFER_RESPONSE), "application/octet-stream": {}}
    for path in models:
        add(path, service.model, metadata, 404, tags=["Open Inference Protocol"])
        add(f"{path}/ready", service.model_ready, metadata, 404, 503, tags=["Open Inference Protocol"])
        add(f"{path}/infer", infer, inferred, 400, 404, 408, 413, 415, 503, **tensors)
    scored = schema.json_of(schema.SCORE_RESPONSE)
    images: dict[str, Any] = {"methods": ["POST"], "openapi_extra": schema.SCORE_BODY, "tags": ["Images"]}
    add("/score", score, scored, 400, 408, 413, 415, 503, **images)
    add("/metrics", metrics, {"text/plain": {"schema": {"type": "string"}}}, tags=["Monitor"])
    add("/live/setup", service.setup, schema.json_of(schema.SETUP), tags=["Monitor"])
    add("/live", service.latest, schema.json_of(schema.LIVE), 400, tags=["Monitor"])
    add("/live/flagged/{number}", service.flagged, {"image/png": {}}, 400, 404, tags=["Monitor"])
    add("/live/reset", service.reset, state, 403, methods=["POST"], tags=["Monitor"])
    add("/live/accept", service.accept, state, 400, 403, methods=["POST"], tags=["Monitor"])
    add("/live/revert", service.revert, state, 403, methods=["POST"], tags=["Monitor"])
    add("/history", service.history, state, 400, 404, tags=["Monitor"])
    add("/history/pictures/{number}", service.history_picture, {"image/png": {}}, 400, 404, tags=["Monitor"])
    for path, (file, media_type) in _STATIC.items():
        app.add_api_route(path, _static(file, media_type), methods=["GET", "HEAD"], include_in_schema=False)


def _static(file: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = (files("neuralmean.service") / "page" / file).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=media_type, headers=_PAGE_HEADERS)

    return page


def _flag(request: Request, name: str, default: str = "false") -> bool:
    value = request.query_params.get(name, default).lower()
    if value not in ("true", "false", "1", "0"):
        raise Refusal(400, f"Expected `{name}` to be true or false, but got {value[:40]!r}.")
    return value in ("true", "1")


def _input_shape(preprocessing: Preprocessing | None) -> tuple[int | None, ...] | None:
    if preprocessing is None:
        return None
    return (preprocessing.channels, *(preprocessing.size or (None, None)))


def _open_monitor(detector: Detector, settings: Settings) -> Monitor:
    if settings.state is not None and Path(settings.state).exists():
        return Monitor.load(settings.state, detector)
    options: dict[str, Any] = {"every": settings.every, "follow": settings.follow}
    return Monitor(detector, window=settings.window, false_alarm_rate=settings.drift_rate, **options)


def _open_history(settings: Settings) -> History | None:
    if settings.history is None:
        return None
    n_pictures = N_PICTURES if settings.thumbnails else 0
    return History(
        settings.history, days=settings.history_days, max_bytes=settings.history_bytes, n_pictures=n_pictures
    )
