"""Code blocks of Markdown pages, and a small world in which they run.

Python blocks of a page share one namespace. A block that begins with `# NAME.py` is written to that file. In `bash` blocks
lines of `nmd` and `curl` are run; `pip install` and `make` are checked against pyproject.toml and the Makefile. A block
after `<!-- not run: REASON -->` is left out.
"""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SKIP = re.compile(r"<!-- not run: \S.*-->")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text and the line it begins on."""

    language: str
    text: str
    line: int


def blocks_of(text: str) -> list[Block]:
    """Return the blocks of a page that are to be run."""
    from markdown_it import MarkdownIt

    found, skip = [], False
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block":
            skip = bool(_SKIP.match(token.content))
        elif token.type == "fence":
            language = token.info.split()[0] if token.info.strip() else ""
            if not skip and language in ("python", "bash"):
                found.append(Block(language, token.content, token.map[0] + 1))
            skip = False
    return found


def commands_of(text: str) -> list[str]:
    """Return the commands of a bash block: continued lines are joined, comments and prompts dropped."""
    joined = text.replace("\\\n", " ")
    lines = [re.split(r"\s+#\s", line)[0].strip().removeprefix("$ ") for line in joined.splitlines()]
    parts = [part.strip() for line in lines for part in line.split(" && ")]
    return [part for part in parts if part and not part.startswith("#")]


def trust(words: list[str]) -> list[str]:
    """Return what a command of a page lacks because `model.nmd` names code of the current folder in these tests."""
    opens_a_file = words[1] in ("score", "explain", "report", "export", "serve")
    return ["--trust-local-code"] if opens_a_file and not {"--model", "--trust-local-code"} & set(words) else []


class Page:
    """Runs the blocks of one page in the current folder.

    Args:
        name: What the page is called in tracebacks.
        namespace: What its Python blocks begin with.
        nmd: Runs the command in this process and returns exit code, stdout and stderr.
    """

    def __init__(self, name, namespace, nmd):
        self.name, self.namespace, self.nmd = name, namespace, nmd
        self.servers = []

    def run(self, block):
        """Run one block; an error names the page and the line."""
        if block.language == "bash":
            for command in commands_of(block.text):
                self.run_command(command, f"{self.name}:{block.line}")
            return
        named = re.match(r"# (\w+\.py)\n", block.text)
        if named:
            Path(named[1]).write_text(block.text)
            sys.modules.pop(named[1].removesuffix(".py"), None)
            return
        # Line numbers of tracebacks are those of the page.
        code = compile("\n" * block.line + block.text, self.name, "exec")
        exec(code, self.namespace)

    def run_command(self, command, where):
        """Run or check one line of a bash block."""
        words = shlex.split(command)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        tool = words[0] if words else ""
        if tool == "nmd" and words[1] == "serve":
            self.serve([*words[2:], *trust(words)], where)
        elif tool == "nmd":
            code, _, err = self.nmd(*words[1:], *trust(words))
            assert code in (0, 3), f"{where}: {command}\n{err}"
        elif tool == "curl":
            self.curl(words, where)
        elif tool == "make":
            targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
            unknown = {word for word in words[1:] if "=" not in word} - targets
            assert not unknown, f"{where}: no target {unknown}"
        elif words[:2] == ["pip", "install"] or words[2:4] == ["pip", "install"]:
            extras = {
                extra for found in re.findall(r"(?:neuralmean|\.)\[([\w,]+)\]", command) for extra in found.split(",")
            }
            project = (ROOT / "pyproject.toml").read_text()
            unknown = {extra for extra in extras if not re.search(rf"^{extra} = \[", project, re.M)}
            assert not unknown, f"{where}: no extra {unknown}"
        else:
            known = ("git", "python3", "python", ".", "cd")
            assert tool in known, f"{where}: {command}: test it, or write `<!-- not run: REASON -->`"

    def serve(self, arguments, where):
        """Start a server on a free port and wait until it is ready."""
        self.close()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        if "--port" in arguments:
            at = arguments.index("--port")
            del arguments[at : at + 2]
        if "--host" in arguments:
            at = arguments.index("--host")
            del arguments[at : at + 2]
        server = subprocess.Popen(
            [sys.executable, "-m", "neuralmean", "serve", *arguments, "--port", str(self.port)],
            stderr=subprocess.PIPE,
            text=True,
        )
        self.servers.append(server)
        end = time.monotonic() + 120
        while time.monotonic() < end:
            line = server.stderr.readline()
            if "Serving" in line:
                return
            assert server.poll() is None, f"{where}: the server ended: {line}"
        raise AssertionError(f"{where}: the server did not start")

    def curl(self, words, where):
        """Send a request to the server that the page started."""
        if shutil.which("curl") is None or not self.servers:
            assert self.servers, f"{where}: no server was started on this page"
            return
        words = [re.sub(r"(localhost|127\.0\.0\.1):\d+", f"127.0.0.1:{self.port}", word) for word in words]
        done = subprocess.run(
            [*words, "--fail-with-body", "-sS"], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"{where}: {words}\n{done.stdout}{done.stderr}"

    def close(self):
        """End the servers that the page started."""
        for server in self.servers:
            server.terminate()
            server.wait(30)
            server.stderr.close()
        self.servers.clear()
