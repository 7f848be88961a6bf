"""The type that ``auto`` chooses is what is fast: by the CPU's own products, or by operators, which take compiled code."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from models.saving import save_eagle
from speculative import packages, placement
from speculative.config import EngineConfig
from speculative.errors import EngineLoadError
from speculative.placement import engine_dtype, torch_device, torch_dtype
from tests.speculative.conftest import N0, random_eagle

CPU, TARGET = torch.device("cpu"), N0 / "target"


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> EngineConfig:
    """On a CPU with AVX2 alone, where a compiler is found."""
    monkeypatch.setattr("models.tiles.has_tiles", lambda: False)
    monkeypatch.setattr(placement, "has_operators", lambda: True)
    monkeypatch.setattr(packages, "unsupported", lambda device: None)
    return EngineConfig(model=str(TARGET), drafter="none")


@pytest.mark.parametrize(
    ("tiles", "operators", "compiled", "expected"),
    [
        (True, True, False, torch.bfloat16),
        (False, True, True, torch.bfloat16),
        (False, True, False, torch.float32),
        (False, False, True, torch.float32),
    ],
)
def test_a_cpu_computes_in_bfloat16_where_that_is_fast(
    tiles: bool, operators: bool, compiled: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.tiles.has_tiles", lambda: tiles)
    monkeypatch.setattr(placement, "has_operators", lambda: operators)
    assert torch_dtype("auto", CPU, compiled=compiled) == expected
    assert torch_dtype("float32", CPU, compiled=compiled) == torch.float32
    assert torch_dtype("bfloat16", CPU, compiled=compiled) == torch.bfloat16
    assert torch_dtype("auto", torch.device("cuda"), compiled=False) == torch.bfloat16


def test_an_engine_that_is_compiled_takes_what_operators_widen(config: EngineConfig) -> None:
    assert engine_dtype(config, TARGET, CPU) == torch.bfloat16
    assert engine_dtype(dataclasses.replace(config, dtype="float32"), TARGET, CPU) == torch.float32


@pytest.mark.parametrize("changes", [{"compile": "off"}, {"tensor_parallel_size": 2}])
def test_one_that_is_not_compiled_takes_float32(changes: dict[str, object], config: EngineConfig) -> None:
    assert engine_dtype(dataclasses.replace(config, **changes), TARGET, CPU) == torch.float32  # type: ignore[arg-type]


def test_without_a_compiler_it_is_float32(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "unsupported", lambda device: "no C++ compiler found (install g++)")
    assert engine_dtype(config, TARGET, CPU) == torch.float32


def test_so_it_is_for_a_large_target_that_only_pytorch_could_compile(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LARGEST_COMPILED", 1000)
    monkeypatch.setattr(placement, "suits_whole", lambda target: False)
    assert engine_dtype(config, TARGET, CPU) == torch.float32
    assert engine_dtype(dataclasses.replace(config, compile="on"), TARGET, CPU) == torch.bfloat16


def test_a_large_target_runs_on_operators(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "LARGEST_COMPILED", 1000)
    for module in ("tiled_linear", "cached_attention"):
        monkeypatch.setattr(f"models.{module}.has_operators", lambda: True)
    assert engine_dtype(config, TARGET, CPU) == torch.bfloat16
    monkeypatch.setattr("models.tiled_linear.has_operators", lambda: False)
    assert engine_dtype(config, TARGET, CPU) == torch.float32


@pytest.mark.parametrize(("generation", "expected"), [(2, torch.bfloat16), (3, torch.float32)])
def test_a_drafter_that_reads_inner_layers_keeps_its_target_from_being_compiled(
    generation: int, expected: torch.dtype, config: EngineConfig, tmp_path: Path
) -> None:
    save_eagle(random_eagle(generation), tmp_path)
    reading = dataclasses.replace(config, drafter=str(tmp_path))
    assert engine_dtype(reading, TARGET, CPU) == expected
    if expected == torch.float32:
        with pytest.raises(EngineLoadError, match="--compile on: this drafter reads inner layers"):
            engine_dtype(dataclasses.replace(reading, compile="on"), TARGET, CPU)


def test_a_device_that_is_not_there_is_named() -> None:
    assert torch_device("cpu") == CPU
    with pytest.raises(EngineLoadError, match=r"device 'nothing' cannot be used: .*; try --device cpu"):
        torch_device("nothing")
