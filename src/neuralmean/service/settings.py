"""The limits of the service and the token, checked once at the start."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from neuralmean.errors import InputError

TOKEN_VARIABLE = "NMD_TOKEN"
_SHORTEST_TOKEN = 8
_LONGEST_TOKEN = 4096
_COUNTS = ("max_batch", "queue", "max_body_bytes", "max_bytes_in_flight", "max_pixels", "window", "n_flagged")


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"Expected `{name}` to be a whole number of at least 1, but got {value!r}.")


def _check_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e6:
        raise InputError(f"Expected `{name}` to be a number of at least 0, but got {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds on a connection.

    Attributes:
        header_bytes: Most bytes of a request line with its headers, or of a chunked body's trailers.
        headers: Most headers of a request.
        header_s: Longest time for the headers of a request to arrive.
        idle_s: Longest time between two requests, and for a client to take its answer.
        connections: Most connections in all.
        per_client: Most connections of one address (of one /64 network with IPv6).
    """

    header_bytes: int = 32 * 2**10
    headers: int = 100
    header_s: float = 10.0
    idle_s: float = 30.0
    connections: int = 512
    per_client: int = 128

    def __post_init__(self) -> None:
        for name in ("header_bytes", "headers", "connections", "per_client"):
            _check_count(name, getattr(self, name))
        for name in ("header_s", "idle_s"):
            _check_seconds(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits of the service.

    Attributes:
        max_batch: Most inputs in one forward pass, and in one request.
        max_wait_ms: Longest time that a request waits for others to share its pass, under load; alone it never waits.
        queue: Most inputs that wait; more are refused at once with 503.
        max_body_bytes: Largest request body, unpacked.
        max_bytes_in_flight: Most bytes of request bodies held at a time.
        max_pixels: Largest image, in pixels.
        timeout_s: Longest time for a body to arrive, and for an answer.
        token: What clients must send as `Authorization: Bearer TOKEN`; None allows every client.
        allow_hosts: Host names of the server, in addition to its address and those of this machine; `*` is any.
        thumbnails: Whether the page shows the latest flagged inputs.
        n_flagged: Number of them that are kept.
        window: Length of the monitor's window.
        drift_rate: Probability of ever raising a false drift alarm.
        every: The monitor uses one of every so many inputs; None estimates it.
        follow: Drift is followed rather than reported if at most this share of the inputs since the change is flagged.
        history: File in which decisions and alarms are kept; None keeps none.
        history_days: How long they are kept.
        history_bytes: Approximate maximum size of the file.
        state: File that keeps the monitor's state; None does not keep it.
        state_every_s: How often it is written.
        freeze: Whether to compile the model in the background and use the graph once it is checked; see `Detector.freeze`.
        bounds: Bounds on a connection, enforced by `serve`; another ASGI server has its own.
    """

    max_batch: int = 64
    max_wait_ms: float = 15.0
    queue: int = 256
    max_body_bytes: int = 16 * 2**20
    max_bytes_in_flight: int = 256 * 2**20
    max_pixels: int = 25_000_000
    timeout_s: float = 30.0
    token: str | None = None
    allow_hosts: tuple[str, ...] = ()
    thumbnails: bool = True
    n_flagged: int = 24
    window: int = 512
    drift_rate: float = 0.01
    every: int | None = None
    follow: float | None = None
    history: str | Path | None = None
    history_days: float = 90.0
    history_bytes: int = 2 * 2**30
    state: str | Path | None = None
    state_every_s: float = 30.0
    freeze: bool = False
    bounds: Bounds = Bounds()

    def __post_init__(self) -> None:
        for name in _COUNTS:
            _check_count(name, getattr(self, name))
        for name in ("max_wait_ms", "timeout_s", "state_every_s"):
            _check_seconds(name, getattr(self, name))
        if self.queue < self.max_batch:
            raise InputError(f"Expected `queue` to be at least `max_batch` ({self.max_batch}), but got {self.queue!r}.")
        names: object = self.allow_hosts
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
            raise InputError(f"Expected `allow_hosts` to be a list of names, but got {self.allow_hosts!r}.")
        if self.token is not None:
            check_token(self.token)

    @classmethod
    def from_options(cls, **options: Any) -> Settings:
        """Build from keyword arguments, refusing unknown ones."""
        allowed = [field.name for field in fields(cls)]
        unknown = sorted(set(options) - set(allowed))
        if unknown:
            raise InputError(f"Expected only the options {allowed}, but got {unknown}.")
        return cls(**options)

    def __repr__(self) -> str:
        shown = (
            f"{field.name}={'***' if field.name == 'token' and self.token else repr(getattr(self, field.name))}"
            for field in fields(self)
        )
        return f"Settings({', '.join(shown)})"


def read_token(token: str | None, file: str | Path | None, environment: Mapping[str, str]) -> str | None:
    """Return the token from the argument, a file or `NMD_TOKEN`; None if there is none."""
    if token is not None and file is not None:
        raise InputError("Expected a token or a file that holds it, but got both.")
    if file is not None:
        try:
            with Path(file).open(encoding="utf-8") as handle:
                token = handle.read(_LONGEST_TOKEN + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text"
            raise InputError(f"Expected to read the token from {str(file)!r}, but {reason}.") from None
    if token is None:
        token = environment.get(TOKEN_VARIABLE)
    if token is not None:
        check_token(token)
    return token


def check_token(token: str) -> None:
    """Raise unless a token can be sent in a header and is not easily guessed; the message never shows it."""
    if not isinstance(token, str):
        raise InputError(f"Expected the token to be a text, but got {type(token).__name__}.")
    if len(token) > _LONGEST_TOKEN:
        raise InputError(f"Expected a token of at most {_LONGEST_TOKEN} characters, but it is longer.")
    if not (token.isascii() and token.isprintable() and " " not in token) or len(token) < _SHORTEST_TOKEN:
        raise InputError(
            f"Expected the token to be at least {_SHORTEST_TOKEN} printable ASCII characters without spaces, "
            f"but got {len(token)} characters that are not. Make one with `openssl rand -hex 16`."
        )


def is_authorised(header: bytes | None, token: str) -> bool:
    """Return whether an `Authorization` header carries the token, in constant time."""
    scheme, _, sent = (header or b"").strip().partition(b" ")
    digests = (hashlib.sha256(value).digest() for value in (sent.strip(), token.encode()))
    return hmac.compare_digest(*digests) and scheme.lower() == b"bearer"


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable from this machine only.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
        (True, True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
