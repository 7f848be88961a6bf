"""Who may ask, how often and how much; and what the log says of it."""

import asyncio
import hashlib
import io
import json
import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from app.admission import Admission
from app.errors import InvalidParameterError, TooManyRequestsError
from app.keys import ApiKeys
from app.logs import JsonFormatter, TextFormatter
from app.main import create_app
from app.routes import chat as chat_route
from app.settings import Settings
from tests.app.fakes import FakeEngine, chat_body, events

CHAT = "/v1/chat/completions"


def client_of(engine: FakeEngine, **settings: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(Settings(**settings), engine), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def refusal(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    body = response.json()
    assert (response.status_code, body["error"]["code"]) == (status, code), body
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error


class TestKeys:
    KEYS = "sk-first, sk-second"

    @pytest.mark.parametrize(
        "path", [CHAT, "/v1/completions", "/v1/models", "/v1/models/tiny", "/tokenize", "/detokenize", "/v1/x"]
    )
    @pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-third"}, {"Authorization": "sk-first"}])
    async def test_without_one_that_is_known_nothing_is_done(self, engine: FakeEngine, path: str, headers: dict[str, str]) -> None:
        async with client_of(engine, api_key=self.KEYS) as client:
            # Not even the body is looked at.
            response = await client.post(path, content=b"{", headers=headers)
        refusal(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert engine.requests == []

    @pytest.mark.parametrize("key", ["sk-first", "sk-second"])
    async def test_each_of_them_opens(self, engine: FakeEngine, key: str) -> None:
        async with client_of(engine, api_key=self.KEYS) as client:
            response = await client.post(CHAT, json=chat_body(), headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200

    @pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/openapi.json"])
    async def test_probes_need_none(self, engine: FakeEngine, path: str) -> None:
        async with client_of(engine, api_key=self.KEYS) as client:
            assert (await client.get(path)).status_code == 200

    async def test_a_file_may_hold_digests(self, engine: FakeEngine, tmp_path: Path) -> None:
        file = tmp_path / "keys"
        file.write_text(f"# ours\nsk-plain\n\nsha256:{hashlib.sha256(b'sk-hashed').hexdigest()}\n")
        async with client_of(engine, api_key_file=file) as client:
            for key, status in (("sk-plain", 200), ("sk-hashed", 200), ("# ours", 401), ("", 401)):
                response = await client.post(CHAT, json=chat_body(), headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == status, key

    def test_none_is_kept_or_shown(self) -> None:
        settings = Settings(api_key="sk-secret")  # type: ignore[arg-type]
        assert "sk-secret" not in repr(settings)
        assert "sk-secret" not in repr(vars(ApiKeys.load(settings.api_key, None)))

    @pytest.mark.parametrize("wrong", [{"api_key": " , "}, {"api_key_file": "/nowhere/keys"}])
    def test_a_lock_without_keys_is_refused(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(ValidationError, match=r"nobody could use|cannot be read"):
            Settings(**wrong)


KEY = {"Authorization": "Bearer k"}
PATHS = [
    f"{front}{path}"
    for front in ("", "/llm", "/llm/", "/llm/llm", "/v1", "/")
    for path in ("/v1/models", "/tokenize", "/version", "/health")
]


class TestRootPath:
    @pytest.mark.parametrize("root", ["", "/", "/llm", "/llm/", "/v1"])
    async def test_all_that_leads_to_a_route_is_guarded_as_the_route_itself(self, engine: FakeEngine, root: str) -> None:
        async with client_of(engine, api_key="k", root_path=root) as client:
            reached = 0
            for path in PATHS:
                url = f"http://test{path}"
                without, with_key = (await client.get(url)).status_code, (await client.get(url, headers=KEY)).status_code
                # GET of /tokenize is a 405.
                assert with_key in (200, 404, 405), path
                if with_key != 404:
                    reached += 1
                    assert without == (401 if path.endswith(("models", "tokenize")) else 200), path
            assert reached >= 4

    @pytest.mark.parametrize("root", ["/llm", "/llm/"])
    async def test_a_root_path_ends_where_a_segment_does(self, engine: FakeEngine, root: str) -> None:
        async with client_of(engine, api_key="k", root_path=root) as client:
            for path, without, with_key in (
                ("/llm/v1/models", 401, 200),
                ("/v1/models", 401, 200),
                ("/llmv1/models", 404, 404),
                ("/llm", 404, 404),
                ("/llm/", 200, 200),
                ("/llm/health", 200, 200),
            ):
                assert (await client.get(path)).status_code == without, path
                assert (await client.get(path, headers=KEY)).status_code == with_key, path

    async def test_rates_hold_behind_it(self, engine: FakeEngine) -> None:
        async with client_of(engine, root_path="/llm", rate_limit="2/hour") as client:
            answers = [await client.get(path) for path in ("/llm/v1/models", "/v1/models", "/llm/v1/models")]
        assert [answer.status_code for answer in answers] == [200, 200, 429]

    @pytest.mark.parametrize("path", ["/llm/v1/speculative/sessions", "/v1/speculative/sessions"])
    async def test_websockets_need_a_key_too(self, engine: FakeEngine, path: str) -> None:
        app = create_app(Settings(api_key="k", root_path="/llm"), engine)  # type: ignore[arg-type]
        assert await connected(app, path, []) == ("websocket.http.response.start", 401)
        assert await connected(app, path, [(b"authorization", b"Bearer k")]) == ("websocket.accept", None)

    @pytest.mark.parametrize("path", ["/health", "/llm/health", "/llm/metrics"])
    async def test_probes_are_not_logged_as_requests(self, engine: FakeEngine, caplog: pytest.LogCaptureFixture, path: str) -> None:
        with caplog.at_level(logging.DEBUG, "moaserve.access"):
            async with client_of(engine, root_path="/llm") as client:
                await client.get(path)
        assert [record.levelno for record in caplog.records if record.name == "moaserve.access"] == [logging.DEBUG]


async def connected(app: Any, path: str, headers: list[tuple[bytes, bytes]]) -> tuple[str, int | None]:
    """What a WebSocket is told first, and with which status if it is none."""
    told: list[dict[str, Any]] = []
    asked = iter([{"type": "websocket.connect"}, {"type": "websocket.disconnect", "code": 1000}])

    async def receive() -> dict[str, Any]:
        return next(asked)

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    extensions: dict[str, Any] = {"websocket.http.response": {}}
    scope = {"type": "websocket", "path": path, "headers": headers, "query_string": b"", "subprotocols": []}
    await app(scope | {"client": ("127.0.0.1", 1), "scheme": "ws", "extensions": extensions}, receive, send)
    return told[0]["type"], told[0].get("status")


class TestRates:
    async def test_each_caller_has_its_own(self, engine: FakeEngine) -> None:
        async with client_of(engine, api_key="a,b", rate_limit="2/hour") as client:

            async def ask(key: str) -> httpx.Response:
                return await client.post(CHAT, json=chat_body(), headers={"Authorization": f"Bearer {key}"})

            assert [(await ask("a")).status_code for _ in range(2)] == [200, 200]
            response = await ask("a")
            refusal(response, 429, "rate_limit_exceeded")
            assert 3500 < int(response.headers["retry-after"]) <= 3600
            assert (await ask("b")).status_code == 200
            assert (await client.get("/health")).status_code == 200

    async def test_without_keys_addresses_are_callers_and_the_tightest_rate_holds(self, engine: FakeEngine) -> None:
        async with client_of(engine, rate_limit="100/hour;1/minute") as client:
            assert (await client.get("/v1/models")).status_code == 200
            response = await client.get("/v1/models")
        refusal(response, 429, "rate_limit_exceeded")
        assert int(response.headers["retry-after"]) <= 60

    def test_a_rate_that_cannot_be_read_is_refused(self) -> None:
        with pytest.raises(ValidationError, match="60/minute"):
            Settings(rate_limit="often")


class TestQueue:
    async def test_requests_beyond_it_are_told_to_come_back(self, engine: FakeEngine) -> None:
        engine.hang = True
        async with client_of(engine, max_num_seqs=1, max_queue_requests=1) as client:
            held = [asyncio.create_task(client.post(CHAT, json=chat_body())) for _ in range(2)]
            for _ in held:
                await asyncio.wait_for(engine.hanging.acquire(), 30)
            response = await client.post(CHAT, json=chat_body(stream=True))
            refusal(response, 429, "queue_full")
            assert response.headers["retry-after"] == "5"
            for task in held:
                task.cancel()
            await asyncio.gather(*held, return_exceptions=True)
            engine.hang = False
            assert (await client.post(CHAT, json=chat_body())).status_code == 200

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
            ("/v1/completions", {"prompt": "a", "best_of": 4}),
            (CHAT, chat_body(n=4)),
            (CHAT, chat_body(n=4, stream=True)),
        ],
    )
    async def test_a_request_for_more_texts_than_there_ever_is_room_for_need_not_come_back(
        self, engine: FakeEngine, path: str, body: dict[str, Any]
    ) -> None:
        async with client_of(engine, max_num_seqs=2, max_queue_requests=1) as client:
            error = refusal(await client.post(path, json=body), 400, "invalid_value")
            assert "3 texts at a time" in error["message"] and "asks for 4" in error["message"]
            assert engine.requests == []
            assert (await client.post(CHAT, json=chat_body(n=3))).status_code == 200
        async with client_of(engine, max_num_seqs=2, max_queue_requests=None) as client:
            assert (await client.post(path, json=body)).status_code == 200

    def test_nor_need_prompts_with_more_tokens_than_ever_may_wait(self) -> None:
        admission = Admission(slots=1, most_requests=None, most_tokens=100)
        with pytest.raises(InvalidParameterError, match="100 tokens together"):
            admission.take([60, 60])
        admission.take([500]).release()
        admission.take([50, 50]).release()

    def test_prompts_count_until_they_have_been_read(self) -> None:
        admission = Admission(slots=1, most_requests=None, most_tokens=100)
        first = admission.take([90])
        with pytest.raises(TooManyRequestsError, match="100 prompt tokens"):
            admission.take([20])
        first.read(0)
        second = admission.take([20, 70])
        with pytest.raises(TooManyRequestsError, match="100 prompt tokens"):
            admission.take([20])
        second.end(1)
        admission.take([20]).release()
        for places in (first, second):
            places.release()
        # With a slot free nothing waits, however long.
        admission.take([1000])

    def test_one_key_of_several_fills_no_more_than_half(self) -> None:
        admission = Admission(slots=2, most_requests=4, most_tokens=100, several_keys=True)
        first = admission.take([1] * 4, "a")
        with pytest.raises(TooManyRequestsError, match="2 requests of your key's may wait"):
            admission.take([1], "a")
        with pytest.raises(InvalidParameterError, match="4 texts at a time, and this request asks for 5"):
            admission.take([1] * 5, "b")
        admission.take([1, 1], "b")
        with pytest.raises(TooManyRequestsError, match=r"4 requests may wait"):
            admission.take([1], "c")
        first.end(0)
        admission.take([1], "c")
        with pytest.raises(TooManyRequestsError, match=r"4 requests may wait"):
            admission.take([1], "a")
        first.release()
        admission.take([1, 1], "a")

    def test_nor_does_it_with_long_prompts(self) -> None:
        admission = Admission(slots=1, most_requests=None, most_tokens=100, several_keys=True)
        admission.take([40], "a")
        with pytest.raises(TooManyRequestsError, match="50 prompt tokens of your key's may wait"):
            admission.take([20], "a")
        admission.take([30], "b")

    async def test_other_keys_have_room_where_one_has_filled_its_half(self, engine: FakeEngine) -> None:
        async with client_of(engine, max_num_seqs=1, max_queue_requests=4, api_key="first,second") as client:
            for key in ("first", "second"):
                client.headers["Authorization"] = f"Bearer {key}"
                refused = refusal(await client.post(CHAT, json=chat_body(n=4)), 400, "invalid_value")
                assert "takes 3 texts at a time, and this request asks for 4" in refused["message"]
                assert (await client.post(CHAT, json=chat_body(n=3))).status_code == 200

    def test_giving_back_twice_is_giving_back_once(self) -> None:
        admission = Admission(slots=1, most_requests=1, most_tokens=100)
        places = admission.take([60, 40])
        places.read(0)
        places.end(0)
        places.end(0)
        places.release()
        places.release()
        admission.take([1, 1])
        with pytest.raises(TooManyRequestsError, match="1 requests"):
            admission.take([1])

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_burst_that_comes_at_once_does_not_overshoot(
        self, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        engine.hang, gate, arrived = True, asyncio.Event(), asyncio.Semaphore(0)

        async def at_once(_serving: Any, work: Callable[[], Any]) -> Any:
            arrived.release()
            await gate.wait()
            return work()

        monkeypatch.setattr(chat_route, "tokenize", at_once)
        async with client_of(engine, max_num_seqs=1, max_queue_requests=2) as client:
            burst = [asyncio.create_task(client.post(CHAT, json=chat_body(stream=stream))) for _ in range(10)]
            for _ in burst:
                await asyncio.wait_for(arrived.acquire(), 30)
            gate.set()
            for each in islice(asyncio.as_completed(burst, timeout=30), 7):
                refusal(await each, 429, "queue_full")
            for task in burst:
                task.cancel()
            await asyncio.gather(*burst, return_exceptions=True)
            assert len(engine.requests) == 3
            engine.hang = False
            answers = await asyncio.gather(*(client.post(CHAT, json=chat_body(stream=stream)) for _ in range(3)))
            assert [answer.status_code for answer in answers] == [200] * 3


class TestSizes:
    @pytest.mark.parametrize("chunked", [False, True])
    async def test_a_body_that_is_too_large_is_not_read(self, engine: FakeEngine, chunked: bool) -> None:
        body = json.dumps(chat_body(messages=[{"role": "user", "content": "x" * 2000}])).encode()

        async def pieces() -> Any:
            for start in range(0, len(body), 100):
                yield body[start : start + 100]

        async with client_of(engine, max_body_bytes=1000) as client:
            response = await client.post(CHAT, content=pieces() if chunked else body)
            refusal(response, 413, "request_too_large")
            assert (await client.post(CHAT, json=chat_body())).status_code == 200
        assert len(engine.requests) == 1

    @pytest.mark.parametrize("encoding", ["gzip", "zstd"])
    async def test_a_body_that_is_compressed_is_refused(self, client: httpx.AsyncClient, engine: FakeEngine, encoding: str) -> None:
        headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
        response = await client.post(CHAT, content=b"\x1f\x8b", headers=headers)
        refusal(response, 415, "unsupported_encoding")
        assert encoding in response.json()["error"]["message"]
        assert (await client.post(CHAT, json=chat_body(), headers={"Content-Encoding": "identity"})).status_code == 200
        assert len(engine.requests) == 1


class TestTimeout:
    @pytest.mark.parametrize("n", [1, 2])
    async def test_an_answer_that_takes_too_long_is_a_408_and_its_work_ends(self, engine: FakeEngine, n: int) -> None:
        engine.hang = True
        async with client_of(engine, request_timeout=0.05) as client:
            refusal(await client.post(CHAT, json=chat_body(n=n)), 408, "request_timeout")
        assert len(engine.aborted) == n

    @pytest.mark.parametrize("stream", [False, True])
    async def test_others_notice_nothing(self, engine: FakeEngine, stream: bool) -> None:
        async with client_of(engine, request_timeout=60) as client:
            assert (await client.post(CHAT, json=chat_body(n=2, stream=stream))).status_code == 200
        assert engine.aborted == []

    async def test_in_a_stream_it_is_an_event(self, engine: FakeEngine) -> None:
        engine.hang = True
        async with client_of(engine, request_timeout=0.05) as client:
            *chunks, error = events(await client.post(CHAT, json=chat_body(stream=True)))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "Hello, world"
        assert error["error"]["code"] == "request_timeout"
        assert len(engine.aborted) == 1


class TestOrigins:
    async def test_browsers_are_refused_unless_a_page_was_named(self, engine: FakeEngine) -> None:
        asking = {
            "Origin": "https://a.org",
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization",
        }
        async with client_of(engine) as client:
            assert "access-control-allow-origin" not in (await client.options(CHAT, headers=asking)).headers
        async with client_of(engine, api_key="k", cors_origins="https://a.org, https://b.org") as client:
            response = await client.options(CHAT, headers=asking)
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, "https://a.org")
            answer = await client.post(CHAT, json=chat_body(), headers={"Origin": "https://b.org", "Authorization": "Bearer k"})
            assert answer.headers["access-control-allow-origin"] == "https://b.org"
            assert "access-control-allow-origin" not in (await client.get("/health", headers={"Origin": "https://c.org"})).headers

    async def test_a_body_without_a_type_comes_from_no_strange_page(self, engine: FakeEngine) -> None:
        # A page may send one anywhere without asking first, where it could not say that it is JSON.
        body = json.dumps(chat_body()).encode()
        async with client_of(engine, cors_origins="https://a.org") as client:
            refusal(await client.post(CHAT, content=body, headers={"Origin": "https://b.org"}), 403, "origin_not_allowed")
            assert engine.requests == []
            for origin in ("https://a.org", str(client.base_url).rstrip("/")):
                assert (await client.post(CHAT, content=body, headers={"Origin": origin})).status_code == 200

    async def test_hosts(self, engine: FakeEngine) -> None:
        async with client_of(engine, allowed_hosts="a.org,*.b.org") as client:
            for host, status in (("a.org", 200), ("A.org:8000", 200), ("x.b.org", 200), ("b.org", 403), ("c.org", 403)):
                assert (await client.get("/health", headers={"Host": host})).status_code == status, host

    @pytest.mark.parametrize("allowed", ["[::1], a.org", "::1,a.org"])
    async def test_hosts_may_be_ipv6_addresses(self, engine: FakeEngine, allowed: str) -> None:
        statuses = {"[::1]": 200, "[::1]:8000": 200, "a.org:8000": 200, "[::2]:8000": 403, "[2001:db8::1]": 403, "1": 403, ":": 403}
        async with client_of(engine, allowed_hosts=allowed) as client:
            for host, status in statuses.items():
                assert (await client.get("/health", headers={"Host": host})).status_code == status, host
            assert "'[::2]'" in (await client.get("/health", headers={"Host": "[::2]:8000"})).json()["error"]["message"]


class TestLogs:
    @pytest.fixture
    def written(self) -> Iterator[dict[str, io.StringIO]]:
        access, streams = logging.getLogger("moaserve"), {"json": io.StringIO(), "text": io.StringIO()}
        handlers = [logging.StreamHandler(streams[name]) for name in ("json", "text")]
        for handler, formatter in zip(handlers, (JsonFormatter(), TextFormatter()), strict=True):
            handler.setFormatter(formatter)
            access.addHandler(handler)
        before = access.level
        access.setLevel(logging.INFO)
        yield streams
        access.setLevel(before)
        for handler in handlers:
            access.removeHandler(handler)

    @pytest.mark.parametrize(("given", "kept"), [("mine-1", True), ("a b", False), ("x" * 129, False), ("é", False)])
    async def test_a_callers_id_comes_back_and_stands_in_every_line(
        self, client: httpx.AsyncClient, engine: FakeEngine, written: dict[str, io.StringIO], given: str, kept: bool
    ) -> None:
        engine.error = ValueError("broken")
        body = chat_body(stream=True, messages=[{"role": "user", "content": "my secret"}])
        response = await client.post(CHAT, json=body, headers={"X-Request-ID": given.encode()})  # type: ignore[dict-item]
        name = response.headers["x-request-id"]
        assert (name == given) == kept
        lines = [json.loads(line) for line in written["json"].getvalue().splitlines()]
        assert {line["request_id"] for line in lines} == {name}
        assert {"moaserve.app", "moaserve.access"} <= {line["logger"] for line in lines}
        access = lines[-1]
        assert (access["method"], access["path"], access["status"], access["level"]) == ("POST", CHAT, 200, "info")
        assert access["time"].endswith("Z")
        text = written["text"].getvalue()
        assert f"POST '{CHAT}' 200" in text and text.rstrip().endswith(f"id={name}")
        assert "my secret" not in text + written["json"].getvalue()
