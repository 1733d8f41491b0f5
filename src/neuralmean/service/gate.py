"""What every request passes before it reaches a route: the token, and afterwards the counting.

A plain ASGI middleware, as it is in the way of every request and must cost next to nothing. What is asked all the time goes
straight on to its handler: the way through FastAPI's routes takes longer than all that the handler does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from neuralmean.service.handlers import answer_to
from neuralmean.service.settings import is_authorised

OPEN_PATHS = frozenset(
    {"/", "/docs", "/page/app.js", "/page/style.css", "/page/docs.js", "/v2/health/live", "/v2/health/ready"}
)
"""What may be seen without the token: the page itself holds no data, and load balancers have no token."""

_HEADERS = [(b"x-content-type-options", b"nosniff")]


class Gate:
    """Lets requests through that may pass, and counts all of them.

    Args:
        app: The application behind it.
        token: What requests must carry; None lets everybody in.
        routes: Names of routes to count under; other paths count as "other".
        direct: Handlers of POST requests by path that are called without looking for a route.
        count: Called with route, status and seconds at the end of each request.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: str | None,
        routes: Collection[str],
        direct: Mapping[str, Callable[[Request], Awaitable[Response]]],
        count: Callable[[str, int, float], None],
    ) -> None:
        self._app = app
        self._token = token
        self._routes = frozenset(routes)
        self._direct = direct
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 499  # what is never answered was left by the client

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            if not self._may_pass(scope):
                await _refuse(send_on)
            elif scope["method"] == "POST" and (handler := self._direct.get(scope["path"])) is not None:
                request = Request(scope, receive)
                try:
                    answer = await handler(request)
                except Exception as error:  # noqa: BLE001 - what the routes do with it: an answer
                    answer = answer_to(request, error)
                await answer(scope, receive, send_on)
            else:
                await self._app(scope, receive, send_on)
        finally:
            self._count(self._route(scope), status, time.perf_counter() - begin)

    def _may_pass(self, scope: Scope) -> bool:
        if self._token is None or scope["path"] in OPEN_PATHS:
            return True
        return is_authorised(dict(scope["headers"]).get(b"authorization"), self._token)

    def _route(self, scope: Scope) -> str:
        path = scope["path"]
        last = path.rsplit("/", 1)[-1]
        if path.startswith("/v2/models/"):
            return last if last in ("infer", "ready") else "metadata"
        return path if path in self._routes else "other"


async def _refuse(send: Callable[[Any], Any]) -> None:
    sentence = "Expected the header `Authorization: Bearer TOKEN` with the server's token, but it is missing or wrong."
    body = json.dumps({"error": sentence}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
