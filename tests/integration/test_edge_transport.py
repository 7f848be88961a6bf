"""What lies between an edge and its server: TLS, and memory in each of its formats."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.conftest import Server, start_server, stop_server
from tests.integration.edges import address, ask, comparable, failing, port_of, running_edge, until

pytestmark = pytest.mark.integration

QUESTIONS = ["Tell me about Berlin.", "I need a table for two at seven.", "What is the weather like in Oslo?"]
ROW_BYTES = {"int8": 200, "int4": 104, "bfloat16": 384}
NEWEST_BYTES = {"int8": 300, "int4": 156, "bfloat16": 576}
"""Of the bundled pair, in docs/protocol.md."""
WINDOW = 128
LAST_STEP = 9
"""Of a prompt's tokens the drafter reads so many, and a step adds at most so many: eight levels and the target's own."""


@dataclass(frozen=True)
class Authority:
    """Certificates for 127.0.0.1, signed by an authority that nobody else knows."""

    folder: Path
    file: Path
    server: Server

    @property
    def url(self) -> str:
        return f"wss://127.0.0.1:{port_of(self.server)}"


def openssl(*arguments: str | Path) -> None:
    new = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    subprocess.run([*new, *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Authority]:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with: apt-get install openssl")
    folder = tmp_path_factory.mktemp("tls")
    authority, key, certificate = folder / "authority.pem", folder / "key.pem", folder / "certificate.pem"
    signs = ("-addext", "keyUsage=critical,keyCertSign")
    openssl("-subj", "/CN=A private authority", *signs, "-keyout", folder / "authority.key", "-out", authority)
    signed = ("-CA", authority, "-CAkey", folder / "authority.key", "-addext", "basicConstraints=CA:FALSE")
    openssl("-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", *signed, "-keyout", key, "-out", certificate)
    server = start_server(
        "--dtype",
        "float32",
        "--num-threads",
        "1",
        "--api-key",
        "right",
        "--ssl-certfile",
        str(certificate),
        "--ssl-keyfile",
        str(key),
    )
    yield Authority(folder, authority, server)
    stop_server(server)


def test_an_edge_talks_to_its_server_over_tls(secured: Authority, bundle: Path) -> None:
    key = secured.folder / "key.txt"
    key.write_text("right\n", "utf-8")
    body: dict[str, Any] = {"max_tokens": 40, "temperature": 0.8, "seed": 3}
    trusted = httpx.Client(verify=ssl.create_default_context(cafile=secured.file))
    server = openai.OpenAI(base_url=secured.server.base_url, api_key="right", http_client=trusted, max_retries=0)
    options = ("--server-ca-file", str(secured.file), "--server-api-key-file", str(key), "--offline", "stop")
    with running_edge(bundle, secured.url, *options) as edge, server:
        here = openai.OpenAI(base_url=edge.base_url, api_key="none", max_retries=0)
        with here:
            model = here.models.list().data[0].id
            messages: Any = [{"role": "user", "content": QUESTIONS[0]}]
            texts = []
            for client in (here, server):
                stream = client.chat.completions.create(model=model, messages=messages, stream=True, **body)
                texts.append("".join(chunk.choices[0].delta.content or "" for chunk in stream))
        assert texts[0] and texts[0] == texts[1]
        assert edge.metric("moaserve_edge_server_up") == 1 and edge.metric("moaserve_edge_bytes_total") > 0


def test_a_certificate_that_is_not_trusted_is_a_clear_error(secured: Authority, bundle: Path) -> None:
    said = failing(bundle, secured.url)
    assert "certificate is not trusted" in said and "--server-ca-file" in said and "Traceback" not in said
    other = secured.folder / "other.pem"
    openssl("-subj", "/CN=Another", "-keyout", secured.folder / "other.key", "-out", other)
    said = failing(bundle, secured.url, "--server-ca-file", str(other))
    assert f"it is of none of those in {other}: name its authority's certificate with --server-ca-file" in said
    said = failing(bundle, secured.url.replace("127.0.0.1", "localhost"), "--server-ca-file", str(secured.file))
    assert "it is another host's" in said


def test_tls_on_one_side_alone_is_a_clear_error(secured: Authority, target: Server, bundle: Path) -> None:
    plain = address(port_of(target))
    only = ("--offline", "stop")
    assert "its address begins with ws://" in failing(bundle, plain.replace("ws:", "wss:"), *only)
    assert "its address begins with wss://" in failing(bundle, secured.url.replace("wss:", "ws:"), *only)


@pytest.mark.parametrize(
    ("at", "content", "said"),
    [
        ("wss://127.0.0.1:1", "not a certificate", "holds no certificates that can be read"),
        ("wss://127.0.0.1:1", None, "there is no file"),
        ("ws://127.0.0.1:1", "anything", "give an address with wss://"),
    ],
)
def test_a_ca_file_that_cannot_be_used_is_a_clear_error(
    bundle: Path, tmp_path: Path, at: str, content: str | None, said: str
) -> None:
    file = tmp_path / "ca.pem"
    if content is not None:
        file.write_text(content, "utf-8")
    told = failing(bundle, at, "--server-ca-file", str(file))
    assert said in " ".join(told.split()) and "Traceback" not in told


@pytest.fixture(scope="module")
def calls() -> dict[str, int]:
    """Of the server, by the format in which memory came."""
    return {}


@pytest.mark.parametrize("memory", ["int8", "bfloat16", "int4"])
def test_memory_of_each_format_comes_over_the_wire(target: Server, bundle: Path, calls: dict[str, int], memory: str) -> None:
    calls[memory] = rows = received = answers = 0
    with running_edge(bundle, port_of(target), "--memory-format", memory, "--draft-lookup", "0") as edge:
        until(lambda: any(f"memory as {memory}" in line for line in edge.log))
        for seed, question in enumerate(QUESTIONS):
            for temperature in (0, 0.8):
                body = {"messages": [{"role": "user", "content": question}], "max_tokens": 96, "ignore_eos": True}
                body |= {"temperature": temperature, "seed": seed}
                here = ask(edge, body)
                assert comparable(here) == comparable(ask(target, body))
                usage, cost = here["usage"], here["metrics"]["edge"]
                rows += min(WINDOW, usage["prompt_tokens"]) + usage["completion_tokens"]
                received += cost["bytes_received"] - len(here["choices"][0]["message"]["content"].encode())
                calls[memory] += cost["num_server_calls"]
                answers += 1
    # Tokens of an answer's last step need no memory, and of each other one the last token's comes too; what is none are some 65
    # bytes a result, and the opening's and the end's.
    per_row, newest = ROW_BYTES[memory], NEWEST_BYTES[memory]
    least = (rows - LAST_STEP * answers) * per_row + (calls[memory] - answers) * newest
    assert least < received < rows * per_row + calls[memory] * (newest + 120)
    # Rounding costs 0.2% of tau at most; how large trees are follows from measured times, and moves calls by more than that.
    assert calls[memory] < 1.2 * calls["int8"]
