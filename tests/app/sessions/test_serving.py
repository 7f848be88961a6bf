"""The application with its sessions in Redis: conversations outlive it, and go on elsewhere."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from app.cli import cli
from app.deps import Serving
from app.main import create_app
from app.responses_api import answering
from app.settings import Settings
from tests.app.asking import URL, body_of, created
from tests.app.fakes import FakeEngine
from tests.app.sessions.conftest import PATIENT
from tests.app.sessions.redis_server import RedisServer, redis_server
from tests.app.test_errors import assert_error
from tests.app.test_metrics import scrape


class Running(httpx.AsyncClient):
    """A client of an application that has started."""

    serving: Serving
    engine: FakeEngine


@asynccontextmanager
async def running(url: str | None, **settings: object) -> AsyncIterator[Running]:
    engine = FakeEngine()
    app = create_app(Settings(redis_url=url, **{"redis_timeout": PATIENT, **settings}), engine)  # type: ignore[arg-type]
    async with (
        app.router.lifespan_context(app),
        Running(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://test") as client,
    ):
        client.serving, client.engine = app.state.serving, engine
        yield client


async def test_a_conversation_goes_on_after_a_restart_and_elsewhere(redis: RedisServer) -> None:
    async with running(redis.url) as client:
        first = await created(client)
    async with running(redis.url) as one, running(redis.url) as other:
        second = await created(one, input="And?", previous_response_id=first["id"])
        third = await created(other, input="So?", previous_response_id=second["id"])
        said = ["Hi", "Hello, world", "And?", "Hello, world", "So?"]
        assert [message["content"] for message in other.engine.tokenizer.conversations[-1]] == said
        assert (await one.get(f"{URL}/{third['id']}")).json() == third
        assert (await other.delete(f"{URL}/{first['id']}")).status_code == 200
        assert_error(await one.get(f"{URL}/{first['id']}"), 404, "response_id", "response_not_found")


async def test_each_key_has_its_own_on_all_servers(redis: RedisServer) -> None:
    keys = {"api_key": "sk-one,sk-two"}
    one, two = ({"Authorization": f"Bearer sk-{name}"} for name in ("one", "two"))
    async with running(redis.url, **keys) as here, running(redis.url, **keys) as there:
        document = (await here.post(URL, json=body_of(), headers=one)).json()
        url = f"{URL}/{document['id']}"
        assert (await there.get(url, headers=one)).json() == document
        assert (await there.get(url, headers=two)).status_code == 404
        assert (await there.delete(url, headers=two)).status_code == 404
        body = body_of(previous_response_id=document["id"])
        assert_error(await there.post(URL, json=body, headers=two), 400, "previous_response_id", "previous_response_not_found")


async def test_blocks_are_found_on_all_servers_and_after_a_restart(redis: RedisServer) -> None:
    blocks = {f"fingerprint:{number}": bytes([number]) * 1000 for number in range(10)}
    async with running(redis.url) as here, running(redis.url) as there:
        assert here.serving.stores.blocks is not None and there.serving.stores.blocks is not None
        await here.serving.stores.blocks.put(blocks)
        while await there.serving.stores.blocks.known(list(blocks)) < 10:  # they are written in the background
            pass
        assert await there.serving.stores.blocks.get(list(blocks)) == list(blocks.values())
        await here.serving.stores.blocks.put({"last": b"words"})
    async with running(redis.url) as client:
        assert client.serving.stores.blocks is not None
        assert await client.serving.stores.blocks.get(["last"]) == [b"words"]


async def test_without_redis_it_starts_answers_and_says_so() -> None:
    with redis_server(started=False) as server:
        async with running(server.url) as client:
            response = await client.post(URL, json=body_of())
            assert response.status_code == 200
            body = body_of(previous_response_id=response.json()["id"])
            assert_error(await client.post(URL, json=body), 400, "previous_response_id", "previous_response_not_found")
            assert_error(await client.post(URL, json=body_of(background=True)), 503, None, "service_unavailable")
            samples = await scrape(client)
            assert samples["session_store_up",] == 0
            assert samples["session_store_operations_total", "put", "error"] == 2


async def test_a_response_in_the_making_is_found_elsewhere_and_no_longer_than_somebody_works_at_it(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "RENEWED_EVERY_S", 0.01)
    async with running(redis.url) as here, running(redis.url) as there, redis.client() as raw:
        here.engine.hang = True
        document = await created(here, background=True)
        await here.engine.hanging.acquire()
        url = f"{URL}/{document['id']}"
        await raw.flushall()  # the server notes again and again that it is still there
        while (found := await there.get(url)).status_code == 404:
            pass
        assert found.json()["status"] == "in_progress"
        (key,) = await raw.keys("moaserve:1:response:*")
        assert await raw.pttl(key) <= 60_000
        assert (await here.post(f"{url}/cancel")).json()["status"] == "cancelled"
        assert (await there.get(url)).json()["status"] == "cancelled"
        assert await raw.pttl(key) > 60_000


async def test_what_stores_do_is_measured(redis: RedisServer) -> None:
    async with running(redis.url) as client:
        document = await created(client)
        await client.get(f"{URL}/{document['id']}")
        await client.get(f"{URL}/unknown")
        await client.delete(f"{URL}/{document['id']}")
        samples = await scrape(client)
    assert samples["session_store_up",] == 1
    assert {name[1:]: value for name, value in samples.items() if name[0] == "session_store_operations_total"} == {
        ("put", "ok"): 1, ("get", "hit"): 1, ("get", "miss"): 1, ("delete", "ok"): 1
    }  # fmt: skip
    assert samples["session_store_bytes_total", "written"] == samples["session_store_bytes_total", "read"] > 500
    assert {name[1]: value for name, value in samples.items() if name[0] == "session_store_seconds_count"} == {
        "put": 1, "get": 2, "delete": 1
    }  # fmt: skip


async def test_in_memory_it_is_measured_too_but_nothing_can_be_away() -> None:
    async with running(None) as client:
        await created(client)
        samples = await scrape(client)
    assert samples["session_store_operations_total", "put", "ok"] == 1
    assert ("session_store_up",) not in samples


@pytest.mark.parametrize("url", [None, "redis://127.0.0.1:1"])
async def test_no_room_means_that_no_blocks_are_kept(url: str | None) -> None:
    assert Serving.of(Settings(redis_url=url, session_max_bytes=0), FakeEngine()).stores.blocks is None  # type: ignore[arg-type]


class TestUrl:
    @pytest.mark.parametrize(
        "url",
        [
            "http://host", "host:6379", "redis:host", "redis://host:port", "redis://host:99999", "redis://host/database", "unix://",
            "redis://user:pa/ss@host", "redis://user:12#ss@host", "redis://user:12?ss@host", "redis://host?timeout=1",
            "redis://host?protocol=7", "rediss://host?ssl_cert_reqs=perhaps", "redis://[::1", "",
        ],
    )  # fmt: skip
    def test_a_bad_one_ends_the_start_with_a_clear_line_that_does_not_quote_it(self, url: str) -> None:
        for arguments, environment in ((["--redis-url", url], {}), ([], {"MOASERVE_REDIS_URL": url})):
            result = CliRunner().invoke(cli, ["serve", *arguments], env=environment)
            assert result.exit_code == 2
            assert (
                result.stderr.startswith("moaserve: error: --redis-url (MOASERVE_REDIS_URL): ") and result.stderr.count("\n") == 1
            )
            assert "ss@" not in result.stderr and (not url or url not in result.stderr.replace("unix:///", ""))

    @pytest.mark.parametrize(
        "url",
        [
            "redis://", "redis://host", "redis://user:p%2Fw@[::1]:6380/3", "rediss://host?ssl_cert_reqs=none",
            "unix:///run/redis.sock?db=2&password=x", "redis://host?max_connections=4",
        ],
    )  # fmt: skip
    def test_good_ones(self, url: str) -> None:
        settings = Settings(redis_url=url)  # type: ignore[arg-type]
        assert settings.redis_url is not None and settings.redis_url.get_secret_value() == url

    def test_it_is_not_printed(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.DEBUG)
        url = "redis://user:secret@127.0.0.1:1/0"
        settings = Settings(redis_url=url)  # type: ignore[arg-type]
        serving = Serving.of(settings, FakeEngine())
        assert "secret" not in repr(settings) + repr(serving) + settings.model_dump_json() + caplog.text
        with pytest.raises(ValidationError) as raised:
            Settings(redis_url=url, port=-1)  # type: ignore[arg-type]
        assert "secret" not in str(raised.value)

    @pytest.mark.parametrize(
        "wrong", [{"redis_timeout": 0}, {"session_ttl": 0}, {"session_max_bytes": -1}, {"redis_prefix": "a b"}]
    )
    def test_values_out_of_range_are_refused(self, wrong: dict[str, object]) -> None:
        with pytest.raises(ValidationError):
            Settings(**wrong)  # type: ignore[arg-type]
