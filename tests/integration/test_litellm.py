"""LiteLLM, which many programs put in front of servers such as this one."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch its price list from the internet when imported

import litellm

from tests.integration.conftest import Server

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:Accessing the .model_:pydantic.warnings.PydanticDeprecatedSince211"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. .*(socket|event loop|_Selector|BaseEventLoop)"),
]

MESSAGES = [{"role": "user", "content": "I would like a table for two in San José. 🎉"}]


@pytest.fixture(autouse=True)
def _its_own_litter() -> Iterator[None]:
    """It leaves event loops and their sockets open; they are to be found here, and not amid whatever test comes later."""
    yield
    gc.collect()


@pytest.fixture
def given(server: Server) -> dict[str, Any]:
    return {
        "model": "openai/concierge",
        "api_base": server.base_url,
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 40,
    }


def test_an_answer_and_its_stream(given: dict[str, Any]) -> None:
    whole = litellm.completion(**given)
    text = whole.choices[0].message.content
    assert text
    assert 0 < whole.usage.completion_tokens <= 40
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    chunks = list(litellm.completion(**given, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    rebuilt = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert rebuilt.choices[0].message.content == text
    # LiteLLM's own rebuilding says "stop" whatever came.
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [reason for reason in reasons if reason] == [whole.choices[0].finish_reason]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert rebuilt.usage[name] == whole.usage[name], name


def test_an_answer_goes_back_as_it_came(given: dict[str, Any]) -> None:
    said = litellm.completion(**given).choices[0].message
    for message in (said, said.model_dump()):
        again = litellm.completion(**given | {"messages": [*MESSAGES, message, *MESSAGES]})
        assert again.choices[0].message.content


def test_parameters_arrive(given: dict[str, Any]) -> None:
    short = litellm.completion(**given | {"max_tokens": 3}, n=2, seed=7, logprobs=True, top_logprobs=2, stop=["\n"], user="me")
    assert [choice.finish_reason for choice in short.choices] == ["length", "length"]
    told = short.choices[0].logprobs.content
    assert [len(each.top_logprobs) for each in told] == [2, 2, 2]


def test_text_completions(server: Server) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/concierge",
        prompt="def add(a, b):",
        api_base=server.base_url,
        api_key="none",
        max_tokens=8,
        temperature=0,  # drawn at the default 1, a text may end before its eighth token
    )
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 8


def test_async_streams_at_the_same_time(given: dict[str, Any]) -> None:
    async def text() -> str:
        stream = await litellm.acompletion(**given, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def texts() -> list[str]:
        return await asyncio.gather(*(text() for _ in range(4)))

    assert asyncio.run(texts()) == [litellm.completion(**given).choices[0].message.content] * 4


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"temperature": 7}, litellm.BadRequestError),
        ({"model": "openai/gpt-99"}, litellm.NotFoundError),
        ({"max_tokens": 99_999}, litellm.ContextWindowExceededError),
        ({"extra_body": {"no_such_thing": 1}}, litellm.BadRequestError),
    ],
    ids=str,
)
def test_errors_get_their_classes(given: dict[str, Any], wrong: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        litellm.completion(**given | wrong)
