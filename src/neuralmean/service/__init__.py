"""The detector with a model in production: HTTP, metrics and a page. Needs `pip install neuralmean[serve]`.

Importing this package imports nothing of the extra; `serve` and `create_app` do. The files:

    connections header bytes, header time and connections, bounded before there is a request
    settings    limits and the token, checked
    refusal     answers to invalid requests: a status and a sentence
    passes      one forward pass: output, decision, vectors, explanation
    freezing    the compiled graph, made in the background and swapped in once it is checked
    workers     passes share the cores: how many at a time, on how many threads
    batching    requests share forward passes: bounded wait, bounded queue
    protocol    the Open Inference Protocol: JSON and binary tensors to arrays and back
    grpc        the same over gRPC, with the same batching
    telemetry   OpenTelemetry traces and metrics
    bodies      request bodies with limits: sizes, compression, multipart, images
    live        content of the page: latest items, flagged thumbnails, the monitor
    metrics     the same for Prometheus
    describe    sentences and numbers for people: why an input was flagged
    service     the detector with all of these: made, started, ended
    verdicts    routes for inputs
    watch       routes for the stream
    pages       the page and the API's description, as files
    gate        checks of every request: host, origin, token; counting and the access log
    logs        lines on stderr: time, level, message; text or JSON
    schema      bodies and answers in the OpenAPI description
    handlers    exceptions to answers
    app         the routes
    launch      from a saved file to a running server
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuralmean.errors import MissingExtraError
from neuralmean.service.settings import Settings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from neuralmean.data.preprocessing import Preprocessing
    from neuralmean.detector.detector import Detector
    from neuralmean.monitor.monitor import Monitor

__all__ = ["Settings", "create_app", "serve"]


def create_app(
    detector: Detector,
    preprocessing: Preprocessing | None = None,
    *,
    name: str = "model",
    settings: Settings | None = None,
    monitor: Monitor | None = None,
) -> FastAPI:
    """Return the application that serves a calibrated detector, to run under any ASGI server.

    Args:
        detector: A calibrated detector with its model.
        preprocessing: Preprocessing of images; None serves tensors only.
        name: Name of the model in addresses.
        settings: Limits and the token.
        monitor: Continues this one; None begins a new one, or the one in `settings.state`.
    """
    _check_extra()
    from neuralmean.service.app import build_app

    return build_app(detector, preprocessing, name=name, settings=settings or Settings(), monitor=monitor)


def serve(
    path: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    rate: float | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    token: str | None = None,
    token_file: str | Path | None = None,
    device: str | None = None,
    trust_local_code: bool = False,
    log_format: str = "text",
    grpc_port: int | None = None,
    telemetry: bool = False,
    **options: Any,
) -> None:
    """Serve a saved detector until SIGTERM or Ctrl+C, then finish accepted requests and return.

    Args:
        path: A file that `Detector.save` or `nmd fit` wrote.
        host: Address to listen on; the default is reachable from this machine only.
        port: Port to listen on; 0 takes a free one.
        name: Name of the model in addresses; None takes the file's stem.
        rate: False-alarm rate, overriding that of the fit.
        model: Spec of the model, overriding the file.
        weights: Weights of the model, likewise.
        token: Clients must send it as `Authorization: Bearer TOKEN`; None reads the environment variable `NMD_TOKEN`.
        token_file: A file that holds the token.
        device: Where the model runs; None is the CPU.
        trust_local_code: Whether the file may name a model in a module of the working folder, which is then imported.
        log_format: Format of the lines on stderr, `text` or `json`.
        grpc_port: Port for the gRPC form of the protocol; None serves HTTP only. Needs `pip install neuralmean[grpc]`.
        telemetry: Whether to send OpenTelemetry traces and metrics over OTLP. Needs `pip install neuralmean[otel]`.
        options: Fields of `Settings`: `max_batch`, `max_wait_ms`, `queue`, `thumbnails`, `state`, and so on.
    """
    _check_extra()
    from neuralmean.files.atomic import check_target
    from neuralmean.service.launch import load_served, run_server
    from neuralmean.service.logs import check_log_format
    from neuralmean.service.settings import read_token
    from neuralmean.service.workers import on_own_thread

    check_log_format(log_format)
    settings = Settings.from_options(token=read_token(token, token_file, os.environ), **options)
    if settings.state is not None:
        check_target(settings.state)
    served = on_own_thread(
        lambda: load_served(
            Path(path),
            name=name,
            rate=rate,
            model=model,
            weights=weights,
            device=device,
            trust_local_code=trust_local_code,
        )
    )
    app = create_app(served.detector, served.preprocessing, name=served.name, settings=settings)
    run_server(app, host=host, port=port, log_format=log_format, grpc_port=grpc_port, telemetry=telemetry)


def _check_extra() -> None:
    import importlib

    for module in ("fastapi", "uvicorn", "httptools", "prometheus_client", "python_multipart", "orjson"):
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingExtraError(
                f"Serving needs the {module!r} package. Install it with `pip install neuralmean[serve]`."
            ) from None
