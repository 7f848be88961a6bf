"""Log lines, for people or for machines, each with the id of the request that it is about."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from contextvars import ContextVar
from queue import SimpleQueue
from threading import Thread
from typing import TextIO

from app.settings import LogFormat

current_request_id: ContextVar[str | None] = ContextVar("current_request_id", default=None)
FIELDS = ("method", "path", "status")
"""What lines about a request carry besides their text, if they know it."""
LONGEST_QUEUE = 10_000
"""Lines that wait for whoever reads the log; there is no room for more."""
PATIENCE = 5.0
"""Seconds that the end waits for lines to be written."""


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


class BackgroundHandler(logging.Handler):
    """Formats lines where they are logged, and writes them in a thread of its own: no event loop waits for whoever reads the log.

    While ``longest`` lines wait, new ones are dropped, and the next that is not says how many. ``close``, which logging calls at
    an orderly end, waits until all are written, but not for a reader that does not read, as logging's QueueListener would.
    """

    def __init__(self, stream: TextIO, *, longest: int = LONGEST_QUEUE, patience: float = PATIENCE) -> None:
        super().__init__()
        self._stream, self._longest, self._patience = stream, longest, patience
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._num_dropped = 0
        self._thread = Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            if self._lines.qsize() >= self._longest:
                self._num_dropped += 1
                return
            self._tell_dropped()
            self._lines.put(self.format(record) + "\n")
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """What is logged from now on is not written."""
        self._tell_dropped()
        self._lines.put(None)
        self._thread.join(self._patience)
        super().close()

    def _tell_dropped(self) -> None:
        if self._num_dropped:
            said = f"{self._num_dropped} lines were dropped, as nobody read the log"
            self._num_dropped = 0
            self._lines.put(self.format(logging.LogRecord("moaserve.app", logging.WARNING, __file__, 0, said, None, None)) + "\n")

    def _write(self) -> None:
        going = True
        while going:
            # All that wait at once: in a busy process a thread is let in every few milliseconds.
            lines = [self._lines.get(), *(self._lines.get() for _ in range(self._lines.qsize()))]
            going = None not in lines
            with contextlib.suppress(AttributeError, OSError, ValueError):  # nobody reads any more, or it was closed from the start
                self._stream.write("".join(filter(None, lines)))
                self._stream.flush()


def configure(level: str, form: LogFormat) -> None:
    """Send all lines from ``level`` on to standard error, unless logging is configured already."""
    if logging.getLogger().handlers:
        return
    handler = BackgroundHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])
