"""Checks of every request before it reaches a route: host, origin and token; counting afterwards.

Any page in a browser on this machine can send requests here. So a request must be addressed to a known name of this server
(otherwise DNS rebinding could read everything), and requests that change something or show pictures
must not come from a page of another site.

A plain ASGI middleware, because every request passes through it. Frequent requests go
straight to their handler: FastAPI's routing takes longer than the handler itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neuralmean.service.handlers import answer_to
from neuralmean.service.refusal import Refusal
from neuralmean.service.settings import is_authorised, is_loopback

log = logging.getLogger("neuralmean.service.access")

OPEN_PATHS = frozenset(
    {
        "/",
        "/docs",
        "/openapi.json",
        "/page/app.js",
        "/page/style.css",
        "/page/docs.js",
        "/v2/health/live",
        "/v2/health/ready",
    }
)
"""Paths that need no token: the page itself holds no data, and load balancers have no token."""

_ASKED_ALL_THE_TIME = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics", "/live"})
_SHOWS = ("/live", "/history")  # inputs, also as pictures
_HEADERS = [(b"x-content-type-options", b"nosniff"), (b"cross-origin-resource-policy", b"same-origin")]


class Gate:
    """Checks and counts requests.

    Args:
        app: The application behind it.
        token: What requests must carry; None allows every client.
        allow_hosts: Host names of the server, in addition to its address and those of this machine; `*` is any.
        routes: Names of routes to count under; other paths count as "other".
        direct: Handlers of POST requests by path that are called without looking for a route.
        count: Called with route, status and seconds at the end of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        allow_hosts: Collection[str],
        routes: Collection[str],
        direct: Mapping[str, Callable[[Request], Awaitable[Response]]],
        count: Callable[[str, int, float], None],
    ) -> None:
        self._app = app
        self._token = token
        self._hosts = frozenset(name.lower() for name in allow_hosts)
        self._routes = frozenset(routes)
        self._direct = direct
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 499  # without an answer, the client disconnected

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            request = Request(scope, receive)
            if (refusal := self._refusal(scope)) is not None:
                await answer_to(request, refusal)(scope, receive, send_on)
            elif scope["method"] == "POST" and (handler := self._direct.get(scope["path"])) is not None:
                try:
                    answer = await handler(request)
                except Exception as error:  # noqa: BLE001 - what the routes do with it: an answer
                    answer = answer_to(request, error)
                    error.__traceback__ = None  # its frames hold the body, until garbage is collected
                await answer(scope, receive, send_on)
            else:
                await self._app(scope, receive, send_on)
        finally:
            seconds = time.perf_counter() - begin
            self._count(self._route(scope), status, seconds)
            _log_access(scope, status, seconds)

    def _refusal(self, scope: Scope) -> Refusal | None:
        """Return why a request is refused, None if it may pass."""
        found: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            found.setdefault(name, []).append(value)
        hosts = found.get(b"host", [])
        if len(hosts) > 1 or (not hosts and scope.get("http_version", "1.1") != "1.0"):
            return Refusal(400, f"Expected one `Host` header, but got {len(hosts)}.")
        host = hosts[0].decode("latin-1").strip().lower() if hosts else ""
        if hosts and not self._knows_host(host, scope):
            return Refusal(
                403,
                f"Expected the name of this server as `Host`, but got {host[:80]!r}. If it is one, start the server with "
                "`--allow-host NAME`.",
            )
        concerns = scope["method"] not in ("GET", "HEAD") or scope["path"].startswith(_SHOWS)
        if concerns and not self._is_own(found, host):
            return Refusal(
                403,
                "Expected this request from the server's own page or a program, but it comes from a page of another site.",
            )
        if self._token is None or scope["path"] in OPEN_PATHS:
            return None
        sent = found.get(b"authorization", [])
        if len(sent) == 1 and is_authorised(sent[0], self._token):
            return None
        return Refusal(
            401,
            "Expected the header `Authorization: Bearer TOKEN`, once, with the server's token, but it is missing or wrong.",
            {"WWW-Authenticate": "Bearer"},
        )

    def _knows_host(self, host: str, scope: Scope) -> bool:
        name = _name_of(host)
        own = (scope.get("server") or ("",))[0]
        return bool(name) and ("*" in self._hosts or name in self._hosts or name == own or is_loopback(name))

    def _is_own(self, found: Mapping[bytes, list[bytes]], host: str) -> bool:
        """Return whether a request comes from the server's own page, or from no page at all."""
        if any(value not in (b"same-origin", b"none") for value in found.get(b"sec-fetch-site", [])):
            return False
        for value in found.get(b"origin", []):
            origin = value.decode("latin-1").strip().lower()
            scheme, mark, authority = origin.partition("://")
            standard = {"http": ":80", "https": ":443"}.get(scheme, "")
            is_same = authority.removesuffix(standard) == host.removesuffix(standard)
            if not mark or not (is_same or _name_of(authority) in self._hosts):
                return False
        return True

    def _route(self, scope: Scope) -> str:
        path = scope["path"]
        last = path.rsplit("/", 1)[-1]
        if path.startswith("/v2/models/"):
            return last if last in ("infer", "ready") else "metadata"
        return path if path in self._routes else "other"


def _name_of(host: str) -> str:
    """Return the name in `NAME:PORT`, without brackets and a last dot; empty if it is invalid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".") if "@" not in host else ""
    except ValueError:
        return ""


def _log_access(scope: Scope, status: int, seconds: float) -> None:
    if not log.isEnabledFor(logging.INFO) or (status == 200 and scope["path"] in _ASKED_ALL_THE_TIME):
        return
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")[:200].encode("unicode_escape").decode()
    client = (scope.get("client") or ("-",))[0]
    more = {"method": scope["method"], "path": path, "status": status, "ms": round(1000 * seconds, 1), "client": client}
    log.info("%(method)s %(path)s %(status)d in %(ms).1f ms for %(client)s", more, extra=more)
