"""Conversations that outlive a server, and go on with another one, through a real Redis that may fail in any way."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Any

import httpx
import pytest
from redis import Redis
from transformers import PreTrainedTokenizerBase

from benchmarks.prompts import BUNDLED_PROMPTS, Prompt, load_prompts
from models.loader import BUNDLED, load_tokenizer
from tests.app.sessions.redis_server import RedisServer, redis_server
from tests.integration.conftest import Server, start_server, stop_server

pytestmark = pytest.mark.integration

STREAMS = 16
OPTIONS = ("--dtype", "float32", "--redis-timeout", "5")


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server("--port", "0") as running:
        yield running


@pytest.fixture(scope="module")
def first(redis: RedisServer) -> Iterator[Server]:
    server = start_server(*OPTIONS, "--redis-url", redis.url)
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def second(redis: RedisServer) -> Iterator[Server]:
    server = start_server("--dtype", "float32", "--redis-timeout", "2", "--redis-url", redis.url)
    yield server
    stop_server(server)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return load_prompts(BUNDLED_PROMPTS, tokenizer(), count=64, max_tokens=1024, seed=0)


@dataclass
class Told:
    """A streamed answer, and what its prompt was."""

    text: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def computed(self) -> float:
        return 1 - self.cached_tokens / self.prompt_tokens


def body(messages: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    return {"messages": messages, "max_tokens": 32, "temperature": 0, "ignore_eos": True, **streamed, **extra}


async def ask(client: httpx.AsyncClient, server: Server, request: dict[str, Any], begun: Callable[[], None]) -> Told:
    text, usage = "", {}
    async with client.stream("POST", f"{server.base_url}/chat/completions", json=request) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                usage = chunk["usage"] or usage
                if chunk["choices"] and (more := chunk["choices"][0]["delta"].get("content")):
                    text += more
                    begun()
    return Told(text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])


def asked(server: Server, *requests: dict[str, Any], when_begun: Callable[[], None] = lambda: None) -> list[Told]:
    """All requests at once; ``when_begun`` is called once, in mid-stream."""
    pending = [when_begun]

    def begun() -> None:
        if pending:
            pending.pop()()

    async def all_of_them() -> list[Told]:
        async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None)) as client:
            return list(await asyncio.gather(*(ask(client, server, request, begun) for request in requests)))

    return asyncio.run(all_of_them())


def written(server: Server) -> float:
    text = httpx.get(f"{server.root_url}/metrics").text
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("moaserve_session_store_bytes_total") and 'direction="written"' in line
    )


def until(true: Callable[[], bool]) -> None:
    """Texts are stored behind their requests' backs: ask the server until it has done so."""
    ends = time.monotonic() + 120
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.02)


@cache
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    return tokenizer


def long_text(prompts: list[Prompt], tokens: int) -> str:
    special = set(tokenizer().all_special_ids)
    ids = (token for prompt in prompts for token in prompt.token_ids if token not in special)
    return str(tokenizer().decode(list(islice(ids, tokens))))


def test_a_second_turn_goes_on_here_after_a_restart_and_elsewhere(
    server: Server, redis: RedisServer, second: Server, prompts
) -> None:
    conversation = [{"role": "user", "content": long_text(prompts, 1050)}]
    restarted = start_server(*OPTIONS, "--redis-url", redis.url)
    try:
        (told,) = asked(restarted, body(conversation))
        assert told.prompt_tokens > 1000 and told.cached_tokens == 0
        conversation += [{"role": "assistant", "content": told.text}, {"role": "user", "content": "Thank you. What else?"}]
        (expected,) = asked(server, body(conversation, cache_salt="of nobody"))
        assert expected.cached_tokens == 0
        (here,) = asked(restarted, body(conversation))
    finally:
        assert stop_server(restarted) == 0  # what is not stored yet is stored now
    restarted = start_server(*OPTIONS, "--redis-url", redis.url)
    try:
        (after_restart,) = asked(restarted, body(conversation))
    finally:
        stop_server(restarted)
    (elsewhere,) = asked(second, body(conversation))
    for told in (here, after_restart, elsewhere):
        assert told.text == expected.text
        assert told.computed <= 0.05, told
    (others,) = asked(second, body(conversation, cache_salt="another tenant"))
    assert others.cached_tokens == 0 and others.text == expected.text


