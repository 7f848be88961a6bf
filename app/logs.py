"""Log lines, for people or for machines, each with the id of the request that it is about."""

from __future__ import annotations

import json
import logging
import time
from contextvars import ContextVar

from app.settings import LogFormat

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
FIELDS = ("method", "path", "status")
"""What lines about a request carry besides their text, if they know it."""


class TextFormatter(logging.Formatter):
    """``12:00:00 INFO moaserve.access: GET '/v1/models' 200 1.2 ms id=…``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """The line without a traceback."""
        request_id = current_request_id.get()
        return super().formatMessage(record) + (f" id={request_id}" if request_id else "")


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (RFC 3339), level, logger, message, request_id, and what else is known."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := current_request_id.get():
            line["request_id"] = request_id
        line |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)

    @staticmethod
    def converter(seconds: float | None) -> time.struct_time:
        """UTC."""
        return time.gmtime(seconds)


def configure(level: str, form: LogFormat) -> None:
    """Send all lines from ``level`` on to standard error."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
