"""Connections: who is let in, what peers may get wrong, and that none of it costs the server more than a message."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from speculative.async_engine import AsyncEngine
from speculative.errors import EngineNotReadyError, ProtocolError
from speculative.remote import frames as f
from speculative.remote.limits import Limits
from speculative.remote.outgoing import MOST_WAITING
from speculative.remote.packing import pack_rows, pack_tokens
from speculative.remote.protocol import encode
from tests.speculative.conftest import N0, MakeEngine, request
from tests.speculative.remote.edges import Server, write
from tests.speculative.remote.test_verifier import GREEDY, begun, text_of

LONG = request("a", list(range(3, 100)), max_tokens=20, **GREEDY)


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (f.Hello((2, 3), "right", ("int8",)), "unsupported_version"),
        (f.Hello((1,), "wrong", ("int8",)), "wrong_model"),
        (f.Hello((1,), "right", ("int3",)), "unsupported_format"),
        (f.Cancel(0), "out_of_order"),
        (f.Open(0, pack_tokens([1]), f.Sampling()), "out_of_order"),
    ],
)
async def test_who_cannot_agree_is_told_why_and_left(server: Server, hello: f.ClientFrame, code: str) -> None:
    connection = server.connect()
    if isinstance(hello, f.Hello) and hello.fingerprint == "right":
        hello = f.Hello(hello.versions, server.engine.info.pair, hello.formats)
    connection.tell(f.Ping(1), hello, f.Ping(2))
    assert await connection.hear() == f.Pong(1)
    error = await connection.hear(f.Error)
    assert (error.code, error.session) == (code, None)
    await connection.ended
    assert connection.heard() == []


async def test_the_first_format_that_both_know_is_taken(server: Server) -> None:
    connection = server.connect()
    connection.tell(f.Hello((7, 1), server.engine.info.pair, ("int2", "int4", "int8")))
    welcome = await connection.hear(f.Welcome)
    assert (welcome.version, welcome.format, welcome.model.row_bytes) == (1, "int4", 20)
    connection.tell(f.Hello((1,), server.engine.info.pair, ("int8",)))
    assert (await connection.hear(f.Error)).code == "out_of_order"
    await connection.ended


async def test_of_a_target_alone_nothing_but_tokens_is_told(make_engine: MakeEngine) -> None:
    engine = AsyncEngine(lambda: make_engine(N0, "none"))
    await engine.start()
    await engine.wait_ready()
    connection = Server(engine).connect()
    connection.tell(f.Hello((1,), engine.info.pair, ("int8",)))
    welcome = await connection.hear(f.Welcome)
    assert welcome.model.row_bytes == welcome.model.newest_bytes == 0
    connection = Server(engine).connect()
    connection.tell(f.Hello((1,), make_engine(N0, "moa").info.pair, ("int8",)))
    error = await connection.hear(f.Error)
    assert error.code == "wrong_model"
    await engine.stop()


async def test_without_memory_nobody_can_draft_elsewhere(make_engine: MakeEngine) -> None:
    engine = AsyncEngine(lambda: make_engine(N0, "ngram"))
    await engine.start()
    connection = Server(engine).connect()
    connection.tell(f.Hello((1,), "", ("int8",)))
    error = await connection.hear(f.Error)
    assert (error.code, error.retryable) == ("not_ready", True)
    await engine.wait_ready()
    connection = Server(engine).connect()
    connection.tell(f.Hello((1,), engine.info.pair, ("int8",)))
    error = await connection.hear(f.Error)
    assert error.code == "unsupported_format" and "--drafter" in error.message
    await engine.stop()


@pytest.mark.parametrize(
    ("opened", "code"),
    [
        ({"prompt": pack_tokens([160])}, "invalid_field"),
        ({"prompt": b""}, "invalid_field"),
        ({"sampling": f.Sampling(temperature=-1.0)}, "invalid_parameter"),
        ({"sampling": f.Sampling(grammar=f.GrammarPart("regex", "("))}, "invalid_parameter"),
        ({"prompt": pack_tokens([1] * 128)}, "context_length"),
        ({"sampling": f.Sampling(max_tokens=500)}, "context_length"),
        ({"output": pack_tokens([1] * 9), "sampling": f.Sampling(max_tokens=5)}, "invalid_parameter"),
        ({"text_length": 7}, "invalid_parameter"),
    ],
)
async def test_a_text_that_cannot_be_written_is_refused_alone(server: Server, opened: dict[str, object], code: str) -> None:
    connection = await server.greeted()
    connection.tell(f.Open(3, **{"prompt": pack_tokens([1, 2]), "sampling": f.Sampling(), **opened}))
    error = await connection.hear(f.Error)
    assert (error.code, error.session, error.retryable) == (code, 3, False)
    assert len(server.registry) == 0
    connection.tell(f.Open(3, pack_tokens([1, 2]), f.Sampling(max_tokens=1)))
    await connection.hear_last(f.Result)
    await connection.close()


@pytest.mark.parametrize(
    ("raised", "code", "retryable"),
    [
        (ProtocolError("overloaded", "1024 requests may wait, and do"), "overloaded", True),
        (EngineNotReadyError(), "not_ready", True),
        (RuntimeError("a bug"), "engine_failed", True),
    ],
)
async def test_what_the_server_says_of_a_text_is_told(server: Server, raised: Exception, code: str, retryable: bool) -> None:
    async def refusing(_request: object):
        raise raised
        yield

    connection = server.connect(generate=refusing)
    connection.tell(f.Hello((1,), server.engine.info.pair, ("int8",)))
    connection.tell(f.Open(0, pack_tokens([1]), f.Sampling()))
    await connection.hear(f.Welcome)
    error = await connection.hear(f.Error)
    assert (error.code, error.retryable, error.session) == (code, retryable, 0)
    assert "a bug" not in error.message
    await connection.close()


async def test_a_number_is_one_sessions(server: Server, make_engine: MakeEngine) -> None:
    connection = await begun(server, text_of(make_engine, LONG))
    connection.tell(f.Open(0, pack_tokens([1]), f.Sampling()))
    error = await connection.hear(f.Error)
    assert (error.code, error.session) == ("session_in_use", 0)
    connection.tell(f.Cancel(9))
    error = await connection.hear(f.Error)
    assert (error.code, error.session) == ("unknown_session", 9)
    connection.tell(f.Verify(9, 4, 1))
    error = await connection.hear(f.Error)
    assert (error.code, error.session, error.step) == ("unknown_session", 9, 4)
    connection.tell(f.Cancel(16))
    error = await connection.hear(f.Error)
    assert (error.code, error.session) == ("limit_exceeded", None)
    await connection.ended


@pytest.mark.parametrize("frame_bytes", [2**16, 2**20])
@pytest.mark.parametrize("padding", [0, 1000, 65536])
async def test_no_frame_is_longer_than_its_peer_takes(
    server: Server, make_engine: MakeEngine, frame_bytes: int, padding: int
) -> None:
    each = replace(LONG, params=replace(LONG.params, prompt_logprobs=20, logprobs=20))
    text = text_of(make_engine, each)
    connection = await begun(server, text, padding=padding, frame_bytes=frame_bytes)
    await write(connection, [text])
    await connection.cut()
    connection = await server.greeted(padding=padding, frame_bytes=frame_bytes)
    text.prompt_logprobs.clear()
    connection.tell(f.Resume(0, text.token, 97, 0, 0))
    tokens, text_said = 0, ""
    while True:
        if isinstance(frame := await connection.hear(), f.Result):
            assert frame.first == 97 + tokens
            tokens += len(frame.tokens) // 4
            text_said += frame.text_delta
            if frame.finish_reason:
                break
    assert (tokens, text_said) == (len(text.output), text.text)
    assert connection.largest <= frame_bytes
    await connection.close()


async def test_a_peer_that_does_not_read_is_not_listened_to(server: Server, make_engine: MakeEngine) -> None:
    connection = await begun(server, text_of(make_engine, LONG), padding=65536)
    connection.reads.clear()
    connection.tell(*(f.Ping(number) for number in range(200)))
    await asyncio.sleep(0.01)
    left = connection._to_server.qsize()
    assert left > 200 - 2 * MOST_WAITING // 65536
    connection.reads.set()
    for number in range(200):
        assert await connection.hear() == f.Pong(number)
    await connection.close()


async def test_garbage_ends_the_connection_and_nothing_else(server: Server, make_engine: MakeEngine) -> None:
    text = text_of(make_engine, LONG)
    connection = await begun(server, text)
    for data, code in ((b"", "malformed_frame"), (b"\xff" * 9, "malformed_frame"), (bytes(2**20 + 1), "frame_too_large")):
        wrong = await server.greeted()
        wrong.tell_bytes(data)
        error = await wrong.hear(f.Error)
        assert (error.code, error.session) == (code, None)
        await wrong.ended
    await write(connection, [text])
    assert text.output == text.expected
    await connection.close()


async def test_many_texts_share_a_connection(server: Server, make_engine: MakeEngine) -> None:
    texts = [text_of(make_engine, request(str(n), [n + 1, 9, n], max_tokens=8, **GREEDY), n, 2) for n in range(16)]
    connection = await server.greeted()
    connection.tell(*(text.open(number) for number, text in enumerate(texts)))
    await write(connection, texts)
    assert [text.output for text in texts] == [text.expected for text in texts]
    await connection.close()


rows = st.lists(st.integers(0, 4), max_size=4)
numbers = st.integers(0, 17)
some_frames = st.one_of(
    st.builds(
        f.Open, numbers, rows.map(pack_tokens), st.builds(f.Sampling, max_tokens=st.integers(0, 6)), output=rows.map(pack_tokens)
    ),
    st.builds(f.Verify, numbers, st.integers(1, 6), st.integers(1, 12), rows.map(pack_tokens), rows.map(pack_rows)),
    st.builds(f.Resume, numbers, st.binary(min_size=1, max_size=3), numbers, st.just(0), st.just(0)),
    st.builds(f.Cancel, numbers),
    st.builds(f.Ping, numbers),
).map(encode)
conversations = st.lists(st.one_of(some_frames, some_frames, some_frames, st.binary(max_size=30), st.none()), max_size=25)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(conversations=st.lists(conversations, min_size=1, max_size=2), seed=st.integers(0, 9))
def test_whatever_is_said_the_server_lives_on(lasting: Server, conversations: list[list[bytes | None]], seed: int) -> None:
    async def talk() -> None:
        chance = random.Random(seed)
        connections = [await lasting.greeted() for _ in conversations]
        for connection, messages in zip(connections, conversations, strict=True):
            for message in messages:
                if message is None:
                    await asyncio.sleep(chance.choice([0, 0.002]))
                else:
                    connection.tell_bytes(message)
        for connection in connections:
            await connection.cut()
        healthy = await lasting.greeted()
        healthy.tell(f.Open(0, pack_tokens([1, 2]), f.Sampling(max_tokens=1, temperature=0.0)))
        assert (await healthy.hear_last(f.Result)).finish_reason in ("length", "stop")
        await healthy.close()
        for session in list(lasting.registry._sessions.values()):
            session.end("idle")
        await lasting.assert_nothing_is_left()

    lasting.run(talk())


@pytest.fixture
def lasting(make_engine: MakeEngine):
    """A server for all examples of one test, on a loop of its own."""
    loop = asyncio.new_event_loop()
    engine = AsyncEngine(lambda: make_engine(N0, "moa"))

    async def begin() -> Server:
        await engine.start()
        await engine.wait_ready()
        return Server(engine, Limits(sessions=16))

    server = loop.run_until_complete(begin())
    server.run = loop.run_until_complete  # type: ignore[attr-defined]
    yield server
    loop.run_until_complete(engine.stop())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
