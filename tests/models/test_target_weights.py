"""Drafters say which weights they were made for."""

import json
from pathlib import Path

import pytest
import torch

from models.config import MoAConfig
from models.errors import CheckpointError
from models.llama import Llama
from models.loader import BUNDLED, load_target, read_tensors
from models.moa import MoA
from models.saving import save_drafter, save_target, write_weights
from models.target_weights import is_for_other_weights, weights_name
from speculative.config import EngineConfig
from speculative.loading import load_uncompiled

N0 = Path(__file__).parents[1] / "fixtures" / "llama-n0"


@pytest.fixture
def target() -> Llama:
    return load_target(N0 / "target", dtype=torch.float32)[0]


def saved(target: Llama, folder: Path, **how: object) -> Path:
    save_target(target, folder, N0 / "target", **how)  # type: ignore[arg-type]
    return folder


def test_weights_keep_their_name_in_another_type_and_other_shards(target: Llama, tmp_path: Path) -> None:
    name = weights_name(saved(target, tmp_path / "bfloat16"))
    again, _ = load_target(tmp_path / "bfloat16", dtype=torch.float32)
    other = saved(again, tmp_path / "float32", dtype=torch.float32)
    tensors = read_tensors(other)
    (other / "model.safetensors").unlink()
    write_weights(tensors, other, "20KB")
    assert len(list(other.glob("*.safetensors"))) > 1
    assert weights_name(other) == name


def test_a_fine_tune_has_another_name_than_what_it_was_made_of(target: Llama, tmp_path: Path) -> None:
    before = saved(target, tmp_path / "before")
    save_drafter(MoA(MoAConfig.from_target(target.config)), tmp_path / "drafter", made_for=before)
    drafter = json.loads((tmp_path / "drafter" / "config.json").read_text())
    with torch.no_grad():
        target.borrowed(1)[0].mlp.down.weight[0, 0] += 0.5
    after = saved(target, tmp_path / "after")
    assert not is_for_other_weights(drafter, before)
    assert is_for_other_weights(drafter, after)
    assert not is_for_other_weights({key: value for key, value in drafter.items() if key != "target_weights"}, after)


def test_the_bundled_drafter_is_for_the_bundled_target() -> None:
    drafter = json.loads((BUNDLED["drafter"] / "config.json").read_text())
    assert drafter["target_weights"] == weights_name(BUNDLED["target"])


def test_a_damaged_file_is_named(target: Llama, tmp_path: Path) -> None:
    file = saved(target, tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        weights_name(tmp_path)


@pytest.mark.parametrize("other", [False, True])
def test_an_engine_says_that_its_drafter_was_made_for_other_weights(
    target: Llama, tmp_path: Path, caplog: pytest.LogCaptureFixture, *, other: bool
) -> None:
    folder = saved(target, tmp_path / "target")
    save_drafter(MoA(MoAConfig.from_target(target.config)), tmp_path / "drafter", made_for=N0 / "target" if not other else folder)
    if other:
        with torch.no_grad():
            target.borrowed(1)[0].mlp.down.weight[0, 0] += 0.5
        saved(target, folder)
    load_uncompiled(EngineConfig(str(folder), str(tmp_path / "drafter"), "float32", "cpu"))
    assert ("was made for other weights than those of" in caplog.text) is other
