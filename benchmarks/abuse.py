"""A running `nmd serve` among clients that mean harm: are the others still served, quickly and rightly?

Starts the command on a small detector and sends requests from several threads: good ones among headers that are too large,
bodies that are too large or not what they say, connections that stop half-way, foreign origins and hosts, and bytes that are
no HTTP. Beside them some connections send a byte of a header now and then, and health is asked for ten times a second. Prints one
JSON object.

    python -m benchmarks.abuse --requests 10000
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from neuralmean import Detector
from neuralmean.data.preprocessing import Preprocessing
from neuralmean.models.spec import resolve

HOST = "127.0.0.1"
SPEC = "bench:resnet20"
N_IMAGES = 32
DRIPPING = 20  # connections that send a byte of a header now and then
LONGEST_END_S = 60
HALF_OPEN = 300  # connections that are left half-way at a time, more than a client may have


class Target:
    """A served detector: its address, images, and what it must say of them."""

    def __init__(self, folder: Path) -> None:
        how = Preprocessing((32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)
        pixels = np.random.default_rng(0).integers(0, 256, (400, 32, 32, 3), dtype=np.uint8)
        detector = Detector(resolve(SPEC).model, scorer="average").calibrate(how.normalise(pixels[:300]))
        self.path = folder / "abused.nmd"
        detector.save(self.path, info={"model": SPEC, "preprocessing": how.to_json()})
        self.files = [_png(image) for image in pixels[300 : 300 + N_IMAGES]]
        self.inputs = how.normalise(pixels[300 : 300 + N_IMAGES])
        self.expected = detector.predict(self.inputs)
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "neuralmean",
                "serve",
                str(self.path),
                "--port",
                "0",
                "--history",
                str(folder / "h.db"),
            ],
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log: list[str] = []
        self.seconds_to_end = 0.0
        self.port = self._find_port()
        threading.Thread(target=self._read_log, daemon=True).start()

    def _find_port(self) -> int:
        assert self.process.stderr is not None  # noqa: S101 - Popen was asked for it
        for line in self.process.stderr:
            if found := re.search(r"http://[\d.]+:(\d+)", line):
                return int(found.group(1))
        raise SystemExit("The server did not start.")

    def _read_log(self) -> None:
        for line in self.process.stderr or ():
            self.log.append(line)

    def memory(self) -> float:
        """Resident megabytes of the server."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def stop(self) -> int:
        """End the server as an operator would, and return its exit code; one that does not end says in its log where it is."""
        begin = time.perf_counter()
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(LONGEST_END_S)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            return self.process.wait()
        finally:
            self.seconds_to_end = time.perf_counter() - begin


