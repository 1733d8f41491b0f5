"""What the history of the service promises: answers in under a second, a bounded file, at most a second lost by `kill -9`.

    python -m benchmarks history [--rows 10000000] [--bound BYTES] [--kills 20]

Prints a line for each promise. The answers are those of the service, through its own routes.
"""

from __future__ import annotations

import argparse
import json
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


def fill(path: Path, n_rows: int) -> None:
    """Make a history of 80 days with so many rows and 1,000 alarms, by SQL: a service takes weeks."""
    History(path).close()
    begin, every = time.time() - 80 * 86400, 80 * 86400 / n_rows
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(
            "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < :most) "
            "INSERT INTO items SELECT n, :begin + n * :every, n / 7.0, (n % 1000 + 1) / 1001.0, n % 20 = 19, "
            "iif(n % 20 = 19, 'content', 'typical'), n % 10 FROM numbers",
            {"most": n_rows, "begin": begin, "every": every},
        )
        for table, seconds in (("minutes", 60), ("hours", 3600)):
            connection.execute(
                f"INSERT INTO {table} SELECT CAST(time / {seconds} AS INTEGER) * {seconds}, min(number), count(*), sum(is_ood) "
                "FROM items GROUP BY 1"
            )
        content = json.dumps(
            {"item": 1, "since": [1, 1], "examples": list(range(12)), "sentence": "Most inputs look unusual."}
        )
        alarms = [(begin + alarm * 6900, begin + alarm * 6900 + 60, content) for alarm in range(1000)]
        connection.executemany("INSERT INTO alarms (time, ended, content) VALUES (?, ?, ?)", alarms)


def write_on(path: Path, n_rows: int, bound: int) -> int:
    """Write rows to a history as fast as it takes them; return the largest size of the file and its log meanwhile, in bytes."""
    history, largest = History(path, days=365, max_bytes=bound), 0
    while history.n_tidied == 0:  # the bound may be smaller than the file is
        time.sleep(0.05)
    for first in range(1, n_rows + 1, _PART):
        now = time.time()
        history.add([HistoryRow(n, now, 1.0, 0.5, False, "typical", 1) for n in range(first, first + _PART)])
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
        path = Path(folder) / "history.db"
        fill(path, arguments.rows)
        print(f"{arguments.rows:,} rows: {path.stat().st_size:,} bytes", flush=True)
        for address, seconds in answers(path):
            print(f"  {address}: {1000 * seconds:.0f} ms", flush=True)
        largest = write_on(path, 10 * _PART, arguments.bound)
        print(
            f"bound of {arguments.bound:,} bytes: {path.stat().st_size:,}, {largest:,} at most with the log", flush=True
        )
        found = [kill(Path(folder) / "killed.db", 2 + 0.17 * turn) for turn in range(arguments.kills)]
        lost = max((lost for lost, _ in found), default=0.0)
        print(f"{arguments.kills} kills: {lost:.2f} s lost at most, {sum(sound for _, sound in found)} files sound")


if __name__ == "__main__":
    main()
