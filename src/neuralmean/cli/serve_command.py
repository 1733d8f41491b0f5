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
        str,
        typer.Option("--host", metavar="ADDRESS", help="Address to listen on; the default accepts only this machine."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option(
            "--model-name", metavar="NAME", help="Name in addresses and on the page; by default that of the file."
        ),
    ] = None,
    rate: options.Rate = None,
    model: options.Model = None,
    weights: options.Weights = None,
    trust_local_code: options.TrustLocalCode = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            "--token-file", metavar="FILE", help="File with the token that clients must send; or set NMD_TOKEN."
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host", metavar="NAME", help="A host name by which clients reach this server; may be repeated."
        ),
    ] = None,
    log_format: Annotated[
        str, typer.Option("--log-format", metavar="KIND", help="Log lines on stderr: text or json.")
    ] = "text",
    no_thumbnails: Annotated[bool, typer.Option("--no-thumbnails", help="Keep no pictures of flagged inputs.")] = False,
    max_batch: Annotated[
        int, typer.Option("--max-batch", min=1, help="Maximum number of inputs per forward pass.")
    ] = 64,
    max_wait_ms: Annotated[
        float,
        typer.Option(
            "--max-wait-ms",
            min=0,
            metavar="MS",
            help="Maximum time that a request waits for others to share its batch.",
        ),
    ] = 15.0,
    queue: Annotated[
        int, typer.Option("--queue", min=1, help="Maximum number of waiting inputs; further requests get 503.")
    ] = 256,
    device: options.Device = None,
    no_freeze: Annotated[
        bool,
        typer.Option(
            "--no-freeze", help="Never compile the model: answers stay those of the eager model, bit for bit."
        ),
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="File that keeps the monitor's state across restarts."),
    ] = None,
    history: Annotated[
        Path | None, typer.Option("--history", metavar="FILE", help="Keep decisions and alarms in this file (SQLite).")
    ] = None,
    history_days: Annotated[
        float, typer.Option("--history-days", metavar="DAYS", min=0.01, help="How long they are kept.")
    ] = 90.0,
    every: Annotated[
        int | None,
        typer.Option(
            "--every",
            metavar="N",
            min=1,
            max=1024,
            help="Monitor one of every N inputs, for correlated streams; estimated by default.",
        ),
    ] = None,
    follow: Annotated[
        float | None,
        typer.Option(
            "--follow", metavar="SHARE", help="Accept drift without an alarm if it flags at most this share of inputs."
        ),
    ] = None,
    grpc_port: Annotated[
        int | None, typer.Option("--grpc-port", min=0, max=65535, help="Also serve gRPC on this port (extra `grpc`).")
    ] = None,
    otel: Annotated[
        bool, typer.Option("--otel", help="Send OpenTelemetry traces and metrics (extra `otel`; OTEL_* variables).")
    ] = False,
) -> None:
    """Serve the model and its detector over HTTP, with metrics and a web page."""
    from neuralmean import service
    from neuralmean.service.freezing import leave

    options.check_out(state, saved, weights, token_file, history, option="--state")
    options.check_out(history, saved, weights, token_file, option="--history")
    service.serve(
        saved, host=host, port=port, name=name, rate=rate, model=model, weights=weights, token_file=token_file,
        thumbnails=not no_thumbnails, max_batch=max_batch, max_wait_ms=max_wait_ms, queue=queue, freeze=not no_freeze,
        state=state, allow_hosts=tuple(allow_host or ()), log_format=log_format,
        grpc_port=grpc_port, telemetry=otel, history=history, history_days=history_days, every=every, follow=follow,
        trust_local_code=trust_local_code, device=device,
    )  # fmt: skip
    leave()
