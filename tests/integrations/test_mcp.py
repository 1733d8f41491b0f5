"""The MCP server, used by a real MCP client: in this process, and as `nmd mcp` on stdin and stdout."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from tests.docs.conftest import folder, nmd, world  # noqa: F401  # fixtures

mcp = pytest.importorskip("mcp")


def call(server, name, arguments):
    """Call one tool through a client; return the result's structured content, or its error as text."""

    async def talk():
        async with mcp.Client(server) as client:
            result = await client.call_tool(name, arguments)
            text = "".join(part.text for part in result.content)
            return (text, True) if result.is_error else (result.structured_content or json.loads(text), False)

    return asyncio.run(talk())


@pytest.fixture
def server(world):  # noqa: F811
    from neuralmean.integrations.mcp import create_server

    return create_server(".", trust_local_code=True)


def test_the_tools_are_described(server):
    async def talk():
        async with mcp.Client(server) as client:
            return (await client.list_tools()).tools

    tools = {tool.name: tool for tool in asyncio.run(talk())}
    assert set(tools) == {"inspect", "score", "explain", "report"}
    assert "verdict" in tools["score"].description
    assert set(tools["explain"].input_schema["properties"]) == {"saved", "image"}


def test_score_gives_what_the_library_gives(server, world):  # noqa: F811
    answer, failed = call(server, "score", {"saved": "model.nmd", "paths": ["new-photos"]})
    assert not failed, answer
    by_name = {Path(row["path"]).name: row for row in answer["rows"]}
    assert len(by_name) == 7
    assert by_name["strange.png"]["is_ood"]
    assert not by_name["001.png"]["is_ood"]
    assert answer["threshold"] == pytest.approx(world["detector"].threshold)


def test_rate_is_that_of_the_call(server):
    answer, failed = call(server, "score", {"saved": "model.nmd", "paths": ["new-photos"], "rate": 0.2})
    assert not failed
    assert answer["false_alarm_rate"] == 0.2


def test_explain_names_layers(server):
    answer, failed = call(server, "explain", {"saved": "model.nmd", "image": "strange.png"})
    assert not failed, answer
    assert answer["is_ood"]
    assert {layer["layer"] for layer in answer["layers"]} <= {"bn1", "bn2", "bn3"}


def test_inspect_and_report(server, tmp_path):
    answer, failed = call(server, "inspect", {"saved": "model.nmd"})
    assert not failed, answer
    assert "typicality" in str(answer)
    arguments = {"saved": "model.nmd", "id_path": "photos/test", "ood_paths": {"noise": "drawings"}, "out": "r.html"}
    answer, failed = call(server, "report", arguments)
    assert not failed, answer
    assert "<!doctype html>" in (tmp_path / "r.html").read_text()[:400]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("score", {"saved": "../model.nmd", "paths": ["."]}, "Expected a path below"),
        ("explain", {"saved": "model.nmd", "image": "/etc/hostname"}, "Expected a path below"),
        ("explain", {"saved": "model.nmd", "image": "mymodel.py"}, "to be an image"),
        ("score", {"saved": "absent.nmd", "paths": ["."]}, "Expected"),
    ],
)
def test_what_is_wrong_is_said(server, name, arguments, words):
    text, failed = call(server, name, arguments)
    assert failed
    assert words in text


def test_the_command_serves_on_stdin_and_stdout(world):  # noqa: F811
    command = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "neuralmean", "mcp", "--trust-local-code"], env=dict(os.environ), cwd="."
    )
    answer, failed = call(command, "explain", {"saved": "model.nmd", "image": "strange.png"})
    assert not failed, answer
    assert answer["is_ood"]


def test_without_the_package_the_error_names_it(monkeypatch):
    from neuralmean.errors import MissingExtraError
    from neuralmean.integrations.mcp import create_server

    monkeypatch.setitem(sys.modules, "mcp.server", None)
    with pytest.raises(MissingExtraError, match=r"pip install neuralmean\[mcp\]"):
        create_server()