def test_sampled_answers_are_the_same_from_restored_blocks(server: Server, first: Server, second: Server, prompts) -> None:
    requests = [
        body(
            [{"role": "user", "content": long_text(prompts[4 * n :], 300)}],
            temperature=0.8,
            top_p=0.9,
            seed=n,
            cache_salt="sampled",
        )
        for n in range(8)
    ]
    expected = asked(server, *requests)
    before = written(first)
    assert [told.text for told in asked(first, *requests)] == [told.text for told in expected]
    until(lambda: written(first) >= before + 8 * 300 // 16 * 16 * 1000)  # more than 1,000 bytes a token
    again = asked(second, *requests)
    assert [told.text for told in again] == [told.text for told in expected]
    plain = asked(second, *(request | {"speculative": False} for request in requests))
    assert [told.text for told in plain] == [told.text for told in expected]


def kill(redis: RedisServer) -> None:
    redis.kill()


def freeze(redis: RedisServer) -> None:
    redis.signal(signal.SIGSTOP)


def fill(redis: RedisServer) -> None:
    with Redis(unix_socket_path=str(redis.socket)) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")


def corrupt(redis: RedisServer) -> None:
    with Redis(unix_socket_path=str(redis.socket)) as client:
        keys = list(client.scan_iter("*:block:*"))
        assert keys
        for key in keys:
            client.set(key, b"garbage")


def mend(redis: RedisServer) -> None:
    """As it was, and empty."""
    redis.kill()
    redis.start()


@pytest.fixture(scope="module")
def streams(prompts: list[Prompt]) -> list[dict[str, Any]]:
    """Requests of two rounds of streams."""
    return [
        body([{"role": "user", "content": long_text(prompts[3 * n :], 200)}], seed=n, temperature=0.7 * (n % 2))
        for n in range(2 * STREAMS)
    ]


@pytest.fixture(scope="module")
def undisturbed(server: Server, streams: list[dict[str, Any]]) -> list[str]:
    """What a server without sessions answers to them."""
    return [told.text for told in asked(server, *streams)]


@pytest.mark.parametrize("harm", [kill, freeze, fill, corrupt])
def test_whatever_happens_to_redis_all_streams_complete_unchanged(
    redis: RedisServer,
    first: Server,
    second: Server,
    streams: list[dict[str, Any]],
    undisturbed: list[str],
    harm: Callable[[RedisServer], None],
) -> None:
    requests = [request | {"cache_salt": harm.__name__} for request in streams]
    before = written(first)
    asked(first, *(request | {"max_tokens": 1} for request in requests[:STREAMS]))
    until(lambda: written(first) >= before + STREAMS * 200 // 16 * 16 * 1000)
    try:
        # Half of the prompts are in Redis when the streams begin; the others come after the harm is done.
        told = asked(second, *requests[:STREAMS], when_begun=lambda: harm(redis))
        told += asked(second, *requests[STREAMS:])
        assert [one.text for one in told] == undisturbed
        assert httpx.get(f"{second.root_url}/ready").status_code == 200
    finally:
        mend(redis)
    # It is found again by itself.
    until(lambda: all(server.metric("moaserve_session_store_up") == 1 for server in (first, second)))
    before, salts = written(second), count()

    def stores_again() -> bool:
        """Where Redis has refused to write, a server waits a little before it tries again."""
        asked(second, requests[0] | {"max_tokens": 1, "cache_salt": f"after {harm.__name__} {next(salts)}"})
        return written(second) > before

    until(stores_again)