class Client:
    """One thread that sends requests of all kinds, and counts what came of them."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.random = target, random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.half_open: list[socket.socket] = []
        self.kinds: list[tuple[int, str, Callable[[], None]]] = [
            (35, "good image", self.good_image),
            (15, "good tensor", self.good_tensor),
            (6, "large header", lambda: self.raw(_head("GET", "/metrics", X="x" * 1_000_000), {431})),
            (6, "many headers", lambda: self.raw(_head("GET", "/metrics") + b"A: b\r\n" * 500 + b"\r\n", {431})),
            (6, "large body", self.large_body),
            (4, "packed bomb", self.bomb),
            (8, "no image", lambda: self.post("/score", os.urandom(2000), {400})),
            (8, "half a request", self.half),
            (
                4,
                "foreign origin",
                lambda: self.post("/score", self.target.files[0], {403}, Origin="http://evil.example"),
            ),
            (2, "foreign reset", lambda: self.post("/live/reset", b"", {403}, **{"Sec-Fetch-Site": "cross-site"})),
            (3, "foreign host", lambda: self.post("/score", self.target.files[0], {403}, Host="evil.example")),
            (2, "foreign picture", lambda: self.raw(FOREIGN_PICTURE, {403})),
            (2, "JSON bomb", lambda: self.post("/v2/models/abused/infer", JSON_BOMB, {413})),
            (1, "pixel bomb", lambda: self.post("/score", PIXEL_BOMB, {413})),
            (
                2,
                "many at once",
                lambda: self.raw(_head("GET", "/metrics") + b"\r\n" + (_head("GET", "/") + b"\r\n") * 500, {200}),
            ),
            (3, "no HTTP", lambda: self.raw(os.urandom(300) + b"\r\n\r\n", {400})),
        ]

    def run(self, count: int) -> None:
        """Send `count` requests."""
        weights = [weight for weight, _, _ in self.kinds]
        for _, name, send in self.random.choices(self.kinds, weights, k=count):
            try:
                send()
                self.outcomes[name] += 1
            except (OSError, http.client.HTTPException) as error:
                # Whoever sends too much may be hung up on before the answer is read; a good client may not.
                if name.startswith("good"):
                    self.wrong.append(f"{name}: {error!r}")
                self.outcomes[f"{name}, hung up on"] += 1
        for client in self.half_open:
            client.close()

    def post(self, path: str, body: bytes, expected: set[int], **headers: str) -> Any:
        """Send a request, note it if its status is not among the expected ones, and return the answer."""
        connection = http.client.HTTPConnection(HOST, self.target.port, timeout=30)
        try:
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        if response.status not in expected:
            self.wrong.append(f"{path}: {response.status} {content[:200]!r}")
        return json.loads(content)

    def good_image(self) -> None:
        """An image is scored as in the library; a server that is busy may say so, and is asked again."""
        index = self.random.randrange(N_IMAGES)
        answer = self._patiently("/score", self.target.files[index])
        self._check(index, answer["results"][0])

    def good_tensor(self) -> None:
        """A tensor likewise."""
        index = self.random.randrange(N_IMAGES)
        data = self.target.inputs[index : index + 1]
        tensor = {"name": "input", "shape": list(data.shape), "datatype": "FP32", "data": data.flatten().tolist()}
        answer = self._patiently("/v2/models/abused/infer", json.dumps({"inputs": [tensor]}).encode())
        self._check(
            index, {output["name"]: output["data"][0] for output in answer["outputs"] if output["name"] != "output"}
        )

    def _patiently(self, path: str, body: bytes) -> Any:
        for _ in range(20):
            answer = self.post(path, body, {200, 503})
            if "error" not in answer:
                return answer
            self.outcomes["good, asked again"] += 1
            time.sleep(0.1)
        raise OSError(f"never answered: {answer}")

    def _check(self, index: int, found: dict[str, Any]) -> None:
        score, flag = self.target.expected.score[index].item(), bool(self.target.expected.is_ood[index])
        if abs(found["score"] - score) > 1e-4 * abs(score) or bool(found["is_ood"]) != flag:
            self.wrong.append(f"image {index}: {found} instead of {score}, {flag}")

    def raw(self, data: bytes, expected: set[int]) -> None:
        """Send bytes and read the answer."""
        with socket.create_connection((HOST, self.target.port), timeout=30) as client:
            client.sendall(data)
            answer = client.recv(4096)
        if answer and int(answer.split()[1]) not in expected:
            self.wrong.append(f"{data[:60]!r}: {answer[:100]!r}")

    def large_body(self) -> None:
        """A body that is larger than allowed, said beforehand or not."""
        if self.random.random() < 0.5:
            self.raw(_head("POST", "/score", **{"Content-Length": str(10**10)}) + b"\r\n", {413})
        else:
            chunk = b"%x\r\n" % 2**20 + bytes(2**20) + b"\r\n"
            self.raw(_head("POST", "/score", **{"Transfer-Encoding": "chunked"}) + b"\r\n" + chunk * 20, {413})

    def bomb(self) -> None:
        """A body that unpacks to 200 MB."""
        self.post("/score", BOMB, {413}, **{"Content-Encoding": "gzip"})

    def half(self) -> None:
        """A request that never ends."""
        client = socket.create_connection((HOST, self.target.port), timeout=30)
        self.half_open.append(client)
        body = _head("POST", "/score", **{"Content-Length": "100"}) + b"\r\nab"
        client.sendall(self.random.choice([b"GET /metr", _head("GET", "/metrics"), body]))
        while len(self.half_open) > HALF_OPEN // 4:
            self.half_open.pop(0).close()


class Dripping:
    """Connections whose headers never end, each a byte now and then; those that are hung up on are opened again."""

    def __init__(self, target: Target) -> None:
        self._target, self._done, self.n_opened = target, threading.Event(), 0
        self._thread = threading.Thread(target=self._drip)

    def __enter__(self) -> Dripping:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _drip(self) -> None:
        clients: dict[int, socket.socket] = {}
        while not self._done.wait(0.5):
            for number in range(DRIPPING):
                try:
                    if number not in clients:
                        clients[number] = socket.create_connection((HOST, self._target.port), timeout=5)
                        self.n_opened += 1
                        clients[number].sendall(_head("GET", "/metrics") + b"X-Slow: ")
                    clients[number].sendall(b"x")
                except OSError:
                    clients.pop(number).close() if number in clients else None
        for client in clients.values():
            client.close()


def _head(method: str, path: str, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {HOST}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode() + b"\r\n"


def _png(pixels: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _wide_png(side: int) -> bytes:
    """Return a PNG of one colour: 70 kB in the file, 75 MB unpacked."""
    buffer = io.BytesIO()
    Image.new("RGB", (side, side)).save(buffer, "PNG")
    return buffer.getvalue()


BOMB = gzip.compress(bytes(200 * 2**20), 9)
JSON_BOMB = b'{"inputs":[' + b"[[[]]]," * 2**20 + b"1]}"
PIXEL_BOMB = _wide_png(5001)
FOREIGN_PICTURE = _head("GET", "/history/pictures/1", **{"Sec-Fetch-Site": "cross-site"}) + b"\r\n"


class Health:
    """Asks for the server's health ten times a second, and keeps how long the answers took and how much memory there was."""

    def __init__(self, target: Target) -> None:
        self.target, self.seconds, self.memory = target, [], []  # type: ignore[var-annotated]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Health:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._done.wait(0.1):
            begin = time.perf_counter()
            connection = http.client.HTTPConnection(HOST, self.target.port, timeout=30)
            with suppress(OSError):
                connection.request("GET", "/v2/health/live")
                if connection.getresponse().status == 200:
                    self.seconds.append(time.perf_counter() - begin)
                else:
                    self.seconds.append(float("inf"))
            connection.close()
            self.memory.append(self.target.memory())


