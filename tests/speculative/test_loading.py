"""Small models of a padded vocabulary draft without changing a text, and what is wrong is said before weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from models.loader import load_target, read_json
from models.saving import save_target
from speculative import loading
from speculative.config import EngineConfig
from speculative.drafters.independent import IndependentDrafter
from speculative.drafters.wrapper import innermost
from speculative.engine import Engine
from speculative.errors import EngineLoadError
from speculative.request import Request
from tests.speculative.conftest import DRAFT, request, run, tokens
from training.run import fresh_target

SAMPLING = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}, {"temperature": 1.2, "top_k": 40, "seed": 4}]
PROMPT = [7, 7, 30, 7, 7, 30, 7]


def requests(**params: Any) -> list[Request]:
    return [request(str(number), [*PROMPT, number], max_tokens=20, **params) for number in (3, 100, 155, 159)]


def rewritten(folder: Path, name: str, **changes: Any) -> None:
    (folder / name).write_text(json.dumps({**read_json(folder, name), **changes}))


@pytest.fixture(scope="module")
def small(spelling: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes an untrained small model with the speller's tokenizer and so many tokens; the target's has 160."""

    def write(count: int, *, tied: bool) -> Path:
        folder = tmp_path_factory.mktemp("small")
        target = load_target(spelling, dtype=torch.float32)[0]
        torch.manual_seed(0)
        sizes = replace(target.config, vocab_size=count, tie_word_embeddings=tied)
        model = fresh_target(sizes, {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48})
        save_target(model, folder, spelling, dtype=torch.float32)
        rewritten(folder, "config.json", vocab_size=count, tie_word_embeddings=tied)
        return folder

    return write


@pytest.mark.parametrize(
    ("count", "tied", "sampling"),
    [(count, tied, SAMPLING[(n + tied) % 3]) for n, count in enumerate((115, 150, 200)) for tied in (False, True)],
)
def test_a_drafter_of_another_padded_size_changes_no_text(
    make_speller: Callable[..., Engine], small: Callable[..., Path], count: int, tied: bool, sampling: dict[str, Any]
) -> None:
    folder = small(count, tied=tied)
    plain, drafted = make_speller("none"), make_speller(str(folder))
    drafter = innermost(drafted.drafter)
    assert isinstance(drafter, IndependentDrafter) and drafter.model.lm_head.weight.shape[0] == min(count, 160)
    outputs = run(drafted, requests(**sampling))
    assert tokens(outputs) == tokens(run(plain, requests(**sampling)))
    assert all(series[-1].stats.num_drafts > 0 for series in outputs.values())


@pytest.mark.parametrize("count", [150, 200])
def test_rows_in_common_draft_as_they_did(make_speller: Callable[..., Engine], spelling: Path, tmp_path: Path, count: int) -> None:
    """A drafter that is the target but for its padding is right wherever the target says a token that both have."""
    target = load_target(spelling, dtype=torch.float32)[0]
    padded = fresh_target(replace(target.config, vocab_size=count), {})
    state = padded.state_dict()
    for name, tensor in target.state_dict().items():
        state[name][: len(tensor)].copy_(tensor[: len(state[name])])
    padded.lm_head.weight.data[160:] = 100 * padded.lm_head.weight.data[: max(0, count - 160)]  # louder than any
    save_target(padded, tmp_path, spelling, dtype=torch.float32)
    rewritten(tmp_path, "config.json", vocab_size=count)
    shape = {"draft_depth": 4, "draft_breadth": 1, "draft_nodes": 4}
    accepted, unknown = 0, 0
    for series in run(make_speller(str(tmp_path), **shape), requests(temperature=0.0)).values():
        text, stats = [token for each in series for token in each.new_token_ids], series[-1].stats
        missed = sum(token >= count for token in text)
        # A pass whose draft goes wrong loses the rest of it, and says one of the target's own tokens.
        assert stats.num_accepted_draft_tokens >= len(text) * 4 // 5 - 1 - 4 * missed
        accepted, unknown = accepted + stats.num_accepted_draft_tokens, unknown + missed
    assert accepted > 0 and (unknown > 0) == (count < 160)


