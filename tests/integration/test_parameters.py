"""Parameters over HTTP, with the bundled pair in float32: what transformers says, and the same with speculation on and off."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.decoding import load_transformers
from benchmarks.lossless import server_texts
from benchmarks.prompts import BUNDLED_PROMPTS, Prompt, load_prompts
from models.loader import BUNDLED, load_tokenizer, resolve
from tests.integration.conftest import Server

pytestmark = pytest.mark.integration

PARAMETERS: dict[str, dict[str, Any]] = {
    "penalties": {"frequency_penalty": 0.6, "presence_penalty": 0.4},
    "repetition": {"repetition_penalty": 1.2},
    "bias": {"logit_bias": {"13": -100, "20": 1.5}},
    "min tokens": {"min_tokens": 30, "stop": ["."]},
    "ends": {"ignore_eos": True, "stop_token_ids": [300, 301]},
}
SAMPLING = [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.95, "seed": 3}]
MESSAGES = [{"role": "user", "content": "I would like a table for two in San José. 🎉"}]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return load_transformers("bundled", "float32", "cpu")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = load_tokenizer(BUNDLED["target"])
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    return load_prompts(BUNDLED_PROMPTS, tokenizer, count=12, max_tokens=512, seed=1)


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("name", PARAMETERS)
def test_text_is_the_same_with_speculation_on_and_off(
    server: Server, prompts: list[Prompt], name: str, sampling: dict[str, Any]
) -> None:
    def texts(concurrency: int, **extra: Any) -> list[str]:
        given = {"max_tokens": 60, **sampling, **PARAMETERS[name], **extra}
        return asyncio.run(server_texts(server.base_url, prompts, concurrency=concurrency, **given))

    plain = texts(len(prompts), speculative=False)
    assert len(set(plain)) > len(prompts) / 2
    assert texts(1) == plain == texts(8)


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("temperature", [0, 1])
def test_log_probabilities_of_an_answer_are_the_models(
    server: Server, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, speculative: bool, temperature: float
) -> None:
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    given: dict[str, Any] = {"model": "concierge", "messages": MESSAGES, "temperature": temperature, "seed": 2, "max_tokens": 40}
    given |= {"logprobs": True, "top_logprobs": 5, "extra_body": {"speculative": speculative}}
    whole = client.chat.completions.create(**given)
    assert whole.choices[0].logprobs is not None and whole.usage is not None
    told = whole.choices[0].logprobs.content
    assert told is not None and len(told) == whole.usage.completion_tokens

    ended = whole.choices[0].finish_reason == "stop"
    said = b"".join(bytes(each.bytes or ()) for each in (told[:-1] if ended else told))
    assert said.decode() == whole.choices[0].message.content
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    answer = tokenizer.encode(said.decode(), add_special_tokens=False)
    with torch.inference_mode():
        rows = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 :].log_softmax(-1)
    for each, row, token in zip(told, rows, answer, strict=False):
        assert each.logprob == pytest.approx(float(row[token]), abs=1e-3)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(row.topk(5).values.tolist(), abs=1e-3)

    streamed = list(client.chat.completions.create(**given, stream=True))
    pieces = [piece for chunk in streamed if (logprobs := chunk.choices[0].logprobs) for piece in logprobs.content or ()]
    # Sums are rounded otherwise where more of the prompt was known already.
    assert [each.token for each in pieces] == [each.token for each in told]
    assert [each.logprob for each in pieces] == pytest.approx([each.logprob for each in told], abs=1e-3)


def test_lm_eval_scores_prompts_as_transformers_does(
    server: Server, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    pairs = [
        ("def add(a, b):", "\n    return a + b"),
        ("There are 3 boxes with 4 apples each.", " 3 * 4 = 12"),
        ("User: book a table in San José", " for two, 日本語 please"),
    ]
    client = LocalCompletionsAPI(
        base_url=f"{server.base_url}/completions", model="concierge", tokenizer=str(resolve(BUNDLED["target"])), num_concurrent=1
    )
    scored = client.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs], disable_tqdm=True)
    for (context, continuation), (ours, greedy) in zip(pairs, scored, strict=True):
        before = tokenizer.encode(context)
        ids = before + tokenizer.encode(context + continuation)[len(before) :]  # as lm-eval cuts them
        with torch.inference_mode():
            rows = model(torch.tensor([ids])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(ids[len(before) :])
        assert ours == pytest.approx(float(rows.gather(1, wanted.unsqueeze(1)).sum()), abs=1e-3)
        assert greedy == bool((rows.argmax(-1) == wanted).all())


def test_lm_eval_needs_no_tokenizer_of_its_own(server: Server, tokenizer: PreTrainedTokenizerBase) -> None:
    client = LocalCompletionsAPI(base_url=f"{server.base_url}/completions", model="concierge", tokenizer_backend="remote")
    text = "User: book a table in San José"
    assert client.tok_encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert client.eot_token_id == tokenizer.eos_token_id
    assert client.tokenizer.tokenizer_info["chat_template"] == tokenizer.chat_template


def test_a_prediction_takes_a_quarter_of_the_passes(server: Server) -> None:
    client = openai.OpenAI(base_url=server.base_url, api_key="none")
    messages = [{"role": "user", "content": "Write a Python function that reads a file and counts the words in it."}]
    extra = {"min_tokens": 400}
    # Sampled: greedily such a small model soon repeats itself, and its text is foretold without a prediction.
    sampling = {"temperature": 1, "seed": 7}
    given: dict[str, Any] = {"model": "concierge", "messages": messages, "max_tokens": 400, "extra_body": extra, **sampling}

    alone = client.chat.completions.create(**given)
    text = alone.choices[0].message.content or ""
    words = text.split(" ")
    # As a file before its edit: some words are others, some are missing, some are too many.
    edited = [*words[:60], "something", "else", *words[62:130], *words[135:200], "more", "and", "more", *words[200:]]
    prediction = {"type": "content", "content": " ".join(edited)}
    predicted = client.chat.completions.create(**given, prediction=prediction)
    assert predicted.choices[0].message.content == text
    passes = [one.model_extra["metrics"]["speculative_decoding"]["num_target_calls"] for one in (predicted, alone)]
    assert passes[0] <= passes[1] / 4, passes
    assert predicted.usage is not None and predicted.usage.completion_tokens_details is not None
    details = predicted.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 300 > 30 > details.rejected_prediction_tokens > 0
