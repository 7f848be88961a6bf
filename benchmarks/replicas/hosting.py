"""Replicas and their ingress in this process, so that replicas can be killed and replaced while clients are served."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import httpx
import uvicorn

from app.cluster.local import LocalCluster
from app.cluster_settings import ClusterSettings
from app.main import create_app
from speculative.replicas.engine import ReplicatedEngine


@dataclass(frozen=True, slots=True)
class Hosted:
    """A cluster with its engine, and a client of its ingress."""

    cluster: LocalCluster
    engine: ReplicatedEngine
    client: httpx.AsyncClient

    async def all_ready(self, count: int, seconds: float = 240.0) -> None:
        """Return once so many replicas take requests; raises TimeoutError."""

        async def ready() -> None:
            while sum(state.ready for state in self.engine.replicas.values()) < count:
                await asyncio.sleep(0.1)

        await asyncio.wait_for(ready(), seconds)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]  # uvicorn's own has no types either
        """This process's signals are not the server's."""
        yield


@asynccontextmanager
async def hosted(settings: ClusterSettings) -> AsyncIterator[Hosted]:
    """All replicas, ready."""
    cluster = LocalCluster(settings)
    engine = cluster.engine()
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(create_app(settings, engine), log_config=None, lifespan="on", timeout_graceful_shutdown=5))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await asyncio.wait_for(engine.wait_ready(), 240)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, limits=limits) as client:
            host = Hosted(cluster, engine, client)
            await host.all_ready(settings.replicas)
            yield host
    finally:
        server.should_exit = True
        await serving
        listener.close()
