"""One request, answered or not."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.client import Address, AddressError, Outcome, ask
from tests.benchmarks.serving.scripted import OK, Answer, said, scripted, three_words, told


async def asked(answer: Answer, *, due: float | None = None, timeout: float = 20.0, body: dict[str, Any] | None = None) -> Outcome:
    async with scripted(answer) as server:
        address = Address.of(server.url)
        return await ask(address, address.request("/completions", body or {}), time.perf_counter() if due is None else due, timeout)


async def test_an_answer_is_measured_and_its_text_is_not_kept() -> None:
    outcome = await asked(three_words)
    assert outcome.error is None and (outcome.tokens, outcome.prompt_tokens) == (3, 7)
    assert 0 <= outcome.late <= outcome.first <= outcome.end and len(outcome.gaps) == 2
    assert outcome.drafts is None and "three" not in repr(outcome)
    assert outcome.text == (await asked(three_words)).text


async def test_what_is_sent_is_a_request_of_this_route_by_this_user() -> None:
    async with scripted() as server:
        address = Address.of(server.url + "/", api_key="secret")
        await ask(address, address.request("/chat/completions", {"seed": 3}), time.perf_counter(), 20.0)
    head = server.heads[0].split("\r\n")
    assert head[0] == "POST /v1/chat/completions HTTP/1.1" and server.bodies == [{"seed": 3}]
    assert "Authorization: Bearer secret" in head and f"Host: {server.url.split('/')[2]}" in head
    assert "secret" not in repr(address)


async def test_times_count_from_when_a_request_was_due_however_late_it_is_sent() -> None:
    outcome = await asked(three_words, due=time.perf_counter() - 100.0, timeout=1000.0)
    assert outcome.late >= 100 and outcome.first >= 100 and outcome.end >= 100
    assert sum(outcome.gaps) < 100
    assert outcome.per_token is not None and outcome.per_token < 50


async def test_an_answer_without_text_says_nothing_of_the_time_a_token_takes() -> None:
    async def silent(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(OK + said("", "length") + told(5))

    outcome = await asked(silent)
    assert outcome.error is None and outcome.tokens == 5 and outcome.per_token is None
    assert Outcome(0.0, first=2.0, end=4.0, tokens=5).per_token == 0.5


async def test_chunked_bodies_are_put_together() -> None:
    async def chunked(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        whole = said("Two") + said(" tables", "stop") + told(2)
        for part in (whole[:11], whole[11:90], whole[90:], b""):
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")

    outcome = await asked(chunked)
    assert outcome.error is None and outcome.tokens == 2


async def says(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    writer.write(b"".join(parts))


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 10\r\n\r\nqueue full", "429: queue full"),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000, "500: xxx"),
        (OK + said("Two"), "the stream broke off"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + said("Two"), "broke off"),
        (b"", "the connection was lost"),
        (b"SSH-2.0-OpenSSH\r\n", "this is not HTTP"),
    ],
)
async def test_one_that_fails_says_why(sent: bytes, problem: str) -> None:
    outcome = await asked(lambda _, writer: says(writer, sent))
    assert problem in str(outcome.error) and len(str(outcome.error)) < 400


async def test_one_that_takes_too_long_is_given_up() -> None:
    gone = asyncio.Event()

    async def silent(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await server.readers[0].read()
        gone.set()

    async with scripted(silent) as server:
        address = Address.of(server.url)
        outcome = await ask(address, address.request("/completions", {}), time.perf_counter(), 0.2)
        assert outcome.error == "no answer within 0.2 s" and outcome.end >= 0.2
        await asyncio.wait_for(gone.wait(), 30)  # the server need not go on


async def test_where_nobody_listens_there_is_no_connection() -> None:
    async with scripted() as server:
        address = Address.of(server.url)
    outcome = await ask(address, address.request("/completions", {}), time.perf_counter(), 20.0)
    assert str(outcome.error).startswith("no connection: ")


async def test_servers_are_trusted_by_their_certificates_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with: apt-get install openssl")
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=test"]
    named = ["-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", "req", *kind, *named], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    async with scripted(tls=tls) as server:
        stranger = await Address.of(server.url).located()
        refused = await ask(stranger, stranger.request("/completions", {}), time.perf_counter(), 20.0)
        monkeypatch.setenv("SSL_CERT_FILE", certificate)
        address = await Address.of(server.url).located()
        assert address.host == "127.0.0.1"
        outcome = await ask(address, address.request("/completions", {}), time.perf_counter(), 20.0)
    assert "CERTIFICATE_VERIFY_FAILED" in str(refused.error) and outcome.error is None and outcome.tokens == 3


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host/v1", "http:///v1", "http://host:99999/v1", "http://[::1/v1"])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(AddressError):
        Address.of(url)


def test_ports_follow_from_the_scheme() -> None:
    plain, safe = Address.of("http://host/v1"), Address.of("https://host")
    assert (plain.port, plain.tls, plain.path) == (80, None, "/v1")
    assert safe.port == 443 and safe.tls is not None and safe.path == ""
