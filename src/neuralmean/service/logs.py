"""Log lines on stderr: time, level, message; as text or as one JSON object each."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timezone

from neuralmean.errors import InputError

FORMATS = ("text", "json")
_EXTRA = ("method", "path", "status", "ms", "client")


class LineFormatter(logging.Formatter):
    """One line for each record, whatever its message holds.

    Args:
        kind: `text` or `json`.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        when = datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds")
        message = record.getMessage()
        if record.exc_info:
            message = f"{message} {self.formatException(record.exc_info)}"
        if self._kind == "json":
            more = {name: getattr(record, name) for name in _EXTRA if hasattr(record, name)}
            return json.dumps(
                {"time": when, "level": record.levelname, "logger": record.name, "message": message, **more}
            )
        return f"{when} {record.levelname} {message}".replace("\r", "\\r").replace("\n", "\\n")


def check_log_format(kind: str) -> None:
    """Raise unless the format is known."""
    if kind not in FORMATS:
        raise InputError(f"Expected the log format to be one of {list(FORMATS)}, but got {kind!r}.")


def set_up_logs(kind: str) -> None:
    """Log to stderr, unless the program has configured logging already."""
    if logging.getLogger().handlers or logging.getLogger("neuralmean.service").handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter(kind))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
