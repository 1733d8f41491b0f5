"""The OpenAPI description of bodies and answers that are read and written by hand."""

from __future__ import annotations

from typing import Any

from neuralmean.service.protocol import INPUT, OUTPUTS


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties}


def _array(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


_TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "number"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_FLAG: dict[str, Any] = {"type": "boolean"}
_SIZE = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}

ERROR = _object(["error"], error=_TEXT)

INFER_REQUEST = _object(
    ["inputs"],
    id={"type": "string", "maxLength": 256},
    parameters={"type": "object"},
    inputs=_array(
        _object(
            ["shape", "datatype"],
            name={"type": "string", "enum": [INPUT]},
            shape=_array(_SIZE, minItems=1, maxItems=8),
            datatype={"type": "string", "enum": ["FP32", "FP64", "FP16"]},
            data={"type": "array", "items": {}, "description": "Flat or nested numbers, in row-major order."},
            parameters={"type": "object"},
        ),
        minItems=1,
        maxItems=1,
    ),
    outputs=_array(_object(["name"], name={"type": "string", "enum": list(OUTPUTS)}, parameters={"type": "object"})),
)
INFER_RESPONSE = _object(
    ["model_name", "model_version", "outputs"],
    id=_TEXT,
    model_name=_TEXT,
    model_version=_TEXT,
    outputs=_array(_object(["name", "datatype", "shape"], name=_TEXT, datatype=_TEXT, shape=_array(_INTEGER))),
)
SCORE_RESPONSE = _object(
    ["threshold", "false_alarm_rate", "results"],
    threshold=_NUMBER,
    false_alarm_rate=_NUMBER,
    results=_array(
        _object(
            ["path", "score", "p_value", "is_ood", "kind"],
            path=_TEXT,
            score=_NUMBER,
            p_value=_NUMBER,
            is_ood=_FLAG,
            predicted=_INTEGER,
            kind=_TEXT,
            kind_sentence=_TEXT,
            sentence=_TEXT,
            reason=_TEXT,
            layers=_array(
                _object(["layer", "contribution", "n_channels"], layer=_TEXT, contribution=_NUMBER, n_channels=_INTEGER)
            ),
            terms={"type": "object", "additionalProperties": _NUMBER},
            exact=_FLAG,
            map={
                "type": ["string", "null"],
                "description": "A JPEG data URI: the image, yellow where its score comes from.",
            },
        )
    ),
)
METADATA = _object(["name"], name=_TEXT)
LIVE = _object(["number", "items", "flagged", "monitor"], number=_INTEGER)
SETUP = _object(["name", "threshold"], name=_TEXT, threshold=_NUMBER)
STATE = {"type": "object"}

_SENTENCES = {
    400: "The request cannot be understood; `error` says why.",
    401: "The token is missing or wrong.",
    403: "A page of another site may not do this.",
    404: "There is no such thing.",
    408: "The body did not arrive in time.",
    413: "Too large: the body, an image or the number of inputs.",
    415: "The body is packed in an unknown way, or images are not served.",
    503: "Too much to do, or not ready; `Retry-After` says when to try again.",
}


def responses(content: dict[str, Any], *statuses: int, text: str = "The answer.") -> dict[int | str, dict[str, Any]]:
    """Return the answers of a route: 200 with `content`, and the refusals it may give."""
    refusals: dict[int | str, dict[str, Any]] = {
        status: {"description": _SENTENCES[status], "content": {"application/json": {"schema": ERROR}}}
        for status in (*statuses, 401)
    }
    return {200: {"description": text, "content": content}, **refusals}


def json_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a JSON answer."""
    return {"application/json": {"schema": schema}}


INFER_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": INFER_REQUEST}}}}
SCORE_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": _object(["file"], file=_array({"type": "string", "format": "binary"}, minItems=1)),
            },
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
        },
    }
}
