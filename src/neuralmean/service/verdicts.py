"""Routes for inputs: the Open Inference Protocol for tensors, and `/score` for image files."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from neuralmean.data.preprocessing import Preprocessing
from neuralmean.detector.kinds import SENTENCES
from neuralmean.service.batching import Answer, Batcher, Job
from neuralmean.service.bodies import NamedBytes, decode_images, decode_small, split_files
from neuralmean.service.describe import describe_p_value, describe_reason, layer_profile
from neuralmean.service.handlers import json_answer
from neuralmean.service.maps import draw_maps
from neuralmean.service.protocol import (
    HEADER_LENGTH,
    VERSION,
    encode_infer,
    model_metadata,
    parse_infer,
    server_metadata,
)
from neuralmean.service.refusal import Refusal
from neuralmean.service.service import Service

_SHORT = 64 * 2**10
"""A smaller body takes less time to read than to pass to a thread and back."""


class Verdicts:
    """The handlers of these routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def health_live(self) -> Response:
        """Whether the process runs."""
        return json_answer({"live": True})

    async def health_ready(self) -> Response:
        """Whether requests are taken."""
        self._service.ready()
        return json_answer({"ready": True})

    async def server(self) -> Response:
        """Name, version and extensions of the server."""
        return json_answer(server_metadata())

    async def model(self, name: str, version: str = VERSION) -> Response:
        """Inputs and outputs of the model."""
        self._service.check_name(name, version)
        return json_answer(model_metadata(self._service.name, self._service.spec, self._service.output_shape))

    async def model_ready(self, name: str, version: str = VERSION) -> Response:
        """Whether the model takes requests."""
        self._service.check_name(name, version)
        self._service.ready()
        return json_answer({"name": self._service.name, "ready": True})

    async def infer(self, request: Request) -> Response:
        """Answer for the model of this server."""
        batcher = self._service.ready()
        with self._service.reader.holding() as hold:
            with batcher.arriving():
                body = await self._service.reader.read(request, hold)
                read = partial(parse_infer, body, request.headers.get(HEADER_LENGTH), self._service.spec)
                wanted = read() if len(body) <= _SHORT else await self._service.aside(read)
                del body, read
            job = Job(torch.from_numpy(wanted.inputs))
            (answer,) = await self._run(batcher, request, [job])
        body, header_length = encode_infer(wanted, answer.arrays(), self._service.name)
        if header_length is None:
            return Response(body, media_type="application/json")
        headers = {HEADER_LENGTH: str(header_length)}
        return Response(body, media_type="application/octet-stream", headers=headers)

    async def infer_by_name(self, request: Request, name: str, version: str = VERSION) -> Response:
        """The model's output, score, p-value and decision for a tensor (Open Inference Protocol, JSON or binary)."""
        self._service.check_name(name, version)
        return await self.infer(request)

    async def score(self, request: Request) -> Response:
        """Score, p-value and decision for image files: a form with files, or the bytes of one file as the body.

        With `watch=false` they do not count as part of the stream that the monitor watches.
        """
        explain, watched = _flag(request, "explain"), _flag(request, "watch", "true")
        batcher, preprocessing = self._service.ready(), self._service.preprocessing
        if preprocessing is None:
            raise Refusal(415, "Expected a detector with preprocessing for images, but this one has none.")
        with self._service.reader.holding() as hold:
            with batcher.arriving():
                body = await self._service.reader.read(request, hold)
                named = await self._files(request, body)
                del body
                inputs = await self._decode(named, preprocessing)
            self._service.reader.add(hold, sum(array.nbytes for array in inputs))
            jobs = [Job(preprocessing.normalise(array), explain, watched) for array in inputs]
            answers = await self._run(batcher, request, jobs)
            answer = self._score_answer(named, answers, explain=explain)
            if explain:
                draw = partial(draw_maps, self._service.detector, [job.inputs for job in jobs], preprocessing)
                maps = await self._service.aside(draw)
                for result, uri in zip(answer["results"], maps, strict=False):
                    result["map"] = uri
        return json_answer(answer)

    async def _files(self, request: Request, body: bytes) -> list[NamedBytes]:
        """Return the image files in a body."""
        split = partial(split_files, request, body, self._service.settings.max_batch)
        return await split() if len(body) <= _SHORT else await self._service.aside(lambda: asyncio.run(split()))

    async def _decode(self, named: list[NamedBytes], preprocessing: Preprocessing) -> list[NDArray[np.uint8]]:
        """Return the images as one batch, or as one batch each if they differ in size."""
        limits = {
            "max_pixels": self._service.settings.max_pixels,
            "max_bytes": self._service.settings.max_bytes_in_flight // 2,
        }
        if preprocessing.size is None:  # such images keep their size
            limits["max_pixels"] = min(limits["max_pixels"], self._service.settings.max_body_bytes // 4)
        images = decode_small(named, preprocessing, **limits)
        if images is not None:
            return images
        decode = partial(decode_images, named, preprocessing, **limits)
        return await self._service.aside(decode)

    async def _run(self, batcher: Batcher, request: Request, jobs: list[Job]) -> list[Answer]:
        async def gone() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        return await batcher.submit(jobs, timeout=self._service.settings.timeout_s, gone=gone)

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
        if explain and explanation is not None and self._service.detector.calibration is not None:
            result["sentence"] = describe_p_value(p_value, len(self._service.detector.calibration.scores))
            result["reason"] = describe_reason(explanation, explained, is_ood=is_ood)
            result["layers"] = layer_profile(explanation, explained)
            result["terms"] = {name: values[explained].item() for name, values in explanation.terms.items()}
            result["exact"] = explanation.exact
        return result


def _flag(request: Request, name: str, default: str = "false") -> bool:
    value = request.query_params.get(name, default).lower()
    if value not in ("true", "false", "1", "0"):
        raise Refusal(400, f"Expected `{name}` to be true or false, but got {value[:40]!r}.")
    return value in ("true", "1")
