"""Answers to requests that end with an exception: JSON with one sentence, never a traceback."""

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


def answer_to(request: Request, error: Exception) -> Response:
    """Return the answer to a request that ended with an exception."""
    from fastapi.exceptions import RequestValidationError

    if isinstance(error, (ClientDisconnect, ClientGoneError)):
        return Response(status_code=499)  # the client is gone
    if isinstance(error, Refusal):
        return json_answer({"error": error.sentence}, error.status, error.headers)
    if isinstance(error, InputError):
        return json_answer({"error": str(error)}, 400)
    if isinstance(error, HTTPException):
        return _unknown(request, error)
    if isinstance(error, RequestValidationError):
        first = error.errors()[0] if error.errors() else {}
        where = " ".join(str(part) for part in first.get("loc", ()))[:80]
        return json_answer({"error": f"Expected another value at {where!r}: {first.get('msg', 'it is invalid')}."}, 400)
    log.error("A request failed: %s: %s", type(error).__name__, error)
    return json_answer({"error": "The server failed on this request. Its log says more."}, 500)


def add_handlers(app: FastAPI) -> None:
    """Register the handlers of exceptions."""
    from fastapi.exceptions import RequestValidationError

    async def handler(request: Request, error: Exception) -> Response:
        return answer_to(request, error)

    # A handler of `Exception` alone would raise it again after the answer, and the server would log a traceback.
    expected = (Refusal, NeuralMeanError, HTTPException, RequestValidationError, ClientDisconnect, ClientGoneError)
    for kind in (*expected, Exception):
        app.add_exception_handler(kind, handler)


def _unknown(request: Request, error: HTTPException) -> Response:
    sentences = {
        404: "There is nothing at this address. See /docs for what there is.",
        405: f"Expected another method than {request.method[:20]} at this address. See /docs.",
    }
    sentence = sentences.get(error.status_code, str(error.detail))
    return json_answer({"error": sentence}, error.status_code, dict(error.headers or {}))
