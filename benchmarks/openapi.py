"""Does the service keep to its OpenAPI description? Runs schemathesis against a running `nmd serve`.

Needs `pip install schemathesis`. Fails on any answer with a status of 500 or above, and on answers that the description does not
know.

    python -m benchmarks.openapi --examples 100
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.abuse import HOST, Target

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def check(examples: int, command: str) -> int:
    """Run schemathesis and return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        config = Path(folder) / "schemathesis.toml"
        config.write_text('[parameters]\n"path.name" = "abused"\n"path.version" = "1"\n')
        address = f"http://{HOST}:{target.port}/openapi.json"
        options = ["--checks", CHECKS, "--max-examples", str(examples), "--seed", "0", "--no-color"]
        try:
            return subprocess.run(
                [command, "--config-file", str(config), "run", address, *options], check=False
            ).returncode
        finally:
            target.stop()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--command", default=shutil.which("st"), help="where schemathesis is")
    arguments = parser.parse_args()
    if arguments.command is None:
        sys.exit("Expected schemathesis, but it is not installed. Install it with `pip install schemathesis`.")
    sys.exit(check(arguments.examples, arguments.command))


if __name__ == "__main__":
    main()
