"""Replicas are replaced on SIGHUP, or go on as they were."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.commands import options

pytest.importorskip("app.cluster.local", reason="needs the extra ray")

from app.cluster.local import LocalCluster


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