def abuse(requests: int, threads: int = 4) -> dict[str, Any]:
    """Run it and return what was found."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        target = Target(Path(folder))
        try:
            Client(target, -1).run(100)  # what is loaded and allocated once
            clients = [Client(target, seed) for seed in range(threads)]
            with Health(target) as health, Dripping(target) as dripping:
                running = [threading.Thread(target=client.run, args=(requests // threads,)) for client in clients]
                for thread in running:
                    thread.start()
                for thread in running:
                    thread.join()
        finally:
            code = target.stop()
    outcomes = sum((client.outcomes for client in clients), Counter[str]())
    return {
        "requests": requests,
        "wrong": [line for client in clients for line in client.wrong][:10],
        "outcomes": dict(sorted(outcomes.items())),
        "slow_connections": dripping.n_opened,
        "health_asked": len(health.seconds),
        "health_slowest_s": round(max(health.seconds), 3),
        "memory_mb": {
            "by tenth": [round(float(np.median(part))) for part in np.array_split(health.memory, 10)],
            "peak": round(max(health.memory)),
        },
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "exit_code": code,
        "seconds_to_end": round(target.seconds_to_end, 1),
        "last_logged": target.log[-100:] if code else [],
        "errors_logged": [line for line in target.log if " ERROR " in line or "Traceback" in line][:5],
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=4)
    arguments = parser.parse_args()
    print(json.dumps(abuse(arguments.requests, arguments.threads), indent=1))


if __name__ == "__main__":
    main()
