"""Sessions over a tiny engine whose steps can be held up."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import pytest

from speculative.async_engine import AsyncEngine
from speculative.engine import Engine
from tests.speculative.conftest import N0, MakeEngine
from tests.speculative.remote.edges import Server


class Gate:
    """Closed, it lets no step of an engine begin; ``failing`` steps raise."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.failing = False
        self.close, self.open = self._open.clear, self._open.set

    def guard(self, engine: Engine) -> Engine:
        step = engine.step

        def guarded() -> object:
            self._open.wait()
            if self.failing:
                raise RuntimeError("broken on purpose")
            return step()

        engine.step = guarded  # type: ignore[method-assign,assignment]
        return engine


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def engine(make_engine: MakeEngine, gate: Gate) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(lambda: gate.guard(make_engine(N0, "entry", prefill_chunk=7, draft_window=0)))
    await engine.start()
    await engine.wait_ready()
    yield engine
    gate.open()
    await engine.stop()


@pytest.fixture
async def server(engine: AsyncEngine, gate: Gate) -> AsyncIterator[Server]:
    """Nothing may be left of it in the end."""
    server = Server(engine)
    yield server
    gate.open()
    await server.registry.close()
    await server.assert_nothing_is_left()
