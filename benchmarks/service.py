"""The service under load, measured from outside: throughput, latency, abuse, SIGTERM.

    python benchmarks/service.py --weights resnet56-cifar10.safetensors --data DIR [--scale 0.05] [--freeze]
        [--only latency,abuse]

DIR holds cifar10-train and cifar10-test as `.npz` with `images`. The server is a process of its own; clients are raw
sockets in this one, so that they cost as little as possible. Prints one JSON object a line.

- throughput: 64 clients with one image each, over and over, against the bare model at its best batch size and layout
- latency:    one client, against a direct call of the detector in the server's place
              (both in turns with what they are compared with, as machines are not always equally fast)
- abuse:      a third of the requests malformed, oversized, truncated or cancelled; every good one must come back right
- sigterm:    64 clients under way when the signal comes; every request under way must be answered, exit code 0
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from neuralmean import Detector
from neuralmean.bench import models
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.models import allocator as memory

HOST = "127.0.0.1"
NAME = "resnet56"
TURNS = 5
SERVER = (sys.executable, "-m", "neuralmean", "serve", "--port", "0", "--model-name", NAME)


class Server:
    """A served detector in a process of its own."""

    def __init__(self, path: Path, log: Path, *options: str) -> None:
        self.log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen([*SERVER, *options, str(path)], stderr=stderr)
        self.port = self._wait()

    def _wait(self) -> int:
        for _ in range(1200):
            text = self.log.read_text()
            if "Serving" in text:
                port = int(text.split("http://", 1)[1].split(":")[1].split()[0])
                if asyncio.run(_is_ready(port)):
                    return port
            if self.process.poll() is not None:
                raise RuntimeError(text)
            time.sleep(0.1)
        raise RuntimeError("the server did not come up")

    def wait_until_frozen(self) -> None:
        """Return once the compiled graph answers."""
        for _ in range(6000):
            text = self.log.read_text()
            if "as a compiled graph from now on" in text:
                return
            if "and not compiled" in text:
                raise RuntimeError(text)
            time.sleep(0.1)
        raise RuntimeError("the model was not compiled in ten minutes")

    def rss_mb(self) -> float:
        """Resident memory of the server."""
        return (memory.resident(self.process.pid) or 0) / 2**20

    def stop(self) -> int:
        """Ask it to end and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


class Client:
    """A keep-alive connection that speaks just enough HTTP."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Send a request and return status and body."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(HOST, self.port)
        reader, writer = self.streams
        writer.write(request)
        await writer.drain()
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        length, closing = 0, False
        for line in lines[1:]:
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
            closing = closing or (name.lower() == b"connection" and value.strip().lower() == b"close")
        body = await reader.readexactly(length)
        if closing:
            self.close()
        return int(lines[0].split()[1]), body

    def close(self) -> None:
        """Drop the connection, answered or not."""
        if self.streams is not None:
            self.streams[1].close()
        self.streams = None


async def _is_ready(port: int) -> bool:
    try:
        return (await Client(port).ask(http("GET", "/v2/health/ready")))[0] == 200
    except (OSError, asyncio.IncompleteReadError):
        return False


def http(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """Return the bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


def infer_request(x: torch.Tensor) -> bytes:
    """Return a binary inference request for a tensor."""
    data = x.numpy().tobytes()
    tensor = {
        "name": "input",
        "shape": list(x.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(data)},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return http("POST", f"/v2/models/{NAME}/infer", header + data, Inference_Header_Content_Length=str(len(header)))


def json_request(x: torch.Tensor) -> bytes:
    """Return an inference request for a tensor as JSON."""
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}
    return http("POST", f"/v2/models/{NAME}/infer", json.dumps({"inputs": [tensor]}).encode())


def score_request(pixels: np.ndarray) -> bytes:
    """Return a request that posts a PNG."""
    return http("POST", "/score", png(pixels), Content_Type="image/png")


def png(pixels: np.ndarray) -> bytes:
    """Return the bytes of a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def best_batch(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return a batch of the size and memory layout at which the model alone is fastest, by medians taken in turns."""
    layouts = (torch.contiguous_format, torch.channels_last)
    batches = [x[:size].contiguous(memory_format=layout) for layout in layouts for size in (16, 32, 64, 128)]
    times: list[list[float]] = [[] for _ in batches]
    with torch.no_grad():
        for _ in range(TURNS):
            for batch, own in zip(batches, times, strict=True):
                begin = time.perf_counter()
                model(batch)
                own.append((time.perf_counter() - begin) / len(batch))
    return batches[min(range(len(batches)), key=lambda i: statistics.median(times[i]))]


def bare_throughput(model: torch.nn.Module, batch: torch.Tensor, seconds: float) -> float:
    """Return images a second of the model alone."""
    n, begin = 0, time.perf_counter()
    with torch.no_grad():
        while time.perf_counter() - begin < seconds:
            model(batch)
            n += len(batch)
    return n / (time.perf_counter() - begin)


