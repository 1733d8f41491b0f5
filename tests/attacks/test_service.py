"""A service among clients and pages that mean harm: what a few bytes must not cost, and who must not see what."""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
import zlib
from contextlib import ExitStack

import pytest

pytest.importorskip("fastapi")

from neuralmean.service import Settings, create_app
from neuralmean.service.connections import PIPELINED, SPARE_FILES
from neuralmean.service.protocol import MOST_PARTS
from tests.service.conftest import PREPROCESSING, ask, detector, png, running  # noqa: F401 - a fixture
from tests.service.test_connections import answer_of, connected, health, refusal, serving

INFER = "/v2/models/toy/infer"
SIZE = 16 * 2**20 - 200


@pytest.fixture
def app(detector):
    return create_app(detector, PREPROCESSING, name="toy")


JSON_BOMBS = {
    "brackets": b"[" * SIZE,
    "empty_objects": b'{"inputs":[' + b"{}," * (SIZE // 3 - 10) + b"{}]}",
    "objects": b'{"inputs":[' + b'{"a":1},' * (SIZE // 8 - 10) + b"1]}",
    "names": b"{" + b",".join(b'"%d":1' % i for i in range(1_200_000)) + b"}",
    # Took 14 seconds, in which nobody was answered.
    "nested_data": b'{"inputs":[{"name":"input","shape":[1,3,8,8],"datatype":"FP32","data":['
    + b"[[[]]]," * (SIZE // 8)
    + b"1]}]}",
}


@pytest.mark.parametrize("name", JSON_BOMBS)
def test_json_that_unpacks_to_many_times_its_size_is_not_unpacked(app, name):
    answer = ask(app, "POST", INFER, content=JSON_BOMBS[name])
    assert answer.status_code == 413
    assert f"at most {MOST_PARTS:,} lists, objects and names" in answer.json()["error"]


def test_what_is_almost_json_is_read_slowly_only_where_it_is_small(app):
    small = b'{"inputs":[{"name":"input","shape":[1,3,8,8],"datatype":"FP32","data":[' + b"NaN," * 191 + b"NaN]}]}"
    assert "got NaN or Inf" in ask(app, "POST", INFER, content=small).json()["error"]
    large = small.replace(b"NaN]", b"1," * 2**20 + b"NaN]")
    assert "cannot be read as such" in ask(app, "POST", INFER, content=large).json()["error"]


def test_a_tensor_of_megabytes_as_json_does_not_keep_others_waiting(app):
    body = json.dumps(
        {"inputs": [{"name": "input", "shape": [9, 3, 8, 8], "datatype": "FP32", "data": [0.5] * 400_000}]}
    )

    async def go():
        async with running(app) as client:
            asking = asyncio.create_task(client.post(INFER, content=body))
            slowest = 0.0
            while not asking.done():
                begin = time.perf_counter()
                assert (await client.get("/v2/health/live")).status_code == 200
                slowest = max(slowest, time.perf_counter() - begin)
                await asyncio.sleep(0.01)
            return slowest, await asking

    slowest, answer = asyncio.run(go())
    assert "to hold 1728 numbers" in answer.json()["error"]
    assert slowest < 1


def _chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(side):
    """A PNG of one colour: small in the file, large unpacked."""
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")


def test_many_large_images_in_small_files_are_refused_together(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(max_pixels=400_000))
    image = bomb(632)
    assert len(image) < 1000
    files = [("file", (f"{i}.png", image)) for i in range(4)]
    assert ask(app, "POST", "/score", files=files).status_code == 200
    answer = ask(app, "POST", "/score", files=[*files, files[0]])
    assert answer.status_code == 413
    assert "at most 1,600,000 pixels together" in answer.json()["error"]
    assert ask(app, "POST", "/score", content=bomb(640)).status_code == 413


def test_what_takes_too_long_to_unpack_is_given_up(detector, monkeypatch):
    app = create_app(detector, PREPROCESSING, settings=Settings(timeout_s=0.2))
    monkeypatch.setattr("neuralmean.service.verdicts.decode_small", lambda *_, **__: None)
    monkeypatch.setattr("neuralmean.service.verdicts.decode_images", lambda *_, **__: time.sleep(0.6))
    answer = ask(app, "POST", "/score", content=png()[0])
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "longer than 0.2 seconds to read the request" in answer.json()["error"]


REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


def test_requests_that_do_not_wait_for_answers_are_answered_up_to_a_number(app):
    with serving(app) as port:
        with connected(port) as client:
            client.sendall(REQUEST * PIPELINED)
            client.sendall(b"no HTTP\r\n\r\n")  # ends it
            assert answer_of(client).count(b"HTTP/1.1 200") == PIPELINED
        with connected(port) as client:
            client.sendall(REQUEST * 5000)
            assert answer_of(client).count(b"HTTP/1.1 200") <= PIPELINED + 1
        assert health(port)[0] == 200


SMUGGLED = {
    "two_lengths": b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nabcde",
    "length_and_chunks": b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + REQUEST,
    "chunks_twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n" + REQUEST,
    "other_coding": b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + REQUEST,
    "space_before_the_colon": b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + REQUEST,
    "length_below_zero": b"Content-Length: -4\r\n\r\n" + REQUEST,
    "length_with_a_sign": b"Content-Length: +4\r\n\r\nabcd" + REQUEST,
    "size_that_overflows": b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n" + REQUEST,
    "folded_header": b"X: a\r\n Content-Length: 4\r\n\r\nabcd" + REQUEST,
    "bare_line_feeds": b"X: a\n\n" + REQUEST,
    "nothing_in_a_header": b"X: a\0b\r\n\r\n" + REQUEST,
}


@pytest.mark.parametrize("name", SMUGGLED)
def test_a_request_that_two_servers_could_read_differently_is_refused(app, name):
    with serving(app) as port, connected(port) as client:
        client.sendall(b"POST /live/reset HTTP/1.1\r\nHost: localhost\r\n" + SMUGGLED[name])
        answer = answer_of(client)
        assert len(re.findall(rb"HTTP/1.1 \d", answer)) == 1
        status, sentence = refusal(answer)
        assert (status, sentence) == (400, "Expected an HTTP/1.1 request, but it cannot be parsed.")


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
def test_another_protocol_is_not_spoken(app, protocol):
    with serving(app) as port, connected(port) as client:
        head = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: "
        client.sendall(head + protocol + b"\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
        assert answer_of(client).startswith(b"HTTP/1.1 200")


def test_numbers_of_any_size_are_answered(detector, tmp_path):
    app = create_app(detector, PREPROCESSING, settings=Settings(history=tmp_path / "h.db"))

    async def go():
        async with running(app) as client:
            for number in (0, -1, 2**63 - 1, 2**63, 10**40, 10**4200):
                for path in (f"/history/pictures/{number}", f"/live/flagged/{number}"):
                    answer = await client.get(path)
                    assert answer.status_code in (400, 404), path
                    assert len(answer.content) < 300

    asyncio.run(go())


@pytest.mark.parametrize("headers", [{"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}], ids=str)
@pytest.mark.parametrize("path", ["/history", "/history/pictures/1", "/%68istory", "/live/flagged/1", "/liv%65"])
def test_a_page_of_another_site_sees_no_inputs(detector, tmp_path, path, headers):
    app = create_app(detector, PREPROCESSING, settings=Settings(history=tmp_path / "h.db"))
    assert ask(app, "GET", path, headers=headers).status_code == 403


def test_the_page_is_shown_in_no_frame_and_its_pictures_on_no_other_site(app):
    page = ask(app, "GET", "/")
    assert "frame-ancestors 'none'" in page.headers["content-security-policy"]
    assert "base-uri 'none'" in page.headers["content-security-policy"]
    for path in ("/", "/live", "/v2/health/live"):
        assert ask(app, "GET", path).headers["cross-origin-resource-policy"] == "same-origin"


def test_the_description_is_written_once_and_not_for_every_client(app, monkeypatch):
    first = ask(app, "GET", "/openapi.json")
    assert "/score" in first.json()["paths"]
    monkeypatch.setattr("json.dumps", None)
    monkeypatch.setattr(app, "openapi", None)
    again = ask(app, "GET", "/openapi.json")
    assert (again.status_code, again.headers["content-type"]) == (200, "application/json")
    assert again.content == first.content


def test_a_name_that_is_html_is_text_in_the_answer(app):
    name = "<img src=x onerror=alert(1)>\x1b[31m.png"
    answer = ask(app, "POST", "/score", files={"file": (name, png()[0])})
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.json()["results"][0]["path"].startswith("<img")
    assert b"\x1b" not in answer.content


def test_260_half_open_connections_do_not_shut_a_server_with_256_descriptors(app):
    kinds = (b"", b"GET / HT", REQUEST, b"POST /score HTTP/1.1\r\nContent-Length: 9\r\n\r\nx")
    with serving(app, connections=256 - SPARE_FILES) as port, ExitStack() as stack:
        for i in range(260):
            stack.enter_context(connected(port)).sendall(kinds[i % 4])
        for _ in range(5):
            status, seconds = health(port)
            assert (status, seconds < 1) == (200, True)
