"""Lines are written in a thread of their own: in order, all of them, and nobody waits for a reader that does not read."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Event

import pytest

from app.logs import BackgroundHandler, JsonFormatter, current_request_id


class Stuck(io.StringIO):
    """What nobody reads until somebody does."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.read = Event(), Event()

    def write(self, text: str) -> int:
        self.asked.set()
        self.read.wait()
        return super().write(text)


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    stream = Stuck()
    yield stream
    stream.read.set()


def logger_to(handler: logging.Handler) -> logging.Logger:
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger


def test_lines_that_nobody_reads_are_waited_for_by_nobody_and_what_is_dropped_is_told(stuck: Stuck) -> None:
    handler = BackgroundHandler(stuck, longest=3)
    logger = logger_to(handler)
    logger.info("line 0")
    stuck.asked.wait()
    for number in range(1, 6):
        logger.info("line %d", number)
    stuck.read.set()
    handler.close()
    dropped = "2 lines were dropped, as nobody read the log"
    assert stuck.getvalue().splitlines() == ["line 0", "line 1", "line 2", "line 3", dropped]


def test_the_end_waits_for_no_reader_for_ever(stuck: Stuck) -> None:
    handler = BackgroundHandler(stuck, patience=0.01)
    logger_to(handler).info("line")
    stuck.asked.wait()
    handler.close()
    assert stuck.getvalue() == ""


def test_a_line_says_where_it_was_logged() -> None:
    stream = io.StringIO()
    handler = BackgroundHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logger_to(handler)
    token = current_request_id.set("mine")
    try:
        raise ValueError("broken")
    except ValueError:
        logger.exception("failed")
    current_request_id.reset(token)
    handler.close()
    line = json.loads(stream.getvalue())
    assert (line["message"], line["request_id"]) == ("failed", "mine")
    assert "ValueError: broken" in line["traceback"]


def test_a_stream_that_cannot_be_written_to_costs_its_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    handler = BackgroundHandler(stream)
    logger_to(handler).info("line")
    handler.close()
    assert capsys.readouterr().err == ""


def test_a_process_that_ends_has_written_all() -> None:
    code = "import logging; from app.logs import configure; configure('info', 'text'); configure('info', 'json')\n"
    code += "for number in range(2000): logging.getLogger('many').info('line %d', number)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    said = [line.partition("INFO many: ")[2] for line in ended.stderr.splitlines()]
    assert said == [f"line {number}" for number in range(2000)]
