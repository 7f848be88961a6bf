"""What is downloaded, and when: a hub that is a folder of this machine."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

from models import hub
from models.config import DecoderConfig
from models.errors import CheckpointError
from models.loader import resolve, resolve_target

TARGET = Path(__file__).parents[1] / "fixtures" / "llama-n0" / "target"
COMMIT = "0123456789abcdef"


class Hub:
    """A repository, and which of its files were fetched in which order."""

    def __init__(self, root: Path) -> None:
        self.repository, self.cache = root / "repository", root / "cache" / COMMIT
        self.repository.mkdir()
        self.fetched: list[str] = []
        self.revision: str | None = None

    def hold(self, name: str, content: str = "") -> None:
        (self.repository / name).parent.mkdir(parents=True, exist_ok=True)
        (self.repository / name).write_text(content)

    def file(self, name: str, file: str, *, revision: str | None) -> str:
        self.revision = revision
        if not (self.repository / file).exists():
            raise RemoteEntryNotFoundError.__new__(RemoteEntryNotFoundError)
        return str(self._fetch(file))

    def snapshot(self, name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert revision == COMMIT
        for path in sorted(self.repository.rglob("*")):
            file = path.relative_to(self.repository).as_posix()
            wanted, unwanted = (any(fnmatch(file, each) for each in patterns) for patterns in (allow_patterns, ignore_patterns))
            if path.is_file() and wanted and not unwanted and file not in self.fetched:
                self._fetch(file)
        return str(self.cache)

    def _fetch(self, file: str) -> Path:
        self.fetched.append(file)
        (self.cache / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.repository / file, self.cache / file)
        return self.cache / file


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    made = Hub(tmp_path)
    monkeypatch.setattr(hub, "hf_hub_download", made.file)
    monkeypatch.setattr(hub, "snapshot_download", made.snapshot)
    return made


CONFIG: dict[str, Any] = json.loads((TARGET / "config.json").read_text())


def test_weights_are_fetched_once_and_after_the_config(remote: Hub) -> None:
    remote.hold("config.json", json.dumps(CONFIG))
    for name in ("model.safetensors", "tokenizer.json", "additional_chat_templates/tools.jinja", "README.md", "pytorch_model.bin"):
        remote.hold(name)
    for again in ("consolidated.safetensors", "consolidated.00.pth", "original/model.safetensors", "onnx/config.json"):
        remote.hold(again)
    assert resolve_target("somebody/model") == remote.cache
    assert remote.fetched[0] == "config.json"
    assert set(remote.fetched[1:]) == {"model.safetensors", "tokenizer.json", "additional_chat_templates/tools.jinja"}


def test_nothing_is_fetched_of_what_cannot_be_computed(remote: Hub) -> None:
    remote.hold("config.json", json.dumps(CONFIG | {"architectures": ["MixtralForCausalLM"]}))
    remote.hold("model.safetensors")
    with pytest.raises(CheckpointError, match="MixtralForCausalLM"):
        resolve_target("somebody/model")
    assert remote.fetched == ["config.json"]


def test_whoever_asks_may_check_more(remote: Hub) -> None:
    remote.hold("config.json", json.dumps(CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}))

    def check(raw: dict[str, Any]) -> None:
        DecoderConfig.from_hf(raw).check_window(100)

    with pytest.raises(CheckpointError, match="sliding_window=64"):
        resolve("somebody/model", check)
    assert remote.fetched == ["config.json"]
    assert resolve("somebody/model") == remote.cache


def test_a_repository_without_a_config_is_none_of_a_whole_checkpoint(remote: Hub) -> None:
    remote.hold("adapter_config.json", "{}")
    with pytest.raises(CheckpointError, match=r"'somebody/adapter' on the hub has no config\.json: LoRA"):
        resolve("somebody/adapter")


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1"])
def test_a_revision_may_be_named(remote: Hub, revision: str) -> None:
    remote.hold("config.json", json.dumps(CONFIG))
    resolve("somebody/model")
    assert remote.revision is None
    assert resolve(f"somebody/model@{revision}") == remote.cache
    assert remote.revision == revision
    with pytest.raises(CheckpointError, match="no folder 'some/body/model@v1'"):
        resolve("some/body/model@v1")


def test_without_a_network_the_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: str, **__: None) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    with pytest.raises(CheckpointError, match="cannot download 'somebody/model' from the hub: no network"):
        resolve("somebody/model")
