"""What the history of the service promises: answers in under a second, a bounded file, at most a second lost by `kill -9`.

    python -m benchmarks history [--rows 10000000] [--bound BYTES] [--kills 20]

Prints a line for each promise. The answers are those of the service, through its own routes.
"""

from __future__ import annotations

import argparse
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TextIO, cast

import torch
from torch import nn

from neuralmean import Detector
from neuralmean.service import Settings, create_app
from neuralmean.service.history import SPANS, History, HistoryRow, read_rows

_PART = 50_000
_KINDS = ("typical",) * 19 + ("content",)


def write(path: Path, n_rows: int, bound: int) -> int:
    """Write rows of 80 days as fast as the file takes them; return the largest size of the file and its log, in bytes."""
    history, largest = History(path, days=365, max_bytes=bound), 0
    begin, every = time.time() - 80 * 86400, 80 * 86400 / n_rows
    for first in range(1, n_rows + 1, _PART):
        numbers = range(first, min(first + _PART, n_rows + 1))
        history.add(
            [
                HistoryRow(n, begin + n * every, n / 7, (n % 1000 + 1) / 1001, n % 20 == 19, _KINDS[n % 20], n % 10)
                for n in numbers
            ]
        )
        if first % (10 * _PART) == 1:
            for alarm in range(2):
                history.begin_alarm({"item": first + alarm, "since": [first, first], "examples": [], "sentence": ""})
                history.end_alarm()
        while history.n_waiting:
            time.sleep(0.005)
        largest = max(largest, sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*")))
    history.close()
    return largest


def answers(path: Path) -> Iterator[tuple[str, float]]:
    """Yield each route of the page that reads the history, and the seconds that its slowest answer of three took."""
    from starlette.testclient import TestClient

    torch.manual_seed(0)
    images, model = torch.rand(64, 3, 8, 8), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    model(images)
    detector = Detector(model, scorer="average").calibrate(images)
    with TestClient(create_app(detector, settings=Settings(history=path)), base_url="http://127.0.0.1") as client:
        for address in ("/", *(f"/history?span={span}" for span in SPANS)):
            seconds = []
            for _ in range(3):
                start = time.perf_counter()
                client.get(address).raise_for_status()
                seconds.append(time.perf_counter() - start)
            yield address, max(seconds)


_WRITER = """
import sys, time
from neuralmean.service.history import History, HistoryRow
history, number = History(sys.argv[1]), 0
while True:
    number += 1
    history.add([HistoryRow(number, time.time(), 1.0, 0.5, False, None, None)])
    print(number + history.base, time.time(), flush=True)
    time.sleep(0.002)
"""


def kill(path: Path, seconds: float) -> tuple[float, bool]:
    """Kill a process that writes; return how many seconds of rows were lost, and whether the file is sound."""
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    text = cast(TextIO, process.stdout).readline()  # a busy machine may take long to start it
    time.sleep(seconds)
    os.kill(process.pid, signal.SIGKILL)
    text += process.communicate()[0]
    lines = [line.split() for line in text.splitlines() if len(line.split()) == 2]
    kept = {row.number for row in read_rows(path)}
    last = float(lines[-1][1])
    lost = [last - float(when) for number, when in lines if int(number) not in kept]
    with closing(sqlite3.connect(path)) as connection:
        return max(lost, default=0.0), connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def main() -> None:
    """Print a line for each promise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--bound", type=int, default=400_000_000)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, bound in (("unbounded.db", 2**40), ("bounded.db", arguments.bound)):
            path = Path(folder) / name
            largest = write(path, arguments.rows, bound)
            size = path.stat().st_size
            print(
                f"{arguments.rows:,} rows, bound {bound:,} bytes: {size:,} bytes, {largest:,} at most with the log",
                flush=True,
            )
            for address, seconds in answers(path):
                print(f"  {address}: {1000 * seconds:.0f} ms", flush=True)
        found = [kill(Path(folder) / "killed.db", 2 + 0.17 * turn) for turn in range(arguments.kills)]
        lost = max((lost for lost, _ in found), default=0.0)
        print(f"{arguments.kills} kills: {lost:.2f} s lost at most, {sum(sound for _, sound in found)} files sound")


if __name__ == "__main__":
    main()
