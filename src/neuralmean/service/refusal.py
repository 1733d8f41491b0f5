"""What a client is told instead of a result: an HTTP status and one sentence."""

from __future__ import annotations

import math


class Refusal(Exception):  # noqa: N818 - not an error of the server: an answer
    """Ends a request with a status and a sentence that says what was wrong and what to do.

    Args:
        status: The HTTP status.
        sentence: What the client reads.
        headers: More headers of the answer.
    """

    def __init__(self, status: int, sentence: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence
        self.headers = headers or {}


def busy(sentence: str, seconds: float) -> Refusal:
    """Return the refusal of a server that has too much to do: 503, with when to try again."""
    return Refusal(503, sentence, {"Retry-After": str(max(1, math.ceil(seconds)))})
