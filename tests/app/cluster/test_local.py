"""Replicas are replaced on SIGHUP, or go on as they were; what does not start says why, and holds nothing up."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.commands import options

pytest.importorskip("app.cluster.local", reason="needs the extra ray")

import ray
from ray import serve

from app.cluster.application import ENGINE
from app.cluster.local import APPLICATION, LocalCluster
from app.cluster_settings import ClusterSettings

ELSEWHERE = ClusterSettings(address="127.0.0.1:1")
"""Of a cluster that is none of this process's."""


FAILED = "Deploying application moaserve failed: Failed to update the deployments ['engine']."


@pytest.fixture
def not_deployed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Serve cannot deploy, and says of the engines what the test is parametrized with."""

    def run(*_: Any, **__: Any) -> None:
        raise RuntimeError(FAILED)

    deployments = {ENGINE: SimpleNamespace(message=request.param)}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "run", run)
    monkeypatch.setattr(
        serve, "status", lambda: SimpleNamespace(applications={APPLICATION: SimpleNamespace(deployments=deployments)})
    )


TRACEBACK = """The deployment failed to start 3 times in a row. See controller logs for details. Error:
ray::ServeReplica:moaserve:engine.initialize_and_get_metadata() (pid=3029)
  File "loader.py", line 59, in resolve
models.errors.CheckpointError: another

The above exception was the direct cause of the following exception:

  File "loading.py", line 82, in _load_or_end
"""


@pytest.mark.parametrize(
    ("not_deployed", "cause"),
    [
        (f"{TRACEBACK}speculative.errors.EngineLoadError: no folder '/nope'", "no folder '/nope'"),
        (f"{TRACEBACK}speculative.errors.EngineLoadError: no memory:\nlower it\n", "no memory:\nlower it"),
        (f"{TRACEBACK}ModuleNotFoundError: No module named 'app'\n", "ModuleNotFoundError: No module named 'app'"),
        ("", FAILED),
    ],
    indirect=["not_deployed"],
)
async def test_engines_that_do_not_start_say_why(not_deployed: None, cause: str) -> None:
    with pytest.raises(Exception) as raised:
        await LocalCluster(ELSEWHERE).replace(ELSEWHERE)
    assert str(raised.value) == cause


@pytest.mark.parametrize("not_deployed", [f"{TRACEBACK}speculative.errors.EngineLoadError: no folder '/nope'"], indirect=True)
async def test_an_update_that_fails_says_why_in_a_line(not_deployed: None, caplog: pytest.LogCaptureFixture) -> None:
    cluster = LocalCluster(ELSEWHERE, lambda: ELSEWHERE)
    cluster._replace_soon()
    await asyncio.gather(*cluster._tasks)
    assert [record.getMessage() for record in caplog.records] == ["the replicas could not be replaced: no folder '/nope'"]
    assert caplog.records[0].exc_info is None


def test_a_cluster_that_does_not_answer_holds_no_stop_up(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def begin(self: LocalCluster) -> None:
        asked.set()
        answer.wait(60)

    monkeypatch.setattr(LocalCluster, "_begin", begin)
    cluster = LocalCluster(ELSEWHERE)

    async def start_and_stop() -> None:
        engine = cluster.engine()
        await engine.start()
        await asyncio.to_thread(asked.wait)
        await engine.stop()

    try:
        asyncio.run(start_and_stop())
        assert cluster.is_beginning
    finally:
        answer.set()


async def test_an_end_that_is_asked_for_does_not_look_like_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ray puts a handler in C before Python's, as faulthandler does, and writes where it came."""
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    with (tmp_path / "trace").open("w") as trace:
        monkeypatch.setattr(LocalCluster, "_begin", lambda self: faulthandler.register(signal.SIGTERM, file=trace, chain=True))
        try:
            await LocalCluster(ELSEWHERE, lambda: ELSEWHERE)._open()
            signal.raise_signal(signal.SIGTERM)
        finally:
            faulthandler.unregister(signal.SIGTERM)
            signal.signal(signal.SIGTERM, before)
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert told == [signal.SIGTERM]
    assert not (tmp_path / "trace").read_text()


async def test_settings_that_cannot_be_used_leave_the_replicas_as_they_were(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    def reload() -> Any:
        options.fail("--draft-depth: no", code=2)

    none: Any = None
    cluster = LocalCluster(none, reload)
    cluster._replace_soon()
    await asyncio.gather(*cluster._tasks)
    assert [record.getMessage() for record in caplog.records] == ["the settings cannot be used: replicas go on as they were"]
    assert caplog.records[0].exc_info is None
    assert capsys.readouterr().err == "moaserve: error: --draft-depth: no\n"
