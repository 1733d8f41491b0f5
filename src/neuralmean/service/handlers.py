"""What is answered when a request ends with an exception: JSON with one sentence, never a traceback."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from neuralmean.errors import InputError, NeuralMeanError
from neuralmean.service.batching import ClientGoneError
from neuralmean.service.refusal import Refusal

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger("neuralmean.service")


def json_answer(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a value as a JSON answer."""
    return Response(json.dumps(value), status, headers, "application/json")


def add_handlers(app: FastAPI) -> None:
    """Tell the application how exceptions are answered."""
    from fastapi.exceptions import RequestValidationError

    async def refused(_: Request, error: Exception) -> Response:
        status, headers = getattr(error, "status", 400), getattr(error, "headers", None)
        return json_answer({"error": getattr(error, "sentence", str(error))}, status, headers)

    async def unknown(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 400)
        sentences = {
            404: "There is nothing at this address. See /docs for what there is.",
            405: f"Expected another method than {request.method[:20]} at this address. See /docs.",
        }
        sentence = sentences.get(status, str(getattr(error, "detail", "The request cannot be understood.")))
        return json_answer({"error": sentence}, status, getattr(error, "headers", None))

    async def invalid(_: Request, error: Exception) -> Response:
        first = error.errors()[0] if isinstance(error, RequestValidationError) and error.errors() else {}
        where = " ".join(str(part) for part in first.get("loc", ()))[:80]
        return json_answer({"error": f"Expected another value at {where!r}: {first.get('msg', 'it is invalid')}."}, 400)

    async def left(_: Request, __: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def failed(_: Request, error: Exception) -> Response:
        log.error("A request failed: %s: %s", type(error).__name__, error)
        return json_answer({"error": "The server failed on this request. Its log says more."}, 500)

    handlers: dict[type[Exception], Any] = {
        Refusal: refused,
        InputError: refused,
        HTTPException: unknown,
        RequestValidationError: invalid,
        ClientDisconnect: left,
        ClientGoneError: left,
        NeuralMeanError: failed,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
    app.add_exception_handler(Exception, failed)
