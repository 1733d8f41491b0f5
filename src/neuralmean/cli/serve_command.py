"""`nmd serve`: HTTP, metrics, a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neuralmean.cli import options
from neuralmean.cli.app import app


@app.command(epilog="Example: `nmd serve model.nmd --port 8000`, then open the address it prints.")
def serve(
    saved: options.Saved,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; by default this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="Name in addresses; by default the file's stem.")] = None,
    model: options.Model = None,
    weights: options.Weights = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="File with a bearer token; or set NMD_TOKEN.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="A name by which clients call this server; may be repeated."),
    ] = None,
    log_format: Annotated[str, typer.Option("--log-format", help="Lines on stderr: text or json.")] = "text",
    no_thumbnails: Annotated[bool, typer.Option("--no-thumbnails", help="Keep no picture of flagged inputs.")] = False,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="Inputs per forward pass at most.")] = 64,
    max_wait_ms: Annotated[
        float, typer.Option("--max-wait-ms", min=0, help="Longest wait for company, under load.")
    ] = 15.0,
    queue: Annotated[int, typer.Option("--queue", min=1, help="Inputs that may wait; beyond that, 503.")] = 256,
    freeze: options.Freeze = False,
    state: Annotated[Path | None, typer.Option("--state", help="File in which the monitor survives a restart.")] = None,
) -> None:
    """Serve the model with its detector over HTTP, with metrics and a page to look at."""
    from neuralmean import service

    service.serve(
        saved, host=host, port=port, name=name, model=model, weights=weights, token_file=token_file,
        thumbnails=not no_thumbnails, max_batch=max_batch, max_wait_ms=max_wait_ms, queue=queue, freeze=freeze,
        state=state, allow_hosts=tuple(allow_host or ()), log_format=log_format,
    )  # fmt: skip
