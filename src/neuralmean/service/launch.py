"""Runs a server from a saved file, with a clean shutdown."""

from __future__ import annotations

import logging
import math
import signal
import socket
import sys
import threading
import time
from collections.abc import Collection, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.detector import Detector
from neuralmean.detector.saved import open_saved
from neuralmean.errors import InputError, NeuralMeanError
from neuralmean.service.logs import set_up_logs
from neuralmean.service.settings import Bounds, is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("neuralmean.service")

SWITCH_S = 0.0005
"""How long one thread may keep Python's lock while others wait for it: passes need it after every layer."""


@dataclass(frozen=True)
class Served:
    """The content of a saved file for the service."""

    detector: Detector
    preprocessing: Preprocessing | None
    name: str


def load_served(
    path: Path,
    *,
    name: str | None = None,
    rate: float | None = None,
    model: str | None = None,
    weights: str | Path | None = None,
    device: str | None = None,
    trust_local_code: bool = False,
) -> Served:
    """Read a saved detector and build the model that it belongs to.

    Args:
        path: The saved file; its header says how to build the model and prepare images.
        name: Name of the model; None takes the file's stem.
        rate: False-alarm rate, overriding that of the fit.
        model: Spec of the model, overriding the file.
        weights: Weights of the model, overriding the file.
        device: Where the model runs; None is the CPU.
        trust_local_code: Whether the file may name a model in a module of the working folder.
    """
    opened = open_saved(path, model=model, weights=weights, rate=rate, device=device, trust_local_code=trust_local_code)
    return Served(opened.detector, opened.preprocessing, name or path.stem)


def run_server(
    app: FastAPI,
    *,
    host: str,
    port: int,
    log_format: str = "text",
    grpc_port: int | None = None,
    telemetry: bool = False,
) -> None:
    """Serve until SIGTERM or Ctrl+C; accepted requests are answered before this returns.

    Args:
        app: The application.
        host: Address to listen on.
        port: Port to listen on.
        log_format: `text` or `json`.
        grpc_port: Port for the gRPC form of the protocol; None serves HTTP only.
        telemetry: Whether to send OpenTelemetry traces and metrics.
    """
    set_up_logs(log_format)
    add_companions(app, host=host, grpc_port=grpc_port, telemetry=telemetry)
    listening = _listen(host, port)
    if not is_loopback(host) and app.state.service.settings.token is None:
        log.warning("Anyone who can reach %s can use this server. Set a token, or keep it on 127.0.0.1.", host)
    config = _config(app, app.state.service.settings.bounds)
    ready = f"Serving {app.state.service.name} on {address(listening)}"
    with listening, _switching(SWITCH_S):
        _server(config, ready).run(sockets=[listening])
    wait_for_threads(app.state.service.thread_ids)


def add_companions(app: FastAPI, *, host: str, grpc_port: int | None, telemetry: bool) -> None:
    """Add what runs next to HTTP, in the same event loop: gRPC and telemetry."""
    service = app.state.service
    if grpc_port is not None:
        from neuralmean.service.grpc import GrpcServer

        service.companions.append(GrpcServer(service, host, grpc_port))
    if telemetry:
        from neuralmean.service.telemetry import Telemetry, TraceRequests

        sender = Telemetry(lambda: service.live.monitor, lambda: service.batcher)
        service.companions.append(sender)
        app.add_middleware(TraceRequests, telemetry=sender)


def wait_for_threads(ids: Collection[int], seconds: float = 5.0) -> None:
    """Wait, on Linux, until threads that have ended for Python have ended for the system too.

    The last thing that torch does on a thread is to ask for Python. Where Python has come to its end by then, the process is
    aborted.
    """
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/self/task/{number}").exists() for number in ids) and time.monotonic() < deadline:
        time.sleep(0.005)


@contextmanager
def _switching(seconds: float) -> Generator[None, None, None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def address(listening: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        listening = socket.socket(family, kind, protocol)
        try:
            if sys.platform != "win32":
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
        except OSError:
            listening.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(f"Expected to listen on {host!r} port {port}, but {reason}. Choose another port.") from None
    return listening


def _config(app: FastAPI, bounds: Bounds) -> Any:
    """Return uvicorn's settings: HTTP only, each connection within bounds."""
    import uvicorn

    from neuralmean.service.connections import Connections, GuardedProtocol, bounded_by_files

    protocol: Any = partial(GuardedProtocol, shared=Connections(bounded_by_files(bounds)))
    options: dict[str, Any] = {
        "log_level": "error",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "backlog": 2048,
        # By then every request has its answer; what is left are clients that take minutes to read it.
        "timeout_graceful_shutdown": math.ceil(app.state.service.settings.timeout_s) + 5,
    }
    return uvicorn.Config(app, http=protocol, ws="none", proxy_headers=False, **options)


def _server(config: Any, ready: str | None = None) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            """Announce the server once it answers."""
            with suppress(SystemExit):  # its exit code would have another meaning here
                await super().startup(sockets)
            if not self.started:
                raise NeuralMeanError("Expected the server to start, but it did not. The log above says why.")
            if ready is not None:
                log.info("%s", ready)

        @contextmanager
        def capture_signals(self) -> Generator[None, None, None]:
            """Shut down cleanly on SIGTERM and Ctrl+C; uvicorn itself would raise them again at the end."""
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            wishes = (signal.SIGINT, signal.SIGTERM)
            before = {wish: signal.signal(wish, self.handle_exit) for wish in wishes}
            try:
                yield
            finally:
                for wish, handler in before.items():
                    signal.signal(wish, handler)

    return Server(config)
