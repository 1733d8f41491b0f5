"""Who may ask: hosts, origins, tokens; and what is logged of it."""

import json
import logging

import pytest

from neuralmean.errors import InputError
from neuralmean.service import Settings, create_app
from neuralmean.service.logs import LineFormatter, check_log_format
from tests.service.conftest import PREPROCESSING, ask, png

TOKEN = "correct-horse-battery"
PATHS = ("/", "/metrics", "/live", "/live/flagged/1", "/v2/health/live", "/docs", "/nothing")


@pytest.fixture
def app(detector):
    return create_app(detector, PREPROCESSING, name="toy")


@pytest.mark.parametrize("path", PATHS)
def test_a_foreign_name_that_points_here_reads_nothing(app, path):
    for host in (
        "evil.example",
        "evil.example:8000",
        "localhost.evil.example",
        "user@localhost",
        "[",
        "127.0.0.1.evil",
    ):
        response = ask(app, "GET", path, headers={"Host": host})
        assert response.status_code == 403, host
        assert "--allow-host NAME" in response.json()["error"]


def test_names_of_this_machine_its_address_and_allowed_names_pass(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(allow_hosts=("Nmd.example",)))
    for host in ("localhost:8000", "LOCALHOST", "127.0.0.1", "[::1]:8000", "test", "nmd.example", "nmd.example.:80"):
        assert ask(app, "GET", "/metrics", headers={"Host": host}).status_code == 200, host
    anybody = create_app(detector, PREPROCESSING, settings=Settings(allow_hosts=("*",)))
    assert ask(anybody, "GET", "/metrics", headers={"Host": "any.example"}).status_code == 200


def test_two_hosts_are_one_too_many(app):
    response = ask(app, "GET", "/metrics", headers=[("Host", "localhost"), ("Host", "evil.example")])
    assert (response.status_code, response.json()["error"]) == (400, "Expected one `Host` header, but got 2.")


FOREIGN = (
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://test:81"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_page_of_another_site_feeds_nothing_resets_nothing_and_sees_nothing(app, headers):
    for method, path in (
        ("POST", "/score"),
        ("POST", "/v2/models/toy/infer"),
        ("POST", "/live/reset"),
        ("GET", "/live/flagged/1"),
        ("GET", "/live"),
    ):
        options = {"content": png()[0]} if method == "POST" else {}
        assert ask(app, method, path, headers=headers, **options).status_code == 403, path
    assert app.state.service.live.monitor.status().n_seen == 0


def test_the_own_page_and_programs_pass(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(allow_hosts=("nmd.example",)))
    for headers in (
        {},
        {"Origin": "http://test", "Sec-Fetch-Site": "same-origin"},
        {"Origin": "http://test:80"},
        {"Origin": "https://nmd.example"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert ask(app, "POST", "/score", content=png()[0], headers=headers).status_code == 200, headers


def test_two_authorizations_are_none(detector):
    app = create_app(detector, PREPROCESSING, settings=Settings(token=TOKEN))
    right, wrong = ("Authorization", f"Bearer {TOKEN}"), ("Authorization", "Bearer wrong")
    for headers in ([right, wrong], [wrong, right], [right, right]):
        assert ask(app, "GET", "/metrics", headers=headers).status_code == 401
    assert ask(app, "GET", "/metrics", headers=[right]).status_code == 200


def test_a_slash_too_many_is_a_sentence(app):
    response = ask(app, "GET", "/live/")
    assert response.status_code == 404
    assert response.json()["error"].startswith("There is nothing at this address")


def test_names_to_allow_are_checked():
    for wrong in ("name", (1,), ("",)):
        with pytest.raises(InputError, match="Expected `allow_hosts` to be a list of names"):
            Settings(allow_hosts=wrong)


def test_requests_are_logged_in_one_line_each_and_health_is_not(app, caplog):
    caplog.set_level(logging.INFO, "neuralmean.service")
    ask(app, "GET", "/v2/health/live")
    ask(app, "GET", "/nothing%0aELSE?token=secret")
    (record,) = [record for record in caplog.records if record.name == "neuralmean.service.access"]
    text = LineFormatter("text").format(record)
    assert " INFO GET /nothing" in text
    assert "\n" not in text
    assert "secret" not in text
    line = json.loads(LineFormatter("json").format(record))
    assert (line["level"], line["method"], line["status"]) == ("INFO", "GET", 404)
    assert line["time"].endswith("+00:00")
    with pytest.raises(InputError, match="Expected the log format to be one of"):
        check_log_format("xml")


def test_the_alarm_tells_of_the_latest_inputs_beside_the_window(app, detector, images, strange, caplog):
    from neuralmean.service.passes import run_pass

    live = app.state.service.live
    live.take(images[:100], run_pass(detector, images[:100]))
    for _ in range(200):
        if live.monitor.drift:
            break
        live.take(strange[:8], run_pass(detector, strange[:8]))
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Drift alarm")]
    assert "Flagged: 8 of the last 8 (100.0 %)," in line
