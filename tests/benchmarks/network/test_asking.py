"""Streams as a client reads them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from benchmarks.network.asking import Answer, AnswerError, ask, read_engine_seconds

METRICS = {"speculative_decoding": {"num_spec_steps": 2}, "edge": {"bytes_sent": 7}}
USAGE = {"completion_tokens": 5}


class Chunks(httpx.AsyncByteStream):
    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk


def event(**chunk: Any) -> bytes:
    return f"data: {json.dumps({'choices': []} | chunk)}\n\n".encode()


def text(piece: str, **chunk: Any) -> bytes:
    return event(choices=[{"text": piece}], **chunk)


async def answer_to(*chunks: bytes, status: int = 200) -> tuple[Answer, dict[str, Any]]:
    asked: dict[str, Any] = {}

    def handle(request: httpx.Request) -> httpx.Response:
        asked.update(json.loads(request.content), path=request.url.path)
        return httpx.Response(status, stream=Chunks(*chunks))

    async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as client:
        return await ask(client, "http://there", [1, 2], temperature=0.5, seed=3), asked


async def test_an_answer_is_read_to_its_end() -> None:
    answer, asked = await answer_to(
        text("a"), b": ping\n\n", text("b"), text("", metrics=METRICS), event(usage=USAGE), b"data: [DONE]\n\n"
    )
    assert (answer.text, answer.tokens, answer.stats) == ("ab", 5, {"num_spec_steps": 2, "bytes_sent": 7})
    assert 0 < answer.first <= answer.seconds
    assert asked["path"] == "/v1/completions" and asked["prompt"] == [1, 2] and asked["stream"] is True
    assert (asked["temperature"], asked["seed"]) == (0.5, 3)


async def test_an_answer_without_text_has_its_first_at_its_end() -> None:
    answer, _ = await answer_to(event(usage={"completion_tokens": 1}))
    assert answer.first == answer.seconds and answer.decode_tokens_per_second is None


@pytest.mark.parametrize(
    ("chunks", "status", "message"),
    [
        ((b'{"error": "no room"}',), 429, "429: .*no room"),
        ((text("a"), event(error={"message": "the engine has failed"})), 200, "the engine has failed"),
        ((text("broken o"), text("ff")), 200, "ended without usage, after 'broken off'"),
    ],
)
async def test_an_answer_that_does_not_come_to_its_end_is_an_error(chunks: tuple[bytes, ...], status: int, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        await answer_to(*chunks, status=status)


async def test_a_server_that_is_not_there_is_an_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as client:
        with pytest.raises(AnswerError, match="http://there: ConnectError refused"):
            await ask(client, "http://there", [1])


def test_speeds_count_the_first_token_where_it_belongs() -> None:
    answer = Answer("", tokens=11, first=0.5, seconds=2.5, stats={})
    assert answer.tokens_per_second == 11 / 2.5 and answer.decode_tokens_per_second == 10 / 2.0


def test_the_engines_seconds_are_those_of_all_phases() -> None:
    exposition = """# HELP moaserve_engine_step_seconds_total Seconds
moaserve_engine_step_seconds_total{model_name="m",phase="prefill"} 0.25
moaserve_engine_step_seconds_total{model_name="m",phase="verify"} 1.5
moaserve_engine_step_seconds_created{model_name="m",phase="verify"} 17e8
moaserve_engine_steps_total{model_name="m"} 42.0
"""
    assert read_engine_seconds(exposition) == (1.75, 42)
