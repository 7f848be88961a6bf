"""Which runs build and load our operators."""

from pathlib import Path

import pytest
from accelerate import Accelerator

from training import beginning
from training.config import TrainConfig


@pytest.mark.parametrize(
    ("settings", "tiles", "operators", "loads"),
    [
        ({}, True, True, True),
        ({}, False, True, False),
        ({"dtype": "float32"}, True, True, False),
        ({"dtype": "float32", "regenerate": 5}, True, True, True),
        ({"regenerate": 5}, False, True, True),
        ({"regenerate": 5}, False, False, False),
        ({"regenerate": 5, "compile": False}, True, True, False),
    ],
    ids=str,
)
def test_operators_are_for_attention_in_bfloat16_and_for_writing_answers(
    settings: dict[str, object], tiles: bool, operators: bool, loads: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[Path] = []
    built = tmp_path / "runner.so"
    monkeypatch.setattr(beginning, "has_tiles", lambda: tiles)
    monkeypatch.setattr(beginning, "has_operators", lambda: operators)
    monkeypatch.setattr(beginning, "unsupported", lambda _: None)
    monkeypatch.setattr(beginning, "runner_path", lambda _: built)
    monkeypatch.setattr(beginning, "intact", lambda _: True)
    monkeypatch.setattr(beginning, "load_runner", loaded.append)
    values: dict[str, object] = {"target": "t", "data": "d", "out": tmp_path, "max_steps": 1, "compile": True, **settings}
    config = TrainConfig(**values)  # type: ignore[arg-type]
    beginning.load_operators(config, Accelerator(cpu=True), writes=config.regenerate is not None)
    assert loaded == ([built] if loads else [])
