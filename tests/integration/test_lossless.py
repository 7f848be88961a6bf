"""The promise, over HTTP, with the bundled pair in float32."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from benchmarks.decoding import load_transformers
from benchmarks.lossless import compare, reference_texts, server_texts
from benchmarks.prompts import BUNDLED_PROMPTS, Prompt, load_prompts
from models.loader import BUNDLED, load_tokenizer
from tests.integration.conftest import Server

pytestmark = pytest.mark.integration

MAX_TOKENS = 128


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    return load_prompts(BUNDLED_PROMPTS, tokenizer, count=64, max_tokens=1024, seed=0)


@pytest.fixture(scope="module")
def expected(prompts: list[Prompt]) -> list[str]:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    return reference_texts(load_transformers("bundled", "float32", "cpu"), tokenizer, prompts, MAX_TOKENS, lambda: None)


def texts(server: Server, prompts: Sequence[Prompt], concurrency: int, **parameters: object) -> list[str]:
    return asyncio.run(server_texts(server.base_url, prompts, concurrency=concurrency, max_tokens=MAX_TOKENS, **parameters))


@pytest.mark.parametrize("concurrency", [1, 8])
def test_greedy_text_is_that_of_transformers(server: Server, prompts, expected, concurrency: int) -> None:
    assert len(prompts) == 64
    assert compare("greedy", texts(server, prompts, concurrency, temperature=0), expected).different == ()


@pytest.mark.parametrize("sampling", [{"temperature": 0.3}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.3, "top_k": 40}])
def test_seeded_text_is_the_same_with_speculation_on_and_off(server: Server, prompts, sampling: dict[str, float]) -> None:
    some = prompts[::4]
    plain = texts(server, some, 4, seed=11, speculative=False, **sampling)
    assert len(set(plain)) > len(some) / 2
    for concurrency in (1, 8):
        assert texts(server, some, concurrency, seed=11, **sampling) == plain


def test_32_streams_at_once_equal_one_at_a_time(server: Server, prompts) -> None:
    some = prompts[:32]
    assert texts(server, some, 32, temperature=0) == texts(server, some, 1, temperature=0)
