"""Where settings come from, and what is refused."""

from dataclasses import fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.edge_settings import EdgeSettings
from app.settings import Settings, SettingsError
from speculative.config import EngineConfig
from speculative.memory import MemoryLimit


def test_the_command_line_beats_the_environment_and_that_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "moaserve.toml"
    file.write_text('port = 1\nmax_num_seqs = 1\ndraft_depth = 1\nmodel = "from-file"\n')
    monkeypatch.setenv("MOASERVE_PORT", "2")
    monkeypatch.setenv("MOASERVE_MAX_NUM_SEQS", "2")
    settings = Settings(config=file, port=3)
    assert (settings.port, settings.max_num_seqs, settings.draft_depth, settings.draft_breadth) == (3, 2, 1, 4)
    assert settings.model == "from-file"


def test_the_environment_can_name_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("port = 7")
    monkeypatch.setenv("MOASERVE_CONFIG", str(tmp_path / "a.toml"))
    assert Settings().port == 7


def test_an_unknown_variable_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOASERVE_MAX_SEQS", "2")
    with pytest.raises(SettingsError, match="MOASERVE_MAX_SEQS"):
        Settings()


def test_an_unknown_key_of_the_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("prot = 7")
    with pytest.raises(ValidationError, match="prot"):
        Settings(config=tmp_path / "a.toml")


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), ("port =", "cannot be read")])
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "a.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=rf"a\.toml.* {message}"):
        Settings(config=path)


@pytest.mark.parametrize(
    "wrong",
    [{"port": 65536}, {"max_num_seqs": 0}, {"dtype": "int8"}, {"log_level": "loud"}, {"draft_nodes": 4}, {"nonsense": 1}],
)
def test_values_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Settings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("proxies", ["*", "", "127.0.0.1", "10.0.0.7, 172.16.0.0/12,::1,fd00::/8"])
def test_proxies_are_addresses_and_networks(proxies: str) -> None:
    assert Settings(forwarded_allow_ips=proxies).forwarded_allow_ips == proxies


@pytest.mark.parametrize("wrong", ["172.16.0.0/33", "172.16.0.1/12", "10.0.0.7,localhost", "10.0.0.7,*", "10.0.0.7 10.0.0.8"])
def test_a_proxy_that_nobody_would_be_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError, match="addresses and networks"):
        Settings(forwarded_allow_ips=wrong)


def test_settings_cannot_be_changed() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.port = 1  # type: ignore[misc]


def test_the_engine_gets_every_one_of_its_settings() -> None:
    assert Settings().engine_config() == EngineConfig(memory_limit=MemoryLimit(None, lowers_num_seqs=True))
    changed = {"model": "m", "drafter": "none", "dtype": "float32", "device": "cpu", "max_model_len": 9, "max_num_seqs": 2}
    changed |= {
        "prefill_chunk": 3,
        "draft_policy": "fixed",
        "draft_depth": 2,
        "draft_breadth": 1,
        "draft_nodes": 2,
        "draft_min_reach": 0.25,
        "draft_temperature": 0.5,
        "draft_lookup": 5,
        "draft_window": 7,
        "remote_tree_nodes": 20,
        "prefix_cache_tokens": 64,
        "num_threads": 1,
        "compile": "off",
        "tensor_parallel_size": 2,
    }
    assert changed.keys() | {"memory_limit"} == {field.name for field in fields(EngineConfig)}
    settings = Settings(**changed, memory_limit="1.5 GiB")  # type: ignore[arg-type]
    assert settings.engine_config() == EngineConfig(**changed, memory_limit=MemoryLimit(1536 * 2**20))  # type: ignore[arg-type]


def test_a_limit_to_memory_lowers_only_what_nobody_asked_for() -> None:
    limits = [Settings(memory_limit="2000", **given).engine_config().memory_limit for given in ({}, {"max_num_seqs": 32})]
    assert limits == [MemoryLimit(2000, lowers_num_seqs=True), MemoryLimit(2000, lowers_num_seqs=False)]
    assert Settings().engine_config().memory_limit == MemoryLimit(None, lowers_num_seqs=True), "what is free"
    assert Settings(max_num_seqs=32).engine_config().memory_limit is None
    with pytest.raises(ValidationError, match="2GiB, 1500MB"):
        Settings(memory_limit="2 elephants")


@pytest.mark.parametrize("key", ["sk-1\nsk-2", "s\x00k", "密钥"])
@pytest.mark.parametrize("in_file", [False, True])
def test_a_key_that_no_header_can_hold_is_refused_and_not_quoted(tmp_path: Path, in_file: bool, key: str) -> None:
    (tmp_path / "key").write_text(key, encoding="utf-8")
    given = {"server_api_key_file": tmp_path / "key"} if in_file else {"server_api_key": key}
    with pytest.raises(ValidationError, match="on one line") as caught:
        EdgeSettings(server="ws://a", bundle="b", **given)  # type: ignore[arg-type]
    assert key not in str(caught.value)


def test_blanks_around_the_key_for_a_server_are_not_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1\n")
    for name, value in (("MOASERVE_SERVER_API_KEY", "sk-1\n"), ("MOASERVE_SERVER_API_KEY_FILE", str(tmp_path / "key"))):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert EdgeSettings(server="ws://a", bundle="b").server_key() == "sk-1"  # type: ignore[arg-type]
    assert EdgeSettings(server="ws://a", bundle="b", server_api_key="\n").server_key() is None  # type: ignore[arg-type]


def test_an_address_with_a_user_takes_no_key_beside_it() -> None:
    assert EdgeSettings(server="wss://me:secret@a", bundle="b").server_key() is None  # type: ignore[arg-type]
    with pytest.raises(ValidationError, match="in one way only"):
        EdgeSettings(server="wss://me:secret@a", bundle="b", server_api_key="sk-1")  # type: ignore[arg-type]


def test_variables_of_the_chat_template_come_as_json_or_as_a_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[chat_template_kwargs]\nenable_thinking = false\n")
    assert Settings(config=file).chat_template_kwargs == {"enable_thinking": False}
    monkeypatch.setenv("MOASERVE_CHAT_TEMPLATE_KWARGS", '{"enable_thinking": true}')
    assert Settings(config=file).chat_template_kwargs == {"enable_thinking": True}
    for wrong, why in (("{enable_thinking: false}", "it is not valid JSON"), ("[1]", "it must be a JSON object")):
        with pytest.raises(ValidationError, match=why):
            Settings(chat_template_kwargs=wrong)
