"""The command line: options, errors and the terminal conversation, without a model."""

import inspect
import json
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from app.cli import cli
from app.commands import backends, options
from app.commands import chat as chat_command
from app.commands.serve import serve
from app.settings import Settings
from app.thoughts import Thought
from speculative.config import EngineConfig
from speculative.memory import MemoryLimit

runner = CliRunner()


def test_serve_has_an_option_for_every_setting() -> None:
    assert inspect.signature(serve).parameters.keys() == Settings.model_fields.keys()


def test_help_needs_neither_torch_nor_the_http_stack() -> None:
    code = "import sys; from app.cli import cli; cli(['serve', '--help'], standalone_mode=False); "
    code += "sys.exit(str([name for name in ('torch', 'transformers', 'fastapi', 'uvicorn') if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert "--max-num-seqs" in done.stdout
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--port", "70000"], {}, "--port: "),
        (["--max-num-seqs", "0"], {}, "--max-num-seqs: "),
        (["--dtype", "int8"], {}, "--dtype: "),
        (["--draft-nodes", "2"], {}, "draft_nodes (2) must be at least draft_depth (8)"),
        (["--config", "nowhere.toml"], {}, "nowhere.toml does not exist"),
        ([], {"MOASERVE_PORT": "many"}, "MOASERVE_PORT: "),
        ([], {"MOASERVE_FORWARDED_ALLOW_IPS": "172.16.0.0/33"}, "MOASERVE_FORWARDED_ALLOW_IPS: "),
        ([], {"MOASERVE_PROT": "1"}, "unknown environment variable MOASERVE_PROT"),
    ],
)
def test_a_wrong_setting_is_named_as_the_user_set_it(arguments: list[str], environment: dict[str, str], message: str) -> None:
    result = runner.invoke(cli, ["serve", *arguments], env=environment)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_wrong_key_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("prot = 1")
    result = runner.invoke(cli, ["serve", "--config", str(tmp_path / "a.toml")])
    assert (result.exit_code, "unknown setting 'prot'" in result.stderr) == (2, True)


def test_an_engine_is_configured_by_parameters_of_its_settings_names() -> None:
    config = options.engine_config({"draft_depth": 3, "dtype": None, "num_prompts": 5})
    limit = MemoryLimit(None, lowers_num_seqs=True)
    assert config == EngineConfig(draft_depth=3, prefix_cache_tokens=0, memory_limit=limit)


@pytest.mark.parametrize("command", ["bench offline", "bench lossless", "bench predictions", "eval --drafter ngram"])
def test_a_model_that_is_not_there_is_one_clear_line(command: str) -> None:
    result = runner.invoke(cli, [*command.split(), "--model", "/nowhere"])
    assert result.exit_code == 1
    assert result.stderr.startswith("moaserve: error: no folder '/nowhere'") and result.stderr.count("\n") == 1


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = runner.invoke(cli, ["serve", "--port", str(port)])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert f"127.0.0.1 port {port}" in result.stderr


def test_where_logs_are_for_machines_an_error_is_an_object_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = ["serve", "--log-format", "json", "--port", str(taken.getsockname()[1])]
        code = f"from app.cli import cli; cli({command})"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    said = json.loads(ended.stderr)
    assert (ended.returncode, ended.stdout, said["level"]) == (1, "", "error")
    assert "cannot listen on 127.0.0.1 port" in said["message"]


def test_version() -> None:
    result = runner.invoke(cli, ["--version"])
    assert (result.exit_code, result.stdout.startswith("moaserve ")) == (0, True)


