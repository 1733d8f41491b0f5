"""The answer to an invalid request: an HTTP status and one sentence."""

from __future__ import annotations

import math


class Refusal(Exception):  # noqa: N818 - not an error of the server: an answer
    """Ends a request with a status and a sentence on what was wrong and what to do.

    Args:
        status: The HTTP status.
        sentence: The message to the client.
        headers: More headers of the answer.
    """

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers or {}


def busy(sentence: str, seconds: float) -> Refusal:
    """Return the refusal of an overloaded server: 503, with the time to try again."""
    return Refusal(503, sentence, {"Retry-After": str(max(1, math.ceil(seconds)))})
