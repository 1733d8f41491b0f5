"""Bounds on every connection before a request exists: header bytes and counts, time, number of connections.

uvicorn's protocol hands requests to the application once their headers are complete, and sets no bounds until then. This one
adds them: bytes reach the parser in small pieces, and a client that exceeds a bound on bytes or
time gets an error and is disconnected. When there are too many connections, the one that has kept the server
waiting longest is closed. Needs the `serve` extra.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import sys
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol  # noqa: TID253 - loaded with the server only

from neuralmean.service.settings import Bounds

log = logging.getLogger("neuralmean.service")

PIECE = 16 * 2**10
PIPELINED = 16
"""Most requests that wait on one connection for the answers before theirs: a few bytes each, and kilobytes in Python."""
SPARE_FILES = 64
"""Descriptors reserved for uses other than connections."""


@dataclass
class Connections:
    """The open connections, and which of them to close when there are too many."""

    bounds: Bounds
    open: dict[GuardedProtocol, None] = field(default_factory=dict)  # in the order in which they came to wait
    by_client: Counter[str] = field(default_factory=Counter)

    def admit(self, new: GuardedProtocol) -> bool:
        """Add a connection, if necessary by closing one that keeps the server waiting; False if all are busy."""
        if self.by_client[new.address] >= self.bounds.per_client and not self._drop_one(new.address):
            return False
        if len(self.open) >= self.bounds.connections and not self._drop_one(self.by_client.most_common(1)[0][0]):
            return False
        self.open[new] = None
        self.by_client[new.address] += 1
        return True

    def leave(self, gone: GuardedProtocol) -> None:
        """Forget a connection."""
        if gone in self.open:
            del self.open[gone]
            self.by_client[gone.address] -= 1
            if not self.by_client[gone.address]:
                del self.by_client[gone.address]

    def waits_anew(self, connection: GuardedProtocol) -> None:
        """Record that a connection was just active: others are closed before it."""
        if connection in self.open:
            del self.open[connection]
            self.open[connection] = None

    def _drop_one(self, address: str) -> bool:
        own = [connection for connection in self.open if connection.address == address]
        # Those that have not even asked go first, then those whose body does not come.
        for is_waiting in (GuardedProtocol.waits_for_request, GuardedProtocol.waits_for_body):
            for connection in own:
                if is_waiting(connection):
                    self.leave(connection)
                    connection.transport.abort()
                    return True
        return False


def bounded_by_files(bounds: Bounds) -> Bounds:
    """Return the bounds with no more connections than the system allows this process files."""
    if sys.platform == "win32":
        return bounds
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return bounds
    connections = max(1, min(bounds.connections, allowed - SPARE_FILES))
    return Bounds(**{**vars(bounds), "connections": connections, "per_client": min(bounds.per_client, connections)})


class GuardedProtocol(HttpToolsProtocol):
    """One connection, within bounds.

    Args:
        shared: All connections of the server.
        options: What uvicorn passes.
    """

    def __init__(self, *, shared: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._shared, self._bounds = shared, shared.bounds
        self.address = ""
        self._refused = False
        self._in_head = False
        self._n_quiet = 0  # bytes since the parser last completed something
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Accept the connection, or answer that there are too many."""
        super().connection_made(transport)
        self.address = _network(self.client)
        if not self._shared.admit(self):
            self._refuse(503, "Expected fewer connections at a time: all are busy. Try again later.")
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._shared.leave(self)
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the parser as long as it makes progress."""
        start = 0
        while start < len(data) and not (self._refused or self.transport.is_closing()):
            # Never more than one byte too many, so that headers of that size are not complete before they are refused.
            piece = data[start : start + min(PIECE, self._bounds.header_bytes + 1 - self._n_quiet)]
            start += len(piece)
            self._n_quiet += len(piece)
            super().data_received(piece)
            if self._n_quiet > self._bounds.header_bytes:
                self._refuse(
                    431, f"Expected headers of at most {self._bounds.header_bytes} bytes, but they are larger."
                )
            elif self.headers is not None and len(self.headers) > self._bounds.headers:
                self._refuse(431, f"Expected at most {self._bounds.headers} headers, but got more.")

    def waits_for_request(self) -> bool:
        """Whether the next request is still to come, whole or in part."""
        return self.cycle is None or bool(self.cycle.response_complete)

    def may_be_answered(self) -> bool:
        """Whether an answer that is written now does not end up in the middle of another, or before one that is due."""
        return self.waits_for_request() or not (self.pipeline or self.cycle.response_started)

    def waits_for_body(self) -> bool:
        """Whether the body of the latest request is still to come."""
        return self.cycle is not None and bool(self.cycle.more_body)

    def on_message_begin(self) -> None:
        """Begin to wait for headers."""
        self._in_head = True
        self._await_headers()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header, up to one too many."""
        if len(self.headers) <= self._bounds.headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request whose headers are within bounds; the others are refused when the parser returns."""
        self._in_head = False
        self._n_quiet = 0
        if self._refused:
            return
        self._stop_timer()
        if len(self.pipeline) >= PIPELINED:
            self._refuse(429, f"Expected at most {PIPELINED} requests ahead of their answers, but got more.")
        elif len(self.headers) <= self._bounds.headers:
            super().on_headers_complete()
        else:
            self._refuse(431, f"Expected at most {self._bounds.headers} headers, but got more.")

    def on_body(self, body: bytes) -> None:
        """Pass on a part of the body."""
        self._n_quiet = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the body."""
        self._n_quiet = 0
        if not self._refused:
            if not self.waits_for_request():  # else it is the timer of an idle connection
                self._stop_timer()
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request, which no single byte puts off."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # the timer below does its work, and bytes do not stop it
        self._shared.waits_anew(self)
        if self.transport.is_closing():
            self._abort_later()
        elif self.waits_for_request() and not self._in_head:
            self._start_timer(self._bounds.idle_s, self._end_idle)

    def shutdown(self) -> None:
        """Close the connection once its requests are answered; a body that is still to come has as long as headers have."""
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later()
        elif self.waits_for_body():
            self._start_timer(self._bounds.header_s, self.transport.abort)

    def pause_writing(self) -> None:
        """Limit the time for a client to read its answer."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._bounds.idle_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with the usual error format."""
        self._refuse(400, "Expected an HTTP/1.1 request, but it cannot be parsed.")

    def _unsupported_upgrade_warning(self) -> None:
        """Ignore it: a request for another protocol is answered in HTTP/1.1."""

    def _await_headers(self) -> None:
        self._start_timer(self._bounds.header_s, self._end_head)

    def _end_head(self) -> None:
        if self.waits_for_request():
            self._refuse(408, f"Expected the request's headers within {self._bounds.header_s:g} seconds.")
        else:  # half a request behind one that is not answered yet
            self.transport.abort()

    def _end_idle(self) -> None:
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _abort_later(self) -> None:
        """Limit the time for a client to read the last answer: a transport that is closing waits for that without end."""
        self._start_timer(self._bounds.idle_s, self.transport.abort)

    def _start_timer(self, seconds: float, then: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, status: int, sentence: str) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_timer()
        log.info("Refused a connection: %s", sentence, extra={"client": self.address, "status": status})
        if not self.may_be_answered() and not self.waits_for_body():
            self.cycle.keep_alive = False  # it is closed after the answers that are due
            return
        if self.may_be_answered():
            self.transport.write(_answer(status, sentence))
        self.transport.close()
        self._abort_later()


def _answer(status: int, sentence: str) -> bytes:
    body = json.dumps({"error": sentence}).encode()
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "x-content-type-options: nosniff",
        "connection: close",
        *(["retry-after: 1"] if status == 503 else []),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def _network(client: tuple[str, int] | None) -> str:
    """Return the key of a client: an IPv4 address, or a /64 network of IPv6."""
    try:
        address = ipaddress.ip_address((client or ("",))[0].partition("%")[0])
    except ValueError:  # a Unix socket
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)