async def throughput(port: int, requests: list[bytes], n_clients: int, seconds: float) -> float:
    """Return images a second that `n_clients` get who each send one image at a time."""
    end = time.perf_counter() + seconds

    async def run(first: int) -> int:
        client, n = Client(port), 0
        while time.perf_counter() < end:
            status, body = await client.ask(requests[(first + n * n_clients) % len(requests)])
            if status != 200:
                raise RuntimeError(body.decode(errors="replace"))
            n += 1
        client.close()
        return n

    begin = time.perf_counter()
    total = sum(await asyncio.gather(*(run(i) for i in range(n_clients))))
    return total / (time.perf_counter() - begin)


async def latency(port: int, requests: list[bytes], n: int) -> float:
    """Return the median time of one client's requests, in ms."""
    client, times = Client(port), []
    for i in range(n):
        begin = time.perf_counter()
        status, _ = await client.ask(requests[i % len(requests)])
        times.append(time.perf_counter() - begin)
        if status != 200:
            raise RuntimeError(status)
    client.close()
    return 1000 * statistics.median(times)


def direct_latency(detector: Detector, x: torch.Tensor, n: int) -> float:
    """Return the median time of a direct call, in ms."""
    times = []
    with torch.no_grad():
        for i in range(n):
            begin = time.perf_counter()
            detector(x[i % len(x)][None])
            times.append(time.perf_counter() - begin)
    return 1000 * statistics.median(times)


def in_turns(
    served: Callable[[], Coroutine[Any, Any, float]], direct: Callable[[], float]
) -> tuple[float, float, list[tuple[float, float]]]:
    """Return the medians of two measurements and all pairs, taken in turns as machines change their speed."""
    pairs = [(asyncio.run(served()), direct()) for _ in range(TURNS)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs), pairs


