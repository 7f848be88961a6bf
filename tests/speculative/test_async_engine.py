"""The engine thread seen from asyncio."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace

import pytest

from speculative.async_engine import AsyncEngine
from speculative.engine import Engine
from speculative.errors import ContextLengthError, EngineLoadError, EngineNotReadyError, EngineStepError, InvalidRequestError
from speculative.request import OfferedTree
from tests.speculative.conftest import MakeEngine, request, run, tokens


@pytest.fixture
async def engine(make_engine: MakeEngine):
    engine = AsyncEngine(lambda: make_engine(max_num_seqs=2))
    await engine.start()
    await engine.wait_ready()
    yield engine
    await engine.stop()


async def collect(engine: AsyncEngine, name: str, **params: object) -> list[int]:
    ids: list[int] = []
    async for output in engine.generate(request(name, [1, 2, 3], **params)):
        ids.extend(output.new_token_ids)
    return ids


async def until_idle(engine: AsyncEngine) -> None:
    async def idle() -> None:
        while engine.status().num_running or engine.status().num_waiting:
            await asyncio.sleep(0)

    await asyncio.wait_for(idle(), 30)


async def test_many_streams_equal_one_at_a_time(engine: AsyncEngine, make_engine: MakeEngine) -> None:
    wanted = [request(str(i), [1, 2, 3], max_tokens=20, temperature=1.0, seed=i) for i in range(8)]
    expected = [tokens(run(make_engine(), [each]))[each.request_id] for each in wanted]
    got = await asyncio.gather(*(collect(engine, str(i), max_tokens=20, temperature=1.0, seed=i) for i in range(8)))
    assert got == expected


async def test_closing_a_stream_aborts_its_request(engine: AsyncEngine) -> None:
    stream = engine.generate(request("r", [1], temperature=0.0))
    await anext(stream)
    await stream.aclose()
    await until_idle(engine)
    assert len(await collect(engine, "again", max_tokens=5)) == 5


async def test_cancelling_a_reader_aborts_its_request(engine: AsyncEngine) -> None:
    first = asyncio.Event()

    async def read() -> None:
        async for _ in engine.generate(request("r", [1], temperature=0.0)):
            first.set()

    task = asyncio.create_task(read())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(engine)


async def test_a_remote_request_goes_on_with_what_is_offered(engine: AsyncEngine, make_engine: MakeEngine) -> None:
    one = request("r", [1, 2, 3], max_tokens=12, temperature=0.9, seed=4)
    (expected,) = tokens(run(make_engine(), [one])).values()
    said: list[int] = []
    async for output in engine.generate(replace(one, remote=True)):
        said += output.new_token_ids
        if output.finish_reason is None:
            chain = expected[len(said) : len(said) + 2]
            await engine.offer("r", OfferedTree(3 + len(said), tuple(chain), tuple(range(len(chain)))))
    assert said == expected
    with pytest.raises(InvalidRequestError, match="it has ended"):
        await engine.offer("r", OfferedTree(15))


async def test_draining_finishes_what_runs_and_takes_no_more(engine: AsyncEngine) -> None:
    task = asyncio.create_task(collect(engine, "r", max_tokens=50))
    while not engine.status().num_running and not task.done():
        await asyncio.sleep(0)
    assert await engine.drain(timeout=20)
    assert len(await task) == 50
    with pytest.raises(EngineNotReadyError):
        await collect(engine, "late", max_tokens=1)


async def test_draining_aborts_what_is_left_when_its_time_is_up(engine: AsyncEngine) -> None:
    outputs = engine.generate(request("r", [1], temperature=0.0))
    await anext(outputs)
    assert not await engine.drain(timeout=0)
    assert [output.finish_reason async for output in outputs][-1] == "abort"
    assert engine.alive


async def test_stopping_ends_open_streams(make_engine: MakeEngine) -> None:
    engine = AsyncEngine(make_engine)
    await engine.start()
    await engine.wait_ready()
    stream = engine.generate(request("r", [1], temperature=0.0))
    await anext(stream)
    await engine.stop()
    reasons = [output.finish_reason async for output in stream]
    assert reasons[-1] in ("abort", "length")


async def test_what_is_asked_of_an_engine_that_ends_is_answered(make_engine: MakeEngine, monkeypatch) -> None:
    engine, stepping, told_to_stop = AsyncEngine(make_engine), asyncio.Event(), threading.Event()
    await engine.start()
    await engine.wait_ready()
    loop, step = asyncio.get_running_loop(), Engine.step

    def slow(self: Engine) -> list:
        loop.call_soon_threadsafe(stepping.set)
        told_to_stop.wait(20)
        return step(self)

    monkeypatch.setattr(Engine, "step", slow)
    reading = asyncio.create_task(collect(engine, "r", max_tokens=5))
    await asyncio.wait_for(stepping.wait(), 20)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    asking = asyncio.create_task(engine.read_blocks([b"key"], 0))
    await asyncio.sleep(0)
    told_to_stop.set()
    with pytest.raises(EngineNotReadyError):
        await asyncio.wait_for(asking, 20)
    await asyncio.gather(stopping, reading, return_exceptions=True)
    with pytest.raises(EngineNotReadyError):
        await engine.read_blocks([b"key"], 0)


async def test_an_abort_that_fails_ends_one_request_alone(engine: AsyncEngine, monkeypatch) -> None:
    abort = Engine.abort

    def broken(self: Engine, request_id: str) -> None:
        abort(self, request_id)
        raise RuntimeError("a fault")

    monkeypatch.setattr(Engine, "abort", broken)
    stream = engine.generate(request("r", [1], temperature=0.0, max_tokens=50))
    await anext(stream)
    await stream.aclose()
    assert len(await collect(engine, "next", max_tokens=5)) == 5 and engine.alive


async def test_a_model_without_a_tokenizer_is_the_callers_to_know(engine: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match=r"put its tokenizer\.json"):
        _ = engine.tokenizer


async def test_bad_requests_raise_in_the_caller(engine: AsyncEngine) -> None:
    with pytest.raises(ContextLengthError):
        engine.validate(request("r", [1] * 500))
    with pytest.raises(ContextLengthError):
        await anext(engine.generate(request("r", [1] * 500)))


class PanicError(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("kind", [RuntimeError, PanicError])
async def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(
    engine: AsyncEngine, monkeypatch, kind: type[BaseException]
) -> None:
    step, failures = Engine.step, iter([kind("no memory")])

    def failing(self: Engine) -> object:
        for failure in failures:
            raise failure
        return step(self)

    monkeypatch.setattr(Engine, "step", failing)
    # The failing step admits nobody: the request waits, and the next step serves it.
    assert len(await collect(engine, "again", max_tokens=5)) == 5

    real_draft = Engine._draft
    fail_once = iter([kind("no memory")])

    def failing_draft(self: Engine, batch: list, *, reading: bool) -> object:
        for failure in fail_once:
            raise failure
        return real_draft(self, batch, reading=reading)

    monkeypatch.setattr(Engine, "_draft", failing_draft)
    with pytest.raises(EngineStepError):
        await collect(engine, "lost", max_tokens=5)
    assert len(await collect(engine, "next", max_tokens=5)) == 5


@pytest.mark.parametrize("kind", [RuntimeError, PanicError])
async def test_streams_end_and_health_turns_when_the_thread_dies(
    engine: AsyncEngine, monkeypatch, kind: type[BaseException]
) -> None:
    def broken(self: Engine) -> list:
        raise kind("slots are lost")

    monkeypatch.setattr(Engine, "step", broken)
    monkeypatch.setattr(Engine, "fail_active", broken)
    with pytest.raises(EngineStepError):
        await collect(engine, "r", max_tokens=5)
    engine._thread.join(10)
    assert not engine.alive and not engine.ready


async def test_what_a_step_gained_is_told_as_the_next_pass_begins_but_first_and_last_tokens_at_once(
    engine: AsyncEngine, monkeypatch
) -> None:
    log: list[str] = []

    def logged(owner: object, name: str, what: str, when=lambda *_: True) -> None:
        function = getattr(owner, name)

        def call(*arguments: object, **options: object) -> object:
            if when(*arguments):
                log.append(what)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    logged(engine._engine, "_draft", "draft")
    logged(engine._engine.target, "forward_tapped", "pass")
    logged(engine, "_call", "told", when=lambda function, *_: function == engine._publish)
    assert len(await collect(engine, "r", max_tokens=30, temperature=1.0)) == 30
    steps = log.count("draft")
    assert steps > 3
    assert log == ["pass", "told", "draft", "pass", *["draft", "told", "pass"] * (steps - 1), "told"]


async def test_while_loading_requests_are_refused(make_engine: MakeEngine) -> None:
    gate = threading.Event()

    def load() -> Engine:
        gate.wait(10)
        return make_engine()

    engine = AsyncEngine(load)
    await engine.start()
    assert engine.alive and not engine.ready
    with pytest.raises(EngineNotReadyError):
        engine.validate(request("r", [1]))
    gate.set()
    await engine.wait_ready()
    assert engine.ready
    await engine.stop()
    assert not engine.alive


async def test_garbage_is_not_looked_for_in_what_is_loaded(make_engine: MakeEngine) -> None:
    gc.unfreeze()
    engine = AsyncEngine(make_engine)
    await engine.start()
    await engine.wait_ready()
    assert gc.get_freeze_count() > 0
    await engine.stop()


async def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    from speculative.config import EngineConfig

    engine = AsyncEngine.from_config(EngineConfig(model="./no/such/folder"))
    await engine.start()
    with pytest.raises(EngineLoadError, match="no/such/folder"):
        await engine.wait_ready()
    assert not engine.ready
    await engine.stop()
