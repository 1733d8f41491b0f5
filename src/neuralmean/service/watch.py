"""Routes for the stream: the latest inputs, the monitor and its alarm, the history."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from starlette.responses import Response

from neuralmean import __version__
from neuralmean.service.describe import describe_detector
from neuralmean.service.handlers import json_answer
from neuralmean.service.history import read_alarms, read_picture, read_span
from neuralmean.service.refusal import Refusal
from neuralmean.service.service import Service


class Watch:
    """The handlers of these routes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def setup(self) -> Response:
        """The detector's data for the page: in-distribution scores, threshold and its guarantee."""
        service = self._service
        own = {
            "images": service.preprocessing is not None,
            "thumbnails": service.settings.thumbnails,
            "version": __version__,
            "history": service.live.history is not None,
        }
        return json_answer({**describe_detector(service.detector, service.name), **own})

    async def latest(self, since: int = 0) -> Response:
        """The latest items after number `since`, the flagged ones, and the monitor's status."""
        return json_answer(await self._service.watching(partial(self._service.live.snapshot, since)))

    async def flagged(self, number: int) -> Response:
        """A flagged input as PNG."""
        picture = self._service.live.thumbnail(number)
        if picture is None:
            raise Refusal(404, f"Expected a flagged input that is still kept, but number {str(number)[:20]} is not.")
        return Response(picture, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    async def reset(self) -> Response:
        """Switch the drift alarm off and restart the test."""
        self._service.live.reset()
        return json_answer({"drift": False})

    async def accept(self) -> Response:
        """Accept the current stream as normal."""
        await self._service.watching(self._service.live.accept)
        return json_answer({"drift": False})

    async def revert(self) -> Response:
        """Compare the stream with the held-out data again."""
        self._service.live.revert()
        return json_answer({"drift": False})

    async def history(self, span: str = "hours") -> Response:
        """Inputs, flagged inputs and alarms over a day, a month or half a year (`hours`, `days`, `weeks`), and alarms."""
        path = self._history()
        rows, alarms = await self._service.watching(lambda: (read_span(path, span), read_alarms(path)))
        return json_answer({"span": span, "rows": rows, "alarms": alarms})

    async def history_picture(self, number: int) -> Response:
        """A flagged input from the history as PNG."""
        picture = await self._service.watching(partial(read_picture, self._history(), number))
        if picture is None:
            raise Refusal(404, f"Expected a flagged input that is still kept, but number {str(number)[:20]} is not.")
        return Response(picture, media_type="image/png", headers={"Cache-Control": "private, max-age=3600"})

    def _history(self) -> Path:
        if self._service.live.history is None:
            raise Refusal(404, "Expected a server that keeps a history. Start it with --history FILE.")
        return self._service.live.history.path