def test_tokens_of_another_tokenizer_are_refused(
    make_speller: Callable[..., Engine], small: Callable[..., Path], spelling: Path
) -> None:
    folder = small(160, tied=False)
    spelt = json.loads((folder / "tokenizer.json").read_text())
    words = spelt["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    (folder / "tokenizer.json").write_text(json.dumps(spelt))
    with pytest.raises(EngineLoadError, match=r"another tokenizer than the model: token \d+ is 'b' there and 'a' here"):
        make_speller(str(folder))


@pytest.fixture
def unread(spelling: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose weights nobody may read."""
    for name in ("load_decoder", "load_drafter", "load_eagle"):
        monkeypatch.setattr(loading, name, lambda *_, **__: pytest.fail("weights were read"))
    folder = tmp_path / "target"
    shutil.copytree(spelling, folder)
    return folder


def refuse(folder: Path, match: str, **settings: Any) -> None:
    given = {"drafter": "none", "dtype": "float32", "device": "cpu", "compile": "off", **DRAFT, **settings}
    with pytest.raises(EngineLoadError, match=match):
        loading.load_engine(EngineConfig(model=str(folder), **given))


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_model_len": 513}, "max_model_len=513 exceeds"),
        ({"drafter": "./no/such/folder"}, "no folder"),
        ({"drafter": "ngram", "draft_window": 5}, "--draft-window 5: only MoA and EAGLE"),
        ({"drafter": "models/pretrained/concierge"}, "another tokenizer than the model"),
        ({"drafter": "models/pretrained/concierge-moa"}, "was made for a target with hidden_size="),
    ],
)
def test_settings_are_checked_before_weights_are_read(unread: Path, settings: dict[str, Any], match: str, processes: int) -> None:
    refuse(unread, match, **settings, tensor_parallel_size=processes)


def test_files_are_checked_before_weights_are_read(unread: Path) -> None:
    rewritten(unread, "generation_config.json", temperature="0.7")
    refuse(unread, r"generation_config\.json: temperature is '0\.7', and must be a number")
    (unread / "tokenizer.json").write_text("no json")
    rewritten(unread, "generation_config.json", temperature=0.7)
    refuse(unread, "the tokenizer in .* cannot be read")


def test_a_drafter_of_an_unsupported_architecture_is_told_by_name(unread: Path, tmp_path: Path) -> None:
    folder = tmp_path / "drafter"
    folder.mkdir()
    for raw, said in (
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture 'GPT2LMHeadModel' cannot draft here; what can: Mixture-of-Attentions",
        ),
        ({"model_type": "gpt2"}, "config.json has no 'architectures'"),
        ({"architectures": ["MOASpecLlamaForCausalLM"]}, "not a MoA drafter: config.json has no 'layer_self_attention"),
    ):
        (folder / "config.json").write_text(json.dumps(raw))
        refuse(unread, f"--drafter {folder}: {said}", drafter=str(folder))


def test_a_sliding_window_is_refused_unless_texts_stay_inside_it(spelling: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(spelling, folder)
    rewritten(folder, "config.json", architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64)
    for length in (None, 65):
        refuse(folder, r"sliding_window=64.*--max-model-len 64", max_model_len=length)
    given = {"drafter": "ngram", "dtype": "float32", "device": "cpu", "compile": "off", **DRAFT}
    engine = loading.load_engine(EngineConfig(model=str(folder), max_model_len=64, **given))  # type: ignore[arg-type]
    plain = loading.load_engine(EngineConfig(model=str(spelling), max_model_len=64, **given))  # type: ignore[arg-type]
    assert tokens(run(engine, requests(temperature=0.0))) == tokens(run(plain, requests(temperature=0.0)))


def test_texts_end_where_the_tokenizer_says(spelling: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(spelling, folder)
    rewritten(folder, "generation_config.json", eos_token_id=1)
    engine = loading.load_engine(
        EngineConfig(model=str(folder), drafter="none", dtype="float32", device="cpu", compile="off", max_model_len=64)
    )
    assert engine.eos_token_ids == {1, 2}
