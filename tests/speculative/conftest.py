"""Engines over the fixtures' tiny random models, in float32."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from models.config import MoAConfig
from models.eagle import Eagle, EagleConfig
from models.loader import load_target, read_json
from models.moa import MoA
from models.saving import save_drafter, save_eagle, save_target
from speculative.config import EngineConfig
from speculative.engine import Engine
from speculative.loading import load_engine
from speculative.request import Request, RequestOutput, SamplingParams
from training.run import fresh_target

FIXTURES = Path(__file__).parents[1] / "fixtures"
N0, N1 = FIXTURES / "llama-n0", FIXTURES / "llama-n1"

DRAFT: dict[str, Any] = {
    "draft_policy": "fixed",
    "draft_depth": 3,
    "draft_breadth": 3,
    "draft_nodes": 8,
    "draft_min_reach": 0.0,
    "draft_lookup": 0,
}
"""A full tree of the drafter's own at every step: a random one is never sure enough to go deep by itself."""

MakeEngine = Callable[..., Engine]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny products gain nothing from threads that wait for each other."""
    torch.set_num_threads(1)


VOCABULARY = torch.arange(0, 150, 3)
"""A third of N0's tokens, for drafters that propose few besides the texts' own."""


def random_moa(folder: Path = N0 / "target", *, trimmed: bool = False, **sizes: int) -> MoA:
    """An untrained MoA drafter for a target, or N0's, with MoAConfig's ``sizes``, all of its parts at work.

    ``trimmed``: it has a draft vocabulary.
    """
    torch.manual_seed(0)
    target = load_target(folder, dtype=torch.float32)[0]
    moa = MoA(MoAConfig.from_target(target.config, **sizes)).requires_grad_(False)
    for weight in (moa.block.down.weight, moa.block.stand_ins) if moa.block is not None else ():
        torch.nn.init.normal_(weight, std=0.5)
    moa.draft_vocabulary = VOCABULARY if trimmed else None
    return moa


MOA_KINDS: dict[str, dict[str, int]] = {
    "block": {"draft_block_size": 8},
    "entry": {"has_entry": True},
    "entry and block": {"has_entry": True, "draft_block_size": 8},
    "paired": {"has_entry": True, "paired": True},
    "paired block": {"has_entry": True, "paired": True, "draft_block_size": 8},
    "vocabulary": {"trimmed": True},
    "paired block and vocabulary": {"has_entry": True, "paired": True, "draft_block_size": 8, "trimmed": True},
    "ablation": {"reads_all_layers": False, "attends_to_all_memory": False},
}
"""MoA drafters that are not the paper's."""

DRAFTERS = ("ngram", "moa", *MOA_KINDS, "eagle2", "eagle2 and vocabulary", "eagle3", "independent")
"""All kinds there are for N0's target: a new one joins every test of losslessness by its name here."""


def random_eagle(generation: int) -> Eagle:
    """An untrained EAGLE drafter for N0's target."""
    torch.manual_seed(generation)
    target = load_target(N0 / "target", dtype=torch.float32)[0]
    return Eagle(EagleConfig(target.config, generation, 2, 48)).requires_grad_(False)


@pytest.fixture(scope="session")
def drafter_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Untrained drafters for N0's target, one of every kind that is not among the fixtures."""
    folder = tmp_path_factory.mktemp("drafters")
    for generation in (2, 3):
        save_eagle(random_eagle(generation), folder / f"eagle{generation}", dtype=torch.float32)
    trimmed = random_eagle(2)
    trimmed.draft_vocabulary = VOCABULARY
    save_eagle(trimmed, folder / "eagle2 and vocabulary", dtype=torch.float32)
    for name, sizes in MOA_KINDS.items():
        save_drafter(random_moa(**sizes), folder / name, dtype=torch.float32)
    target = load_target(N0 / "target", dtype=torch.float32)[0]
    torch.manual_seed(0)
    small = fresh_target(target.config, {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 48})
    save_target(small, folder / "independent", N0 / "target", dtype=torch.float32)
    return {name: folder / name for name in DRAFTERS if name not in ("ngram", "moa")}


@pytest.fixture(scope="session")
def make_engine(drafter_folders: dict[str, Path]) -> MakeEngine:
    """Builds an engine over fixture ``folder`` (N0 or N1); ``drafter`` "moa" is the fixture's own, others are N0's."""

    def make(folder: Path = N0, drafter: str = "moa", **settings: object) -> Engine:
        return load_engine(
            EngineConfig(
                model=str(folder / "target"),
                drafter=str({"moa": folder / "drafter", **drafter_folders}.get(drafter, drafter)),
                dtype="float32",
                device="cpu",
                **{"max_model_len": 128, "max_num_seqs": 4, "compile": "off", **DRAFT, **settings},  # type: ignore[arg-type]
            )
        )

    return make


@pytest.fixture(scope="session")
def spelling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixtures' target with a tokenizer: tokens are characters, and some pairs of them."""
    folder = tmp_path_factory.mktemp("spelling") / "target"
    shutil.copytree(N0 / "target", folder)
    size = read_json(folder, "config.json")["vocab_size"]
    characters = ["<pad>", "<s>", "</s>", "Ġ", *map(chr, range(33, 127))]  # a space as byte-level tokenizers write it
    pairs = ["es", "th", "an", "in", "er", "pa", "ti", ",Ġ", '":', '",', "re", "st", "no", "ye"][: size - len(characters)]
    model = BPE({token: number for number, token in enumerate([*characters, *pairs])}, [(pair[0], pair[1]) for pair in pairs])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


@pytest.fixture(scope="session")
def make_speller(spelling: Path, drafter_folders: dict[str, Path]) -> Callable[..., Engine]:
    """Engines whose texts are text."""

    def make(drafter: str = "moa", **settings: object) -> Engine:
        chosen = {"moa": N0 / "drafter", **drafter_folders}.get(drafter, drafter)
        given = {"max_model_len": 128, "max_num_seqs": 3, "compile": "off", **DRAFT, **settings}
        return load_engine(EngineConfig(model=str(spelling), drafter=str(chosen), dtype="float32", device="cpu", **given))  # type: ignore[arg-type]

    return make


def run(engine: Engine, requests: list[Request]) -> dict[str, list[RequestOutput]]:
    """All outputs of requests that are added together."""
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.scheduler.check_integrity()
    return outputs


def tokens(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    """The generated tokens of each request."""
    return {name: [token for output in series for token in output.new_token_ids] for name, series in outputs.items()}


def request(name: str, prompt: list[int], **params: object) -> Request:
    """A request that runs to ``max_tokens``."""
    return Request(name, tuple(prompt), SamplingParams(ignore_eos=True, **params))  # type: ignore[arg-type]