class EchoBackend:
    """Answers with what was asked, and how many messages there were."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[backends.Told, None]:
        self.bodies.append(body)
        asked = body["messages"][-1]["content"]
        if asked == "fail":
            raise backends.ChatError("no luck")
        if asked == "think":
            yield Thought("Well,")
            yield Thought(" so.")
        yield "You said "
        yield asked
        yield backends.AnswerStats(3.25, 150.4, 7)

    async def close(self) -> None:
        self.bodies.append({"closed": True})


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> EchoBackend:
    backend = EchoBackend()
    monkeypatch.setattr(chat_command, "_open", lambda *_: backend)
    return backend


def test_a_piped_conversation(backend: EchoBackend) -> None:
    arguments = ["chat", "--system", "Be kind.", "--temperature", "0", "--no-speculative"]
    result = runner.invoke(cli, arguments, input="one\n\ntwo\n/reset\nthree\n/quit\nfour\n")
    assert result.exit_code == 0, result.output
    assert "You said one\n[τ 3.25 · 150 tokens/s · 7 tokens]\n" in result.stdout
    system = {"role": "system", "content": "Be kind."}
    one = {"role": "user", "content": "one"}
    assert [body["messages"] for body in backend.bodies[:-1]] == [
        [system, one],
        [system, one, {"role": "assistant", "content": "You said one"}, {"role": "user", "content": "two"}],
        [system, {"role": "user", "content": "three"}],
    ]
    assert {key: value for key, value in backend.bodies[0].items() if key != "messages"} == {
        "temperature": 0.0,
        "speculative": False,
    }
    assert backend.bodies[-1] == {"closed": True}


def test_thoughts_are_shown_and_are_no_part_of_what_was_said(backend: EchoBackend) -> None:
    result = runner.invoke(cli, ["chat"], input="think\nso\n")
    assert "Well, so.\n\nYou said think\n" in result.stdout
    assert backend.bodies[1]["messages"][1] == {"role": "assistant", "content": "You said think"}


def test_a_failing_answer_ends_a_script_with_an_error(backend: EchoBackend) -> None:
    result = runner.invoke(cli, ["chat"], input="fail\n")
    assert (result.exit_code, result.stderr) == (1, "moaserve: error: no luck\n")
    assert backend.bodies[-1] == {"closed": True}


def test_engine_options_make_no_sense_with_a_url() -> None:
    result = runner.invoke(cli, ["chat", "--url", "http://127.0.0.1:1", "--model", "x"])
    assert (result.exit_code, "--model" in result.stderr) == (2, True)


async def test_a_server_that_is_not_there_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    backend = backends.ServerBackend(f"http://127.0.0.1:{port}/v1/")
    with pytest.raises(backends.ChatError, match=f"127.0.0.1:{port}/v1/chat/completions"):
        await anext(backend.answer({"messages": []}))
    await backend.close()


@pytest.mark.parametrize(
    ("url", "key", "line"),
    [
        ("http://127.0.0.1:99999", None, "there is no port 99999"),
        ("http://host:port", None, "Invalid port: 'port'"),
        ("http://127.0.0.1:1", "schlüssel", "--api-key: a key has ASCII characters alone"),
    ],
)
def test_an_address_or_key_that_cannot_be_is_one_clear_line(url: str, key: str | None, line: str) -> None:
    arguments = ["chat", "--url", url, *(("--api-key", key) if key else ())]
    result = runner.invoke(cli, arguments, input="Hi\n")
    assert result.exit_code == 1 and line in result.stderr and len(result.stderr.splitlines()) == 1, result.output


@pytest.mark.parametrize(
    ("arguments", "environment", "sent"),
    [
        ([], {}, None),
        (["--api-key", "sk-1"], {}, "Bearer sk-1"),
        ([], {"OPENAI_API_KEY": "sk-2"}, "Bearer sk-2"),
        (["--api-key", "sk-1"], {"OPENAI_API_KEY": "sk-2"}, "Bearer sk-1"),
    ],
)
def test_a_server_is_asked_with_a_key(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], sent: str | None
) -> None:
    asked: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("authorization"))
        return httpx.Response(200, text='data: {"choices": [{"delta": {"content": "Hello"}}]}\n\ndata: [DONE]\n\n')

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(backends.httpx, "AsyncClient", partial(httpx.AsyncClient, transport=httpx.MockTransport(answer)))
    result = runner.invoke(cli, ["chat", "--url", "http://test", *arguments], input="Hi\n", env=environment)
    assert (result.exit_code, "Hello" in result.stdout) == (0, True), result.output
    assert asked == [sent]


@pytest.mark.parametrize(
    ("body", "pieces"),
    [
        ({"temperature": 0}, ["", "Hello", ",", " world", "", backends.AnswerStats(2.0, 2.0, 3)]),
        ({"temperature": 9}, "temperature"),
    ],
)
async def test_answers_of_a_server(client: httpx.AsyncClient, body: dict[str, Any], pieces: Any) -> None:
    backend = backends.ServerBackend("http://test")
    await backend.close()
    backend._client = client
    answer = backend.answer({"messages": [{"role": "user", "content": "Hi"}], **body})
    if isinstance(pieces, str):
        with pytest.raises(backends.ChatError, match=pieces):
            await anext(answer)
    else:
        assert [piece async for piece in answer] == pieces
