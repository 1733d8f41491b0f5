"""`nmd mcp`: the detector as tools for agents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app


@app.command(epilog="Example: `nmd mcp --root photos`, as the command of a server in the settings of your agent.")
def mcp(
    root: Annotated[
        Path | None,
        typer.Option("--root", metavar="DIR", help="Allow files in this folder only; by default all files."),
    ] = None,
    trust_local_code: options.TrustLocalCode = False,
) -> None:
    """Serve inspect, score, explain and report to agents over the Model Context Protocol, on stdin and stdout."""
    from neuralmean.integrations.mcp import create_server

    create_server(root, trust_local_code=trust_local_code).run("stdio")
