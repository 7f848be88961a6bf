"""Edges beside servers, and what their answers are compared by."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.integration.conftest import Server, start_server, stop_server
from tests.integration.warm import Warm


def port_of(server: Server) -> int:
    port = urlsplit(server.base_url).port
    assert port is not None
    return port


@contextmanager
def running_edge(bundle: Path, at: int | str, *options: str) -> Iterator[Server]:
    """An edge of the server ``at`` an address, or a port of this machine."""
    server = start_server("--server", address(at), "--bundle", str(bundle), "--num-threads", "1", *options, command="edge")
    try:
        yield server
    finally:
        stop_server(server)


def address(at: int | str) -> str:
    return at if isinstance(at, str) else f"ws://127.0.0.1:{at}"


def ask(server: Server, body: dict[str, Any], path: str = "chat/completions") -> Any:
    response = httpx.post(f"{server.base_url}/{path}", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def chunks(server: Server, body: dict[str, Any]) -> Iterator[Any]:
    with httpx.stream("POST", f"{server.base_url}/chat/completions", json={**body, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text_of(stream: list[Any]) -> str:
    """What a client that minds `edge.replace_from` ends up with."""
    text = ""
    for chunk in stream:
        if (start := chunk.get("edge", {}).get("replace_from")) is not None:
            text = text[:start]
        text += chunk["choices"][0]["delta"].get("content", "")
    return text


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.02)


def comparable(answer: Any) -> Any:
    """An answer without what differs between any two, log-probabilities rounded as sums in another order are."""
    choices = json.loads(json.dumps(answer["choices"]), parse_float=lambda number: f"{float(number):.3f}")
    for choice in choices:
        for call in choice.get("message", {}).get("tool_calls") or ():
            del call["id"]
    usage = {name: answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return choices, usage


def failing(bundle: Path, at: int | str, *options: str, **environment: str) -> str:
    """What an edge says that does not start."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("MOASERVE_")}
    options = ("--port", "0", "--server", address(at), "--bundle", str(bundle), "--compile", "off", *options)
    process = Warm("app.cli", ["edge", *options], known | environment)
    with process.stdout:
        said = process.stdout.read()
    assert process.wait(timeout=60) in (1, 2)
    return said
