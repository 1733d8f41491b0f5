"""The history of the service on disk: decisions, counts by minute and hour, alarms, pictures of flagged inputs.

One SQLite file, written in one transaction every half second: everything up to a second before a `kill -9` is kept. The file
is bounded by age and by size: the oldest rows go first. Readers open connections of their own and never block the writer.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from neuralmean.errors import InputError, StorageError

log = logging.getLogger("neuralmean.service")

EVERY_S = 0.5  # between two transactions
_TIDY_S = 60.0  # between two checks of age and size
N_PICTURES = 2000
_MOST_ALARMS = 1000
_MOST_WAITING = 100_000  # items in memory while the disk does not answer
_VERSION = 1
_MARK = 0x6E6D6468  # "nmdh", in the file's header
_BINS = {
    "hours": ("minutes", 60, 1800, 48),
    "days": ("hours", 3600, 86400, 30),
    "weeks": ("hours", 3600, 7 * 86400, 26),
}
SPANS = tuple(_BINS)
_SCHEMA = """
CREATE TABLE items (number INTEGER PRIMARY KEY, time REAL NOT NULL, score REAL NOT NULL, p_value REAL NOT NULL,
    is_ood INTEGER NOT NULL, kind TEXT, predicted INTEGER);
CREATE TABLE minutes (start INTEGER PRIMARY KEY, first INTEGER NOT NULL, n INTEGER NOT NULL, n_ood INTEGER NOT NULL);
CREATE TABLE hours (start INTEGER PRIMARY KEY, first INTEGER NOT NULL, n INTEGER NOT NULL, n_ood INTEGER NOT NULL);
CREATE TABLE alarms (id INTEGER PRIMARY KEY, time REAL NOT NULL, ended REAL, content TEXT NOT NULL);
CREATE TABLE pictures (number INTEGER PRIMARY KEY, png BLOB NOT NULL);
CREATE TABLE alarm_pictures (number INTEGER PRIMARY KEY, alarm INTEGER NOT NULL, png BLOB NOT NULL);
"""


class HistoryRow(NamedTuple):
    """One stored decision."""

    number: int  # counted from 1, over restarts
    time: float  # seconds since 1970
    score: float
    p_value: float
    is_ood: bool
    kind: str | None
    predicted: int | None


class History:
    """An open history.

    Args:
        path: The file; it is created if missing.
        days: How long decisions and alarms are kept.
        max_bytes: Approximate maximum size of the file.
        n_pictures: Number of latest pictures that are kept.
    """

    def __init__(
        self, path: str | Path, *, days: float = 90.0, max_bytes: int = 2 * 1024**3, n_pictures: int = N_PICTURES
    ) -> None:
        self.path, self.days, self.max_bytes, self.n_pictures = Path(path), days, max_bytes, n_pictures
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._items: list[tuple[Any, ...]] = []
        self._pictures: list[tuple[int, bytes]] = []
        self._alarms: list[tuple[str, float, str | None]] = []  # what, when, content
        self.n_dropped = self.n_tidied = 0
        self._connection = _open_to_write(self.path)
        self.base = self._last_number()  # item numbers continue those of an earlier run
        self._tidied = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="neuralmean-history", daemon=True)
        self._thread.start()

    def add(self, rows: Sequence[HistoryRow], pictures: Sequence[tuple[int, bytes]] = ()) -> None:
        """Keep decisions, in order, and pictures (PNG) by number; they are written within half a second.

        Numbers are those of this run, from 1.
        """
        with self._lock:
            room = max(0, _MOST_WAITING - len(self._items))
            self.n_dropped += max(0, len(rows) - room)
            self._items.extend((row.number + self.base, *row[1:]) for row in rows[:room])
            self._pictures.extend((number + self.base, png) for number, png in pictures[: self.n_pictures])
            del self._pictures[: -self.n_pictures or None]

    def begin_alarm(self, content: dict[str, Any]) -> None:
        """Keep an alarm; items in `content["examples"]` are numbered as in this run."""
        content = {**content, "examples": [number + self.base for number in content.get("examples", ())]}
        with self._lock:
            self._alarms.append(("begin", time.time(), json.dumps(content)))

    def name_layers(self, layers: Sequence[str]) -> None:
        """Add the layers that moved to the current alarm; they are known only some inputs later."""
        with self._lock:
            self._alarms.append(("layers", time.time(), json.dumps(list(layers))))

    def end_alarm(self) -> None:
        """Record that the alarm was switched off."""
        with self._lock:
            self._alarms.append(("end", time.time(), None))

    def close(self) -> None:
        """Write the pending records and close."""
        self._closed = True
        self._wake.set()
        self._thread.join()
        self._connection.close()

    @property
    def n_waiting(self) -> int:
        """Number of decisions that are not yet written."""
        return len(self._items)

    def flush(self) -> None:
        """Write the pending records now."""
        with self._lock:
            items, self._items = self._items, []
            pictures, self._pictures = self._pictures, []
            alarms, self._alarms = self._alarms, []
        if not (items or pictures or alarms):
            return
        with self._connection as connection:
            connection.executemany("INSERT OR IGNORE INTO items VALUES (?, ?, ?, ?, ?, ?, ?)", items)
            for table, seconds in (("minutes", 60), ("hours", 3600)):
                connection.executemany(
                    f"INSERT INTO {table} VALUES (?, ?, ?, ?) ON CONFLICT (start) "
                    "DO UPDATE SET n = n + excluded.n, n_ood = n_ood + excluded.n_ood",
                    _counts(items, seconds),
                )
            connection.executemany("INSERT OR REPLACE INTO pictures VALUES (?, ?)", pictures)
            for what, when, content in alarms:
                if what == "begin" and content is not None:
                    added = connection.execute("INSERT INTO alarms (time, content) VALUES (?, ?)", (when, content))
                    # Pictures of an alarm are kept as long as the alarm, others only while they are among the latest.
                    connection.executemany(
                        "INSERT OR IGNORE INTO alarm_pictures SELECT number, ?, png FROM pictures WHERE number = ?",
                        [(added.lastrowid, number) for number in json.loads(content)["examples"]],
                    )
                elif what == "layers":
                    latest = "id = (SELECT max(id) FROM alarms WHERE ended IS NULL)"
                    connection.execute(
                        f"UPDATE alarms SET content = json_set(content, '$.layers', json(?)) WHERE {latest}", (content,)
                    )
                else:
                    connection.execute("UPDATE alarms SET ended = ? WHERE ended IS NULL", (when,))

    def _last_number(self) -> int:
        """Return the largest number in use: pictures of an alarm may outlive the other rows."""
        tables = ("items", "pictures", "alarm_pictures")
        found = [self._connection.execute(f"SELECT max(number) FROM {table}").fetchone()[0] for table in tables]
        return max(number or 0 for number in found)

    def tidy(self) -> None:
        """Delete expired rows, and the oldest rows while the file is too large."""
        with self._connection as connection:
            oldest = time.time() - 86400 * self.days
            recent = "SELECT coalesce(min(first), ?) FROM minutes WHERE start >= ?"
            first = connection.execute(recent, (self._last_number() + 1, oldest - 60)).fetchone()
            for table in ("items", "pictures"):
                connection.execute(f"DELETE FROM {table} WHERE number < ?", first)
            for table in ("minutes", "hours"):
                connection.execute(f"DELETE FROM {table} WHERE start < ?", (oldest - 3600,))
            latest = "SELECT id FROM alarms ORDER BY id DESC LIMIT ?"
            connection.execute(
                f"DELETE FROM alarms WHERE time < ? OR id NOT IN ({latest})",
                (oldest, _MOST_ALARMS),
            )
            connection.execute("DELETE FROM alarm_pictures WHERE alarm NOT IN (SELECT id FROM alarms)")
            keep = "SELECT number FROM pictures ORDER BY number DESC LIMIT ?"
            connection.execute(f"DELETE FROM pictures WHERE number NOT IN ({keep})", (self.n_pictures,))
        if self._used() > self.max_bytes:
            self._shrink()
        self.n_tidied += 1
        # By `executescript`, as `execute` takes one step, which frees one page. The file shrinks when the log is merged into it.
        self._connection.executescript("PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);")

    def _shrink(self) -> None:
        """Delete the oldest decisions until a tenth of the room is free, in small transactions."""
        while self._used() > 0.9 * self.max_bytes:
            low, high = self._connection.execute("SELECT min(number), max(number) FROM items").fetchone()
            if low is None:
                return
            with self._connection as connection:
                connection.execute("DELETE FROM items WHERE number < ?", (low + max(1, (high - low + 1) // 100),))

    def _used(self) -> int:
        pages, free, size = (self._connection.execute(f"PRAGMA {name}").fetchone()[0] for name in _SIZES)
        return int((pages - free) * size)

    def _run(self) -> None:
        while not self._closed:
            self._wake.wait(EVERY_S)
            self._write()
        self._write()

    def _write(self) -> None:
        """Write the pending records; a full disk is only logged."""
        try:
            self.flush()
            if time.monotonic() - self._tidied > _TIDY_S or self._used() > self.max_bytes:
                self.tidy()
                self._tidied = time.monotonic()
        except sqlite3.Error as error:
            log.error("The history was not written: %s", error)


_SIZES = ("page_count", "freelist_count", "page_size")


def _counts(items: Sequence[tuple[Any, ...]], seconds: int) -> list[tuple[int, int, int, int]]:
    """Return start, first number, items and flagged items of each stretch of time."""
    found: dict[int, list[int]] = {}
    for number, when, _, _, is_ood, *_ in items:
        entry = found.setdefault(int(when // seconds) * seconds, [number, 0, 0])
        entry[1] += 1
        entry[2] += is_ood
    return [(start, *entry) for start, entry in found.items()]  # type: ignore[misc]


def _open_to_write(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
        is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if is_new:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA journal_size_limit = {16 * 1024**2}")
        if is_new:
            connection.execute(f"PRAGMA application_id = {_MARK}")
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        _check(connection, path)
    except sqlite3.Error as error:
        raise StorageError(f"Expected {str(path)!r} to be a history, but SQLite reported: {error}.") from None
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    marks = tuple(connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
    if marks != (_MARK, _VERSION):
        raise StorageError(f"Expected {str(path)!r} to be a history of this version, but it is something else.")


@contextmanager
def _open_to_read(path: str | Path) -> Iterator[sqlite3.Connection]:
    path = Path(path)
    if not path.is_file():
        raise InputError(f"Expected {str(path)!r} to be a history, but there is no such file.")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as connection:
            _check(connection, path)
            yield connection
    except sqlite3.Error as error:
        raise StorageError(f"Expected {str(path)!r} to be a history, but SQLite reported: {error}.") from None


def read_span(path: str | Path, span: str, *, now: float | None = None) -> list[dict[str, Any]]:
    """Return items, flagged items and alarms of each half hour of a day, day of a month or week of half a year, oldest first.

    Args:
        path: The history.
        span: `"hours"`, `"days"` or `"weeks"`.
        now: Where the span ends, in seconds since 1970.
    """
    if span not in _BINS:
        raise InputError(f"Expected the span to be one of {list(SPANS)}, but got {span!r}.")
    table, _, width, count = _BINS[span]
    end = int((time.time() if now is None else now) // width + 1) * width
    begin = end - count * width
    rows = [{"start": begin + i * width, "n": 0, "n_ood": 0, "n_alarms": 0} for i in range(count)]
    with _open_to_read(path) as connection:
        found = connection.execute(
            f"SELECT (start - ?) / ?, sum(n), sum(n_ood) FROM {table} WHERE start >= ? AND start < ? GROUP BY 1",
            (begin, width, begin, end),
        )
        for place, n, n_ood in found:
            rows[place] |= {"n": n, "n_ood": n_ood}
        for (when,) in connection.execute("SELECT time FROM alarms WHERE time >= ? AND time < ?", (begin, end)):
            rows[int((when - begin) // width)]["n_alarms"] += 1
    return rows


def read_alarms(path: str | Path, *, limit: int = 100) -> list[dict[str, Any]]:
    """Return the latest alarms, newest first, each with `id`, `time`, `ended` and its details."""
    with _open_to_read(path) as connection:
        rows = connection.execute("SELECT id, time, ended, content FROM alarms ORDER BY id DESC LIMIT ?", (limit,))
        return [{**json.loads(content), "id": id_, "time": when, "ended": ended} for id_, when, ended, content in rows]


def read_picture(path: str | Path, number: int) -> bytes | None:
    """Return the picture of an item as PNG; None if it is not kept, or no longer."""
    if not 0 < number < 2**63:  # SQLite's numbers end there
        return None
    with _open_to_read(path) as connection:
        both = "SELECT png FROM alarm_pictures WHERE number = ? UNION ALL SELECT png FROM pictures WHERE number = ?"
        row = connection.execute(both, (number, number)).fetchone()
    return None if row is None else bytes(row[0])


def read_totals(path: str | Path) -> dict[str, Any]:
    """Return how many decisions, flagged ones, alarms and pictures are kept, and since when."""
    with _open_to_read(path) as connection:
        n, n_ood, first = connection.execute("SELECT sum(n), sum(n_ood), min(start) FROM hours").fetchone()
        others = [connection.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for name in ("alarms", "pictures")]
    return {"n": n or 0, "n_ood": n_ood or 0, "since": first, "n_alarms": others[0], "n_pictures": others[1]}


def read_rows(path: str | Path, *, flagged: bool = False) -> Iterator[HistoryRow]:
    """Yield the decisions that are kept, oldest first; only the flagged ones if requested."""
    where = " WHERE is_ood" if flagged else ""
    with _open_to_read(path) as connection:
        for row in connection.execute(f"SELECT * FROM items{where} ORDER BY number"):
            number, when, score, p_value, is_ood, kind, predicted = row
            yield HistoryRow(number, when, score, p_value, bool(is_ood), kind, predicted)