async def abuse(server: Server, pixels: np.ndarray, expected: list[float], n: int) -> dict[str, Any]:
    """Send `n` requests, a third of them bad, from 32 clients; return what came back."""
    choose = random.Random(0)
    counts: dict[str, int] = dict.fromkeys(
        ("good", "right", "wrong", "busy", "bad", "refused", "accepted", "lost", "cancelled"), 0
    )
    memory: list[float] = []
    left = iter(range(n))
    whole = png(pixels[0])
    url = f"/v2/models/{NAME}/infer"
    bad = [
        http("POST", url, b"{not json"),
        http("POST", url, b'{"inputs": []}'),
        http(
            "POST", url, json.dumps({"inputs": [{"shape": [1, 3, 32, 32], "datatype": "UINT8", "data": [1]}]}).encode()
        ),
        http("POST", url, json.dumps({"inputs": [{"shape": [1, 9, 9], "datatype": "FP32", "data": [1]}]}).encode()),
        http("POST", "/score", whole[: len(whole) // 2]),
        http("POST", "/score", b"\x89PNG\r\n\x1a\n" + os.urandom(500)),
        http("POST", "/score", b"x" * (17 * 2**20)),
        http("POST", "/score", whole, Content_Encoding="gzip"),
        http("GET", "/nothing"),
    ]

    async def cancel(request: bytes) -> None:
        client = Client(server.port)
        client.streams = await asyncio.open_connection(HOST, server.port)
        client.streams[1].write(request[: choose.randrange(1, len(request) + 1)])
        await client.streams[1].drain()
        client.close()
        counts["cancelled"] += 1

    async def good(client: Client, i: int) -> None:
        counts["good"] += 1
        request = score_request(pixels[i])
        status, body = await client.ask(request)
        while status == 503:  # told to come back
            counts["busy"] += 1
            await asyncio.sleep(0.1)
            status, body = await client.ask(request)
        score = json.loads(body)["results"][0]["score"] if status == 200 else None
        counts[
            "right" if score is not None and abs(score - expected[i]) <= 1e-3 * (1 + abs(expected[i])) else "wrong"
        ] += 1

    async def run() -> None:
        client = Client(server.port)
        for number in left:
            if number % (max(1, n // 50)) == 0:
                memory.append(server.rss_mb())
            i = choose.randrange(len(pixels))
            kind = choose.random()
            try:
                if kind < 2 / 3:
                    await good(client, i)
                elif kind < 0.75:
                    await cancel(score_request(pixels[i]))
                else:
                    counts["bad"] += 1
                    status, _ = await client.ask(choose.choice(bad))
                    counts["refused" if 400 <= status < 500 else "accepted"] += 1
            except (asyncio.IncompleteReadError, ConnectionError):
                counts["lost"] += 1
                client.close()
        client.close()

    await asyncio.gather(*(run() for _ in range(32)))
    middle = memory[len(memory) // 3 :]
    log = server.log.read_text()
    return {
        **counts, "rss_mb_third": round(middle[0]), "rss_mb_end": round(memory[-1]), "rss_mb_largest": round(max(memory)),
        "rss_mb": [round(value) for value in memory[:: max(1, len(memory) // 12)]], "tracebacks": log.count("Traceback"),
    }  # fmt: skip


async def sigterm(server: Server, requests: list[bytes]) -> dict[str, Any]:
    """Send SIGTERM while 64 requests are under way; return how many were answered."""
    stopping = False
    counts = {"answered": 0, "under_way": 0, "answered_after": 0, "lost": 0}

    async def run(first: int) -> None:
        client, n = Client(server.port), 0
        while not stopping:
            counts["under_way"] += 1
            try:
                status, _ = await client.ask(requests[(first + n) % len(requests)])
                counts["answered" if not stopping else "answered_after"] += status == 200
            except (asyncio.IncompleteReadError, ConnectionError):
                counts["lost"] += 1
                return
            counts["under_way"] -= 1
            n += 1

    tasks = [asyncio.create_task(run(i)) for i in range(64)]
    await asyncio.sleep(2)
    stopping = True
    under_way = counts["under_way"]
    server.process.send_signal(signal.SIGTERM)
    await asyncio.gather(*tasks)
    return {**counts, "under_way": under_way, "exit_code": await asyncio.to_thread(server.process.wait, 60)}


def prepare(arguments: argparse.Namespace, folder: Path) -> tuple[Detector, Preprocessing, np.ndarray, Path]:
    """Fit and save a detector; return it with its preprocessing, the images and the file."""
    trained = models.load("resnet56", arguments.weights)
    train = np.load(arguments.data / "cifar10-train.npz")["images"][: arguments.fit]
    test = np.load(arguments.data / "cifar10-test.npz")["images"]
    detector = Detector(trained.model, scorer=arguments.scorer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        detector.fit(trained.preprocess(train), held_out=trained.preprocess(test[:1000]))
    preprocessing = Preprocessing((32, 32), trained.mean, trained.std)
    info = {
        "model": "bench:resnet56",
        "weights": str(arguments.weights.resolve()),
        "preprocessing": preprocessing.to_json(),
    }
    detector.save(folder / "model.nmd", info=info)
    return detector, preprocessing, test[1000:1512], folder / "model.nmd"


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scorer", default=None)
    parser.add_argument("--fit", type=int, default=2000)
    parser.add_argument("--scale", type=float, default=1.0, help="1 is 25 s of throughput and 10,000 requests of abuse")
    parser.add_argument("--freeze", action="store_true", help="measure once the compiled graph answers")
    parser.add_argument("--only", default="throughput,latency,abuse,sigterm")
    arguments = parser.parse_args()
    memory.keep_freed()  # the bare model at its best
    parts, scale = arguments.only.split(","), arguments.scale
    with tempfile.TemporaryDirectory() as name:
        detector, preprocessing, pixels, path = prepare(arguments, Path(name))
        x = preprocessing.apply_array(pixels)
        tensors = [infer_request(row[None]) for row in x]
        kinds = {
            "tensor": tensors,
            "json": [json_request(row[None]) for row in x],
            "png": [score_request(row) for row in pixels],
        }
        server = Server(path, Path(name) / "log", *([] if arguments.freeze else ["--no-freeze"]))
        if arguments.freeze:
            server.wait_until_frozen()
        try:
            seconds, n = max(1, 5 * scale), max(10, int(60 * scale))
            batch = best_batch(detector.model, x)
            for kind, requests in kinds.items() if "throughput" in parts else ():
                ask = partial(throughput, server.port, requests, 64, seconds)
                served, bare, pairs = in_turns(ask, partial(bare_throughput, detector.model, batch, seconds))
                shares = [round(one / other, 3) for one, other in pairs]
                share = statistics.median(shares)
                values = {"images_per_s": served, "bare_per_s": bare, "bare_batch": len(batch)}
                show("throughput", kind=kind, **values, shares=shares, share=share)
            for kind, requests in kinds.items() if "latency" in parts else ():
                ask = partial(latency, server.port, requests, n)
                served, direct, pairs = in_turns(ask, partial(direct_latency, detector, x, n))
                difference = statistics.median(one - other for one, other in pairs)
                show("latency", kind=kind, served_ms=served, direct_ms=direct, difference_ms=difference)
            if "abuse" in parts:
                expected = detector.score(x).tolist()
                show("abuse", **asyncio.run(abuse(server, pixels, expected, max(100, int(10_000 * scale)))))
            if "sigterm" in parts:
                show("sigterm", **asyncio.run(sigterm(server, tensors)))
        finally:
            code = server.stop()
        show("end", exit_code=code, log=server.log.read_text().splitlines()[:5])


def show(part: str, **values: Any) -> None:
    """Print a result."""
    rounded = {key: round(value, 3) if isinstance(value, float) else value for key, value in values.items()}
    print(json.dumps({"part": part, **rounded}), flush=True)


if __name__ == "__main__":
    main()
