"""A server process as its users meet it: curl, the OpenAI SDK, clients that leave, and bad input."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.integration.conftest import Server, start_server, stop_server

pytestmark = pytest.mark.integration

MESSAGES = [{"role": "user", "content": "I would like a table for two in San Jose."}]


def until(condition, timeout: float = 10.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"


def test_openai_sdk_streams_and_does_not(server: Server) -> None:
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=40)
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens <= 40
    speculation = whole.model_extra["metrics"]["speculative_decoding"]
    assert speculation["num_draft_tokens"] > 0
    assert speculation["mean_acceptance_length"] > 1


def test_text_completions_of_several_prompts_and_choices(server: Server) -> None:
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    answer = client.completions.create(
        model="concierge", prompt=["def add(a, b):", "Hello"], n=2, temperature=1, seed=5, max_tokens=12
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_sees_well_formed_events(server: Server) -> None:
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 20, "temperature": 0}
    raw = subprocess.run(
        ["curl", "-sN", f"{server.base_url}/chat/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True,
        check=True,
    ).stdout
    events = raw.decode().split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
    assert deltas[0] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(server: Server, stream: bool) -> None:
    # Hot noise seldom says the end token: of 16 texts some are still being written when the client leaves.
    body = {"prompt": "Hello", "max_tokens": 1900, "temperature": 2, "n": 16, "stream": stream}
    with httpx.Client(base_url=server.base_url) as client:
        if stream:
            with client.stream("POST", "/completions", json=body) as response:
                lines = response.iter_lines()  # which leaves the server once nothing holds it
                next(lines)
                until(lambda: server.metric("moaserve_num_requests_running") >= 1)
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/completions", json=body, timeout=1.0)
    until(lambda: server.metric("moaserve_num_requests_running") + server.metric("moaserve_num_requests_waiting") == 0)
    assert server.metric("moaserve_kv_cache_usage_perc") == 0


def error_of(response: httpx.Response) -> dict:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def test_bad_requests_get_openai_errors_and_the_server_goes_on(server: Server) -> None:
    with httpx.Client(base_url=server.base_url, timeout=30) as client:
        url = "/chat/completions"
        malformed = client.post(url, content=b'{"messages": [', headers={"Content-Type": "application/json"})
        assert malformed.status_code == 400
        error_of(malformed)
        wrong_type = client.post(url, json={"messages": MESSAGES, "temperature": "hot"})
        assert (wrong_type.status_code, error_of(wrong_type)["param"]) == (400, "temperature")
        unknown_model = client.post(url, json={"model": "gpt-99", "messages": MESSAGES})
        assert (unknown_model.status_code, error_of(unknown_model)["code"]) == (404, "model_not_found")
        unknown_role = client.post(url, json={"messages": [{"role": "wizard", "content": "hi"}]})
        assert unknown_role.status_code == 400
        error_of(unknown_role)
        long = client.post(url, json={"messages": [{"role": "user", "content": "word " * 4000}]})
        assert (long.status_code, error_of(long)["code"]) == (400, "context_length_exceeded")
        streamed = client.post("/completions", json={"prompt": [1] * 5000, "stream": True})
        assert (streamed.status_code, error_of(streamed)["code"]) == (400, "context_length_exceeded")
        assert client.post(url, json={"messages": MESSAGES, "max_tokens": 3}).status_code == 200


def test_alive_ready_and_metrics(server: Server) -> None:
    assert httpx.get(f"{server.root_url}/health").status_code == 200
    assert httpx.get(f"{server.root_url}/ready").status_code == 200
    before = server.metric("moaserve_generation_tokens_total")
    usage = httpx.post(f"{server.base_url}/completions", json={"prompt": "Hi", "max_tokens": 7}, timeout=30).json()["usage"]
    assert server.metric("moaserve_generation_tokens_total") - before == usage["completion_tokens"]


def test_terminal_chat_talks_to_the_server(server: Server) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "app.cli", "chat", "--url", server.base_url],
        input="Hello!\n/quit\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    assert "tokens/s" in run.stdout + run.stderr


def test_a_bfloat16_server_starts_serves_and_stops() -> None:
    server = start_server("--dtype", "bfloat16", "--max-num-seqs", "2", "--draft-depth", "3", "--draft-nodes", "6")
    try:
        answer = httpx.post(f"{server.base_url}/chat/completions", json={"messages": MESSAGES, "max_tokens": 16}, timeout=60)
        assert answer.status_code == 200
    finally:
        assert stop_server(server) == 0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_keys_and_tls(tmp_path: Path) -> None:
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", "key.pem", "-out", "cert.pem"]
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject, *files]
    subprocess.run(making, cwd=tmp_path, check=True, capture_output=True)
    certificate = str(tmp_path / "cert.pem")
    (tmp_path / "keys").write_text("sk-one\n")
    options = ["--ssl-certfile", certificate, "--ssl-keyfile", str(tmp_path / "key.pem"), "--api-key-file", str(tmp_path / "keys")]
    server = start_server("--log-format", "json", "--root-path", "/llm", *options)
    try:
        assert server.base_url.startswith("https://")
        with httpx.Client(verify=ssl.create_default_context(cafile=certificate)) as http:
            client = openai.OpenAI(base_url=server.base_url, api_key="sk-one", http_client=http)
            extra = {"X-Request-ID": "mine"}
            create = client.chat.completions.with_raw_response.create
            answer = create(model="concierge", messages=MESSAGES, max_tokens=3, extra_headers=extra)
            assert answer.headers["x-request-id"] == "mine"
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="sk-two").models.list()
    finally:
        assert stop_server(server) == 0
    logged = [json.loads(line) for line in server.log]  # all are objects: what is said at the start and at the end too
    lines = [line for line in logged if "request_id" in line]
    assert (lines[0]["request_id"], lines[0]["status"], lines[0]["path"]) == ("mine", 200, "/v1/chat/completions")
    assert "San Jose" not in "".join(server.log)


def test_a_server_that_is_told_to_stop_while_it_loads_does() -> None:
    command = [sys.executable, "-m", "app.cli", "serve", "--port", "0", "--compile", "off"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("Loading")
        process.terminate()
        try:
            _, rest = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, rest) == (0, "")


def test_a_server_that_is_told_to_stop_finishes_what_runs_and_waits_and_takes_nothing_more() -> None:
    server = start_server("--shutdown-timeout", "120", "--max-num-seqs", "16")
    body = {"messages": MESSAGES, "min_tokens": 64, "max_tokens": 64, "temperature": 1}

    async def stream(client: httpx.AsyncClient) -> str:
        async with client.stream("POST", "/chat/completions", json=body | {"stream": True}) as response:
            return "\n".join([line async for line in response.aiter_lines()])

    async def all_streams() -> tuple[list[str], list[httpx.Response], int]:
        limits = httpx.Limits(max_connections=40)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60, limits=limits) as client:
            await client.get("/models")  # leaves a connection open
            streams = [asyncio.create_task(stream(client)) for _ in range(32)]
            whole = [asyncio.create_task(client.post("/chat/completions", json=body)) for _ in range(2)]
            taken = 0.0
            while taken < 34:
                taken = await asyncio.to_thread(
                    lambda: server.metric("moaserve_num_requests_running") + server.metric("moaserve_num_requests_waiting")
                )
                assert not any(task.done() for task in (*streams, *whole)), "the answers are too short for this test"
            server.process.terminate()
            try:
                while (await client.get(f"{server.root_url}/ready")).status_code == 200:  # the signal is on its way
                    pass
                late = (await client.post("/chat/completions", json={"messages": MESSAGES})).status_code
            except httpx.TransportError:
                late = 503  # it listens no longer
            return await asyncio.gather(*streams), await asyncio.gather(*whole), late

    texts, answers, late = asyncio.run(all_streams())
    assert all(text.rstrip().endswith("data: [DONE]") and '"finish_reason":"length"' in text for text in texts)
    assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [64, 64]
    assert late == 503
    assert stop_server(server) == 0


def test_a_server_that_may_wait_no_longer_says_so_to_everyone() -> None:
    server = start_server("--shutdown-timeout", "1", "--max-num-seqs", "2")
    body = {"messages": MESSAGES, "min_tokens": 1900, "max_tokens": 1900, "temperature": 1}

    async def ask() -> tuple[list[str], list[httpx.Response]]:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60) as client:
            streams = [asyncio.create_task(client.post("/chat/completions", json=body | {"stream": True})) for _ in range(2)]
            whole = [asyncio.create_task(client.post("/chat/completions", json=body)) for _ in range(2)]
            await asyncio.to_thread(until_taken, server, 4)
            server.process.terminate()
            return [response.text for response in await asyncio.gather(*streams)], await asyncio.gather(*whole)

    streams, whole = asyncio.run(ask())
    for text in streams:
        *_, last, done = text.strip().split("\n\n")
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "service_unavailable"
        assert done == "data: [DONE]"
    assert [(response.status_code, error_of(response)["code"]) for response in whole] == [(503, "service_unavailable")] * 2
    assert stop_server(server) == 0
    assert "Traceback" not in "".join(server.log)


def test_a_client_that_does_not_read_holds_no_shutdown_up() -> None:
    server = start_server("--shutdown-timeout", "0", "--num-threads", "1")
    body = {"prompt": list(range(100, 1900)), "echo": True, "logprobs": 20, "max_tokens": 1, "n": 6, "stream": True}
    content = json.dumps(body).encode()  # the answer has six pieces of a megabyte, of which sockets hold four
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", httpx.URL(server.base_url).port))
        head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        until_taken(server, 1)
        until(
            lambda: server.metric("moaserve_num_requests_running") + server.metric("moaserve_num_requests_waiting") == 0, timeout=60
        )
        assert stop_server(server) == 0
    log = "".join(server.log)
    assert "/v1/completions" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_told_twice_to_stop_a_server_ends_at_once(number: int) -> None:
    server = start_server("--shutdown-timeout", "600")
    body = {"messages": MESSAGES, "min_tokens": 1900, "max_tokens": 1900, "temperature": 1, "n": 16, "stream": True}
    with httpx.Client(base_url=server.base_url, timeout=60) as client, client.stream("POST", "/chat/completions", json=body):
        until_taken(server, 16)
        os.kill(server.process.pid, number)
        until(lambda: not listens(server))  # it drains
        os.kill(server.process.pid, number)
        assert server.process.wait(timeout=10) == 0
    server.reader.join()
    server.process.stdout.close()


def until_taken(server: Server, requests: int) -> None:
    until(lambda: server.metric("moaserve_num_requests_running") + server.metric("moaserve_num_requests_waiting") >= requests)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def listens(server: Server) -> bool:
    try:
        socket.create_connection(("127.0.0.1", httpx.URL(server.base_url).port)).close()
    except OSError:
        return False
    return True


def test_of_two_servers_on_one_port_one_says_that_it_cannot_listen() -> None:
    port = free_port()
    command = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--compile", "off"]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) for _ in range(2)]
    try:
        until(lambda: any(process.poll() is not None for process in processes), timeout=60)
        (lost,) = [process for process in processes if process.poll() is not None]
        assert lost.returncode == 1
        assert lost.stderr is not None
        assert f"cannot listen on 127.0.0.1 port {port}" in lost.stderr.read()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no file that is always full")
@pytest.mark.parametrize("where", [">/dev/full 2>&1", "<&- >&- 2>&-"])
def test_a_server_that_cannot_say_anything_serves(where: str) -> None:
    port = free_port()
    serve = [sys.executable, "-m", "app.cli", "serve", "--port", str(port), "--compile", "off"]
    command = ["sh", "-c", f'exec "$0" "$@" {where}', *serve]

    def ready() -> bool:
        assert process.poll() is None
        try:
            return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    with subprocess.Popen(command) as process:
        try:
            until(ready, timeout=60)
            process.terminate()
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
