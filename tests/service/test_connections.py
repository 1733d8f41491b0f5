"""Clients that send too much, too slowly or too often, on real sockets."""

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from neuralmean.service import create_app
from neuralmean.service.connections import _network, bounded_by_files
from neuralmean.service.handlers import json_answer
from neuralmean.service.launch import _config, _listen, _server
from neuralmean.service.settings import Bounds, Settings
from tests.service.conftest import PREPROCESSING, png


@contextmanager
def serving(app, *, buffer=None, **bounds):
    """The port of a server that runs in a thread; `buffer` is the number of bytes that the system takes for it."""
    listening = _listen("127.0.0.1", 0)
    if buffer:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
    server = _server(_config(app, Bounds(**bounds)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    port = listening.getsockname()[1]
    try:
        for _ in range(3000):
            try:
                if health(port)[0] == 200:
                    break
            except OSError:
                threading.Event().wait(0.01)
        yield port
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def health(port):
    begin = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/v2/health/live")
        return connection.getresponse().status, time.perf_counter() - begin
    finally:
        connection.close()


@pytest.fixture
def app(detector):
    return create_app(detector, PREPROCESSING, name="toy")


@contextmanager
def connected(port):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
        yield client


def is_hung_up_on(client, data, *, times, pause=0.0):
    """Whether the server hangs up while the same bytes come again and again."""
    try:
        for _ in range(times):
            client.sendall(data)
            threading.Event().wait(pause)
    except OSError:
        return True
    return False


def answer_of(client):
    """All that the server sends until it hangs up."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def refusal(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


def test_headers_that_do_not_end_are_refused_long_before_they_fill_the_memory(app):
    with serving(app) as port, connected(port) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        assert is_hung_up_on(client, b"x" * 65536, times=400)  # what the system holds on both sides, and not 80 MB
        assert health(port)[0] == 200


TOO_MUCH = {
    "one_long_header": b"X-Long: " + b"x" * 40_000 + b"\r\n",
    "many_headers": b"X: y\r\n" * 101,
    "many_in_one_piece": b"X: y\r\n" * 2000,
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_too_much_of_headers_is_a_sentence(app, case):
    with serving(app) as port, connected(port) as client:
        client.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n" + TOO_MUCH[case] + b"\r\n")
        status, sentence = refusal(answer_of(client))
        assert status == 431
        assert sentence.startswith("Expected ")


def test_a_long_address_and_long_trailers_count_as_headers(app):
    with serving(app) as port:
        with connected(port) as client:
            client.sendall(b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert refusal(answer_of(client))[0] == 431
        with connected(port) as client:
            head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            client.sendall(head + b"1\r\nx\r\n0\r\n")
            assert is_hung_up_on(client, b"X-Trailer: " + b"x" * 60_000 + b"\r\n", times=400)


def test_as_many_headers_as_allowed_pass_with_a_large_body_behind_them(app):
    with serving(app) as port, connected(port) as client:
        body = png(0, 64)[0]
        head = b"POST /score HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += b"X: y\r\n" * 90 + b"Content-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        assert answer_of(client).startswith(b"HTTP/1.1 200")


def test_half_sent_headers_are_given_up(app):
    with serving(app, header_s=0.2) as port:
        for begin in (b"", b"\r\n\r\n", b"GET /v2/health/live HTTP/1.1\r\nHost: loc"):
            with connected(port) as client:
                client.sendall(begin)
                started = time.perf_counter()
                status, sentence = refusal(answer_of(client))
                assert (status, sentence) == (408, "Expected the request's headers within 0.2 seconds.")
                assert time.perf_counter() - started < 5


def test_a_byte_now_and_then_does_not_keep_a_connection(app):
    with serving(app, header_s=0.3, idle_s=0.3) as port:
        for first in (b"", b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with connected(port) as client:
                client.sendall(first)
                assert is_hung_up_on(client, b"\r\n", times=200, pause=0.02)


def test_idle_connections_are_closed_and_used_ones_kept(app):
    with serving(app, idle_s=0.5) as port, connected(port) as client:
        request = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for _ in range(5):
            client.sendall(request)
            assert client.recv(65536).startswith(b"HTTP/1.1 200")
            threading.Event().wait(0.2)
        assert answer_of(client) == b""


def test_many_half_open_connections_of_one_client_shut_nobody_out(app):
    with serving(app, per_client=20, connections=30, header_s=60) as port, ExitStack() as stack:
        for i in range(100):
            client = stack.enter_context(connected(port))
            client.sendall(b"GET / HTTP/1.1\r\nX: " if i % 2 else b"POST /score HTTP/1.1\r\nContent-Length: 9\r\n\r\nx")
        for _ in range(10):
            status, seconds = health(port)
            assert (status, seconds < 1) == (200, True)


def test_where_all_are_busy_a_new_one_is_told_so(app):
    service = app.state.service
    busy, go_on = threading.Event(), threading.Event()

    async def wait():
        busy.set()
        await asyncio.to_thread(go_on.wait, 20)
        return json_answer({"live": service.ready() is not None})

    app.add_api_route("/wait", wait, methods=["GET"], response_model=None)
    with serving(app, per_client=1, connections=5) as port, connected(port) as first:
        first.sendall(b"GET /wait HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert busy.wait(10)
        with connected(port) as second:
            status, sentence = refusal(answer_of(second))
            assert status == 503
            assert "all are busy" in sentence
        go_on.set()
        assert answer_of(first).startswith(b"HTTP/1.1 200")


def test_what_is_no_http_is_answered_in_json(app):
    with serving(app) as port:
        for junk in (
            b"hello\r\n\r\n",
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET \x00 HTTP/1.1\r\n\r\n",
        ):
            with connected(port) as client:
                client.sendall(junk)
                status, sentence = refusal(answer_of(client))
                assert (status, sentence) == (
                    400,
                    "Expected an HTTP/1.1 request, but it cannot be parsed.",
                )


def test_what_counts_as_one_client():
    assert _network(("10.0.0.1", 5)) == "10.0.0.1"
    assert _network(("::ffff:10.0.0.1", 5)) == "10.0.0.1"
    assert _network(("2001:db8::1", 5)) == _network(("2001:db8::2", 5)) == "2001:db8::/64"
    assert _network(None) == ""


def test_no_more_connections_than_files(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    bounds = bounded_by_files(Bounds())
    assert (bounds.connections, bounds.per_client) == (192, 128)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert bounded_by_files(Bounds()) == Bounds()


GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n"
UNREAD = {
    "kept": (GET % (b"/page", b""), b""),
    "closed": (GET % (b"/page", b"Connection: close\r\n"), b""),
    "another_behind_the_last": (GET % (b"/page", b"Connection: close\r\n") + GET % (b"/page", b""), b""),
    "no_http_behind_it": (GET % (b"/page", b""), b"no HTTP\r\n\r\n"),
    "too_many_headers_behind_it": (GET % (b"/page", b""), GET % (b"/page", b"A: b\r\n" * 2000)),
    "half_a_request_behind_it": (GET % (b"/page", b""), b"GET /"),
}


@pytest.mark.parametrize("case", UNREAD)
def test_an_answer_that_is_not_read_keeps_neither_its_connection_nor_the_server(app, case):
    async def page():
        return json_answer("x" * 50_000)  # less than what asyncio buffers before it says so

    app.add_api_route("/page", page, methods=["GET"], response_model=None)
    with socket.socket() as client, serving(app, buffer=4096, idle_s=0.8, header_s=0.8) as port:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.settimeout(10)
        client.connect(("127.0.0.1", port))
        for part in UNREAD[case]:
            client.sendall(part)
            threading.Event().wait(0.4)
        threading.Event().wait(2)
        assert len(answer_of(client)) < 50_000


def test_a_body_that_does_not_come_keeps_the_server_no_longer_than_headers_would(detector):
    app = create_app(detector, PREPROCESSING, name="toy", settings=Settings(timeout_s=100))
    with socket.socket() as client, serving(app, header_s=0.3) as port:
        client.connect(("127.0.0.1", port))
        client.sendall(b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx")
        assert health(port)[0] == 200


def test_a_body_that_ends_after_the_answer_leaves_an_idle_connection(app):
    with serving(app, idle_s=0.5) as port, connected(port) as client:
        client.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nx")
        assert client.recv(65536).startswith(b"HTTP/1.1 404")
        client.sendall(b"x")
        answer_of(client)  # ends before the client's patience does
