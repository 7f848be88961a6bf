"""What `moaserve ray` starts: engines on a Ray cluster, of this machine's own or another, for an ingress in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import ray
import typer
from ray import serve
from ray.serve.handle import DeploymentHandle

from app.cluster.application import ENGINE, engines
from app.cluster.fleet import RayFleet
from app.cluster_settings import ClusterSettings
from speculative.errors import EngineLoadError
from speculative.replicas.engine import ReplicatedEngine

logger = logging.getLogger("moaserve.replicas")

APPLICATION: Final = "moaserve"
STORE_BYTES: Final = 128 * 2**20
"""Ray's store of large objects. Messages are small, and go another way."""


class LocalCluster:
    """Deploys engines. ``reload`` brings other settings to replace them with, one after the other, on SIGHUP."""

    def __init__(self, settings: ClusterSettings, reload: Callable[[], ClusterSettings] | None = None) -> None:
        self._settings, self._reload = settings, reload
        self._is_ours = False
        self._deploying = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        # Not the event loop's thread: that waits for its own in the end, and Ray many minutes for a cluster that does not answer.
        # Nor one that ends with the call: Ray's processes end with the thread that started them.
        self._thread = ThreadPoolExecutor(1, "moaserve-ray")
        self._begun: Future[DeploymentHandle[Any]] | None = None

    @property
    def is_beginning(self) -> bool:
        """Ray or its replicas are being started, which goes on where nobody waits for it any more."""
        return self._begun is not None and not self._begun.done()

    def engine(self) -> ReplicatedEngine:
        """The engines as one."""
        return ReplicatedEngine(RayFleet(self._open, self._close), self._settings.failover_timeout)

    async def _open(self) -> DeploymentHandle[Any]:
        if self._settings.address is None:
            await asyncio.to_thread(_wake_without_interrupting)
        async with self._deploying:
            self._begun = self._thread.submit(self._begin)
            handle = await asyncio.wrap_future(self._begun)
        if self._reload is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._replace_soon)
            # Ray has put a handler of its own before Python's, by which an orderly end looks like a crash in the log.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
        return handle

    async def _close(self) -> None:
        async with self._deploying:
            if not ray.is_initialized():
                return
            await asyncio.to_thread(serve.delete, APPLICATION)
            if self._is_ours:
                if self._settings.address is None:
                    await serve.shutdown_async()  # the router runs on this event loop
                await asyncio.to_thread(ray.shutdown)

    def _begin(self) -> DeploymentHandle[Any]:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not ray.is_initialized():
            self._is_ours = True
            own: dict[str, Any] = {}
            if self._settings.address is None:
                most = self._settings.max_replicas or self._settings.replicas
                cpus = (most + 1) * self._settings.replica_cpus + 1  # one more while replicas are replaced
                own = {
                    "num_cpus": max(math.ceil(cpus), os.cpu_count() or 1),
                    "include_dashboard": False,
                    "object_store_memory": STORE_BYTES,
                    "_system_config": {
                        "worker_niceness": 0,  # engines are what this machine is for
                        "enable_metrics_collection": False,  # the ingress has them, and Ray's dashboard is not there
                        "task_events_report_interval_ms": 0,
                    },
                    "_node_ip_address": "127.0.0.1",
                }
            ray.init(address=self._settings.address or "local", log_to_driver=False, configure_logging=False, **own)
        serve.start(proxy_location="Disabled")
        return self._deploy(self._settings)

    def _deploy(self, settings: ClusterSettings) -> DeploymentHandle[Any]:
        try:
            return serve.run(engines(settings), name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            if (cause := _cause()) is None:
                raise
            raise EngineLoadError(cause) from error

    async def replace(self, settings: ClusterSettings) -> None:
        """A rolling update: replicas give way to others with these settings, and no request fails. Returns when all have."""
        async with self._deploying:
            await asyncio.to_thread(self._deploy, settings)
            self._settings = settings

    def _replace_soon(self) -> None:
        async def replace() -> None:
            assert self._reload is not None
            try:
                await self.replace(self._reload())
                logger.info("all replicas have been replaced")
            except (SystemExit, typer.Exit):  # the line about them is written
                logger.error("the settings cannot be used: replicas go on as they were")
            except EngineLoadError as error:
                logger.error("the replicas could not be replaced: %s", error)
            except Exception:
                logger.exception("the replicas could not be replaced")

        task = asyncio.create_task(replace())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _cause() -> str | None:
    """Why the engines did not start, as the last of them said; None where Serve does not tell."""
    if not ray.is_initialized():  # the command ends, and Serve would start Ray anew to say how it is
        return None
    application = serve.status().applications.get(APPLICATION)
    message = application.deployments[ENGINE].message.strip() if application and ENGINE in application.deployments else ""
    # A traceback, of which the last line, or what our own error has said in several, is for who set the server up.
    _, ours, said = message.rpartition(f"{EngineLoadError.__module__}.{EngineLoadError.__name__}: ")
    if ours:
        return said
    return message.splitlines()[-1] if message else None


def _wake_without_interrupting() -> None:
    """Let this process, and those that it starts, wait for their turn when they wake up on a busy core (SCHED_BATCH).

    Engines, their messages and Ray are more processes than a machine has cores, and each interruption costs an engine its caches.
    """
    if sys.platform == "linux":
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended, or a container forbids it
                os.sched_setscheduler(int(thread), os.SCHED_BATCH, os.sched_param(0))
