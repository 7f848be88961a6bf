"""Replicas are replaced on SIGHUP, or go on as they were; what does not start says why."""

from __future__ import annotations

import asyncio
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
