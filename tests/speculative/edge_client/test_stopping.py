"""An edge that is told to stop, whatever it is at."""

from __future__ import annotations

import asyncio
from pathlib import Path

from speculative.edge.config import EdgeConfig
from speculative.edge.engine import EdgeEngine
from speculative.edge.opening import Server
from speculative.edge_export import export_edge
from tests.speculative.conftest import N0


async def test_nothing_goes_on_where_the_server_says_nothing(tmp_path: Path) -> None:
    export_edge(str(N0 / "target"), str(N0 / "drafter"), tmp_path / "edge", dtype="float32")
    reached, over = asyncio.Event(), asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reached.set()
        await over.wait()
        writer.close()

    listening = await asyncio.start_server(silent, "127.0.0.1", 0)
    before = asyncio.all_tasks()
    engine = EdgeEngine(
        EdgeConfig(
            Server(f"ws://127.0.0.1:{listening.sockets[0].getsockname()[1]}"), tmp_path / "edge", compile="off", num_threads=1
        )
    )
    await engine.start()
    await asyncio.wait_for(reached.wait(), 60)
    await asyncio.wait_for(engine.stop(), 60)
    left = {each.get_coro().__qualname__ for each in asyncio.all_tasks() - before}  # type: ignore[union-attr]
    assert not [name for name in left if "Link" in name or "_open" in name]
    over.set()
    listening.close()
