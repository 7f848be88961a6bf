"""A server whose model two processes share, over HTTP: it answers as one process does, and says so where one of them ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.integration.conftest import Server, start_server, stop_server

pytestmark = pytest.mark.integration

OPTIONS = ("--dtype", "float32", "--num-threads", "1")
QUESTIONS = ["What is 12 times 7?", "Tell me about the sea.", "I need a table for two tonight.", "Hello!"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    server = start_server(*OPTIONS, "--tensor-parallel-size", "2")
    yield server
    assert stop_server(server) == 0


def answer(server: Server, question: str, **parameters: object) -> tuple[str, int]:
    """What is said, and how many passes of the target it took."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 60, **parameters}
    response = httpx.post(f"{server.base_url}/chat/completions", json=body, timeout=120).raise_for_status().json()
    return response["choices"][0]["message"]["content"], response["metrics"]["speculative_decoding"]["num_target_calls"]


def others(server: Server) -> list[int]:
    """The processes that it has started to share its model."""
    children = Path(f"/proc/{server.process.pid}/task").glob("*/children")
    numbers = [int(number) for each in children for number in each.read_text("ascii").split()]
    return [number for number in numbers if "speculative.rank" in Path(f"/proc/{number}/cmdline").read_text("ascii")]


@pytest.mark.parametrize("parameters", [{"temperature": 0}, {"temperature": 0.8, "seed": 7}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("speculative", [True, False])
def test_answers_are_those_of_one_process(server: Server, shared: Server, parameters: dict[str, object], speculative: bool) -> None:
    asked = [[answer(each, text, speculative=speculative, **parameters) for text in QUESTIONS] for each in (server, shared)]
    # Not how many passes they took: what is drafted goes by what each server saw before.
    assert [text for text, _ in asked[0]] == [text for text, _ in asked[1]]
    calls, tokens = sum(count for _, count in asked[1]), len(QUESTIONS) * 60
    assert not speculative or calls < tokens / 2


def test_a_later_turn_begins_where_the_last_one_ended(shared: Server) -> None:
    text = "Please remember this list of words: " + ", ".join(f"word{number}" for number in range(40))
    first, _ = answer(shared, text, temperature=0)
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": first}, {"role": "user", "content": "Go on."}]
    body = {"messages": turns, "max_tokens": 8, "temperature": 0}
    usage = httpx.post(f"{shared.base_url}/chat/completions", json=body, timeout=120).raise_for_status().json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 100


def test_a_server_that_loses_a_process_says_so_and_stops_in_order() -> None:
    server = start_server(*OPTIONS, "--tensor-parallel-size", "2")
    try:
        (number,) = others(server)
        assert httpx.get(f"{server.root_url}/health").status_code == 200
        os.kill(number, signal.SIGKILL)
        assert server.process.wait(timeout=30) == 1
    finally:
        server.process.kill()
        server.reader.join()
        server.process.stdout.close()
    assert re.search(rf"error: tensor-parallel rank 1 of 2 \(process {number}\) cannot go on: .*SIGKILL", "".join(server.log))


def test_a_size_that_does_not_fit_is_one_clear_line() -> None:
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--tensor-parallel-size", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith("moaserve: error: cannot load bundled: --tensor-parallel-size 4 does not divide")
    assert line.endswith("it can be 1, 2")
