"""GGUF files that we export, run by llama.cpp: the same tokens of a text, the same logits, the same answers."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

from benchmarks.decoding import decode
from benchmarks.prompts import BUNDLED_PROMPTS, load_prompts
from models.gguf_export import export_gguf
from models.gguf_tokenizer import PRE_TOKENIZERS
from models.loader import BUNDLED, load_tokenizer
from speculative.config import EngineConfig
from speculative.loading import load_engine
from speculative.request import SamplingParams
from tests.models.test_llama_parity import FAMILIES

llama_cpp = pytest.importorskip("llama_cpp", reason="pip install 'moaserve[peers]'")
pytest.importorskip("gguf", reason="pip install gguf")
pytestmark = pytest.mark.integration

TEXTS = (
    "I'd like 3 tickets, WE'LL pay $1234567.89 on 2026-01-02!",
    "  two spaces,\ttabs\t\t,\n\n\n  new lines \r\n and\n a trailing one \n",
    "Größe, naïve café, ÇA VA, ĳsvrij, ﬁn",
    "Привет, мир! 你好，世界 1２３ こんにちは 안녕하세요 العربية ١٢٣٤ हिन्दी ไทย",
    "👩‍👩‍👧‍👦 🇩🇪 ✓ → ½ Ⅷ ² ₂",
    "def f(x):\n    return {'a': [x**2 for x in range(10)]}  # don't\n",
    "<|im_start|>user\nwhat is <tool_call>{}</tool_call> <|im_end|>\n<|im_start|>assistant\n<|endoftext|>",
    "a\u0301 o\u0308 \u00a0no-break\u2003em\u3000wide\u200bzero \x00\x07",
    "'s's'S 'tis y'all'd've 're",
)


def load(path: Path, **options: Any) -> Any:
    return llama_cpp.Llama(str(path), n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, **options)


def random_texts(count: int) -> list[str]:
    """Of letters, numbers, spaces and marks of many scripts, from one seed."""
    rng = random.Random(0)
    alphabets = (
        "abcXYZ",
        "0123456789",
        "   \t\n\r",
        "'s't'LL",
        '.,;!?-_/\\"()[]{}<>|',
        "éüñßçØ",
        "дЖя",
        "中文字",
        "١٢٣",
        "½Ⅷ²",
        "🙂🇩",
    )
    return ["".join(rng.choice(rng.choice(alphabets)) for _ in range(rng.randint(1, 40))) for _ in range(count)]


def steps(pre_tokenizer: tuple[str, ...]) -> list[dict[str, Any]]:
    """As tokenizer.json writes them."""
    written: list[dict[str, Any]] = []
    for step in pre_tokenizer[:-1]:
        if step == "single digits":
            written.append({"type": "Digits", "individual_digits": True})
        elif step != "gpt-2's pattern":
            written.append({"type": "Split", "pattern": {"Regex": step}, "behavior": "Isolated", "invert": False})
    uses_regex = "gpt-2's pattern" in pre_tokenizer
    return [*written, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": uses_regex}]


@pytest.mark.parametrize("key", PRE_TOKENIZERS, ids=PRE_TOKENIZERS.values())
def test_llama_cpp_splits_texts_as_the_tokenizer_does(key: tuple[tuple[str, ...], bool], tmp_path: Path) -> None:
    model = shutil.copytree(BUNDLED["target"], tmp_path / "model")
    whole = json.loads((model / "tokenizer.json").read_text("utf-8"))
    whole["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps(key[0])}
    whole["model"]["ignore_merges"] = key[1]
    (model / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    assert export_gguf(str(model), tmp_path / "t.gguf").pre_tokenizer == PRE_TOKENIZERS[key]
    llama, tokenizer = load(tmp_path / "t.gguf", vocab_only=True), load_tokenizer(model)
    assert tokenizer is not None
    for text in [*TEXTS, *random_texts(300)]:
        assert llama.tokenize(text.encode(), special=True) == tokenizer(text)["input_ids"], repr(text)


def test_what_begins_texts_is_put_before_them_once(tmp_path: Path) -> None:
    model = shutil.copytree(BUNDLED["target"], tmp_path / "model")
    whole = json.loads((model / "tokenizer.json").read_text("utf-8"))
    whole["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}})
    whole["post_processor"]["special_tokens"] = {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}
    (model / "tokenizer.json").write_text(json.dumps(whole), "utf-8")
    settings = json.loads((model / "tokenizer_config.json").read_text("utf-8"))
    (model / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "<|im_start|>"}), "utf-8")
    export_gguf(str(model), tmp_path / "t.gguf")
    llama = load(tmp_path / "t.gguf", vocab_only=True)
    tokens = llama.tokenize(b"Hello", special=True)
    assert tokens[0] == llama.token_bos() == 1
    assert tokens == AutoTokenizer.from_pretrained(model)("Hello")["input_ids"]


@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.endswith("yarn")])  # which is refused
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    kind: Callable[..., PreTrainedModel]
    kind, config = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = type(config).from_dict(config.to_dict() | {"vocab_size": 8192})
        model = kind(config).eval()
        for name, weight in model.named_parameters():  # norms and biases would be ones and zeros
            if weight.dim() == 1:
                torch.nn.init.normal_(weight, mean=float("norm" in name), std=0.2)
    model.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED["target"] / name, tmp_path / "model")
    export_gguf(str(tmp_path / "model"), tmp_path / "t.gguf", dtype="float32")
    tokens = torch.randint(0, 8192, (100,), generator=torch.Generator().manual_seed(1))
    llama = load(tmp_path / "t.gguf", logits_all=True, type_k=0, type_v=0)  # keys and values in float32
    llama.eval(tokens.tolist())
    with torch.inference_mode():
        expected = model(tokens[None]).logits[0]
    torch.testing.assert_close(torch.from_numpy(llama.scores[: len(tokens)].copy()), expected, atol=2e-4, rtol=2e-3)


def test_answers_in_float32_are_token_for_token_ours(tmp_path: Path) -> None:
    """On the bundled prompts, with the keys and values in float32 too."""
    export_gguf("bundled", tmp_path / "t.gguf", dtype="float32")
    llama = load(tmp_path / "t.gguf", type_k=0, type_v=0)
    config = EngineConfig(
        dtype="float32", compile="off", num_threads=1, max_num_seqs=1, draft_policy="fixed", prefix_cache_tokens=0
    )
    engine = load_engine(config)
    assert engine.tokenizer is not None
    prompts = load_prompts(BUNDLED_PROMPTS, engine.tokenizer, count=8, max_tokens=400, seed=3)
    for prompt in prompts:
        llama.reset()
        text = engine.tokenizer.decode(list(prompt.token_ids))
        assert llama.tokenize(text.encode(), special=True) == list(prompt.token_ids)
        written: list[int] = []
        for token in llama.generate(list(prompt.token_ids), temp=0.0, repeat_penalty=1.0):
            written.append(token)
            if token == llama.token_eos() or len(written) == 48:
                break
        assert tuple(written) == decode(engine, prompt, SamplingParams(48, temperature=0.0)).token_ids
