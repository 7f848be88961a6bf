"""The WebSocket of edges at a real server, by a real client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from speculative.remote import frames as f
from speculative.remote.limits import Limits
from speculative.remote.packing import pack_tokens
from speculative.remote.protocol import decode_server, encode
from tests.integration.conftest import Server, start_server, stop_server
from tests.speculative.conftest import N0

pytestmark = pytest.mark.integration

PATH = "/v1/speculative/sessions"
OPTIONS = ["--dtype", "float32", "--num-threads", "1", "--compile", "off"]
MODEL = ("--model", str(N0 / "target"), "--drafter", str(N0 / "drafter"), *OPTIONS)
KEYS = [f"key-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    server = start_server(*MODEL, "--api-key", ",".join(KEYS), "--rate-limit", "6/hour", "--allowed-hosts", "127.0.0.1")
    yield server
    stop_server(server)


class Edge:
    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def tell(self, *frames: f.ClientFrame) -> None:
        for frame in frames:
            await self.socket.send(encode(frame))

    async def hear(self) -> Any:
        data = await asyncio.wait_for(self.socket.recv(), 30)
        assert isinstance(data, bytes)
        return decode_server(data, Limits())


@asynccontextmanager
async def connected(server: Server, key: str | None = None, **options: Any) -> AsyncIterator[Edge]:
    headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
    url = server.root_url.replace("http", "ws", 1).replace("127.0.0.1", options.pop("host", "127.0.0.1")) + PATH
    async with websockets.connect(url, additional_headers=headers | options.pop("headers", {}), **options) as socket:
        yield Edge(socket)


async def greet(edge: Edge) -> None:
    """The server says itself which pair it runs."""
    await edge.tell(f.Hello((1,), await fingerprint(edge), ("int8",)))
    assert isinstance(await edge.hear(), f.Welcome)


_known: dict[str, str] = {}


async def fingerprint(edge: Edge) -> str:
    if not _known:
        host, port = edge.socket.remote_address[:2]
        headers = {"Authorization": edge.socket.request.headers.get("Authorization", "")}
        async with websockets.connect(f"ws://{host}:{port}{PATH}", additional_headers=headers) as socket:
            await socket.send(encode(f.Hello((1,), "?", ("int8",))))
            error = decode_server(await socket.recv(), Limits())  # type: ignore[arg-type]
            found = re.search(r"runs '(\w+)'", error.message)  # type: ignore[union-attr]
            assert found is not None
            _known["pair"] = found[1]
    return _known["pair"]


def opening(number: int = 0, max_tokens: int = 4) -> f.Open:
    return f.Open(number, pack_tokens([5, 9, 2]), f.Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


async def first_token(edge: Edge) -> tuple[f.Opened, f.Result]:
    opened, result = await edge.hear(), await edge.hear()
    assert isinstance(opened, f.Opened) and isinstance(result, f.Result) and len(result.tokens) == 4
    return opened, result


async def refusal(server: Server, status: int, code: str, key: str | None = None, **options: Any) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connected(server, key, **options):
            pass
    response = caught.value.response
    assert response.status_code == status
    assert f'"{code}"' in response.body.decode() and response.headers["X-Request-ID"]


async def test_without_a_key_there_is_no_connection(guarded: Server) -> None:
    await refusal(guarded, 401, "invalid_api_key")
    await refusal(guarded, 401, "invalid_api_key", "key-x")


async def test_hosts_and_pages_that_are_not_ours_are_refused(guarded: Server) -> None:
    await refusal(guarded, 403, "host_not_allowed", KEYS[0], host="localhost")
    await refusal(guarded, 403, "origin_not_allowed", KEYS[0], origin="https://evil.example")
    async with connected(guarded, KEYS[0], origin=guarded.root_url) as edge:
        await edge.tell(f.Ping(1))
        assert await edge.hear() == f.Pong(1)


async def test_connections_and_texts_are_counted(guarded: Server) -> None:
    async with connected(guarded, KEYS[1]) as edge:  # and another asks for the fingerprint, where nobody has yet
        await greet(edge)
        await edge.tell(*(opening(number, 1) for number in range(8)))
        heard = [await edge.hear()]
        while not isinstance(heard[-1], f.Error):
            heard.append(await edge.hear())
        assert (heard[-1].code, heard[-1].retryable) == ("overloaded", True)
        await edge.tell(f.Ping(1))
        while (frame := await edge.hear()) != f.Pong(1):
            assert isinstance(frame, f.Opened | f.Result | f.Error)
    await refusal(guarded, 429, "rate_limit_exceeded", KEYS[1])


async def test_a_text_is_resumed_by_its_own_key_alone(guarded: Server) -> None:
    async with connected(guarded, KEYS[2]) as edge:
        await greet(edge)
        await edge.tell(opening())
        opened, _ = await first_token(edge)
    resume = f.Resume(3, opened.resume_token, 3, 0, 0)
    async with connected(guarded, KEYS[3]) as thief:
        await greet(thief)
        await thief.tell(resume)
        assert (await thief.hear()).code == "cannot_resume"
    async with connected(guarded, KEYS[2]) as edge:
        await greet(edge)
        await edge.tell(resume)
        again, _ = await first_token(edge)
        assert (again.length, again.seed) == (4, opened.seed)
        await edge.tell(f.Cancel(3))
        assert await edge.hear() == f.Closed(3, "cancelled")


@pytest.mark.parametrize(
    ("sent", "code"),
    [(b"\x93garbage", "malformed_frame"), ("text", "malformed_frame"), (bytes(2**20 + 9), "frame_too_large")],
    ids=["garbage", "text", "long"],
)
async def test_what_is_no_frame_ends_the_connection(guarded: Server, sent: bytes | str, code: str) -> None:
    async with connected(guarded, KEYS[4]) as edge:
        await edge.socket.send(sent)
        assert (await edge.hear()).code == code
        with pytest.raises(websockets.ConnectionClosedOK):
            await edge.hear()


async def test_far_too_much_is_not_even_read(guarded: Server) -> None:
    async with connected(guarded, KEYS[5]) as edge:
        with pytest.raises(websockets.ConnectionClosed):
            await edge.socket.send(bytes(2**22))
            await edge.hear()
        assert edge.socket.close_code == 1009


async def test_nothing_is_compressed_and_the_log_has_a_line(guarded: Server) -> None:
    async with connected(guarded, KEYS[6], compression="deflate", headers={"X-Request-ID": "edge-7"}) as edge:
        assert "Sec-WebSocket-Extensions" not in edge.socket.response.headers
        assert edge.socket.response.headers["X-Request-ID"] == "edge-7"
    for _ in range(1000):
        if line := next((line for line in guarded.log if "id=edge-7" in line), ""):
            break
        await asyncio.sleep(0.01)
    assert re.search(r"GET '/v1/speculative/sessions' 101 [\d.]+ ms id=edge-7", line)


async def test_what_edges_do_is_in_the_metrics(guarded: Server) -> None:
    def verified() -> float:
        return guarded.metric('moaserve_remote_verifications_total{model_name="target",outcome="verified"')

    async with connected(guarded, KEYS[7]) as edge:
        await greet(edge)
        requests = guarded.metric("moaserve_request_success_total")
        await edge.tell(opening(), f.Verify(0, 1, 3, pack_tokens([1, 2])))
        await first_token(edge)
        assert guarded.metric("moaserve_remote_connections") >= 1
        assert guarded.metric("moaserve_remote_sessions") >= 1
        while (result := await edge.hear()).finish_reason is None:
            await edge.tell(f.Verify(0, result.step + 1, result.first + len(result.tokens) // 4))
    assert guarded.metric("moaserve_remote_verifications_total") > 0
    assert guarded.metric("moaserve_remote_bytes_total") > 0
    assert guarded.metric("moaserve_request_success_total") == requests + 1


@pytest.mark.parametrize("ends", [True, False], ids=["a text that ends", "one that does not"])
async def test_a_server_that_is_told_to_stop_gives_texts_their_time(ends: bool) -> None:
    server = start_server(*MODEL, "--shutdown-timeout", "30" if ends else "1")
    async with connected(server) as edge:
        await greet(edge)
        await edge.tell(opening(0, 20))
        _, result = await first_token(edge)
        server.process.terminate()
        await edge.tell(opening(1, 1))
        while not isinstance(frame := await edge.hear(), f.Error):  # it has not heard of its end yet
            if isinstance(frame, f.Result):
                await edge.tell(f.Cancel(1), opening(1, 1))
        assert (frame.code, frame.session) == ("not_ready", 1)
        while ends and result.finish_reason is None:
            await edge.tell(f.Verify(0, result.step + 1, result.first + 1))
            result = await edge.hear()
        assert await edge.hear() == f.Closed(0, "shutdown")
        with pytest.raises(websockets.ConnectionClosedOK):
            await edge.hear()
    assert await asyncio.to_thread(stop_server, server) == 0
    assert not any("Traceback" in line for line in server.log), server.log
