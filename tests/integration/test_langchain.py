"""LangChain's own integration tests of chat models, through its OpenAI client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from langchain_core.exceptions import ContextOverflowError, OutputParserException
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from pydantic import ValidationError

from tests.integration.conftest import Server, start_server, stop_server
from tests.integration.knowing import JOKE

pytestmark = [
    pytest.mark.integration,
    # LangChain dumps the SDK's parsed answers with fields that the SDK's models do not declare.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    # With such schemas it falls back to tools, and says so.
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning"),
]
# The suite's tests are coroutines of one loop each, and these clients keep nothing for the next one.
NOT_KEPT = httpx.Limits(max_keepalive_connections=0)
# Not strict: a better model may pass one of them by itself.
# An error of the server's is none of these exceptions, and fails the test.
TOO_SMALL = pytest.mark.xfail(
    raises=(AssertionError, ValidationError, OutputParserException),
    reason="what the bundled model, with its 13 M parameters, says here is well formed, and wrong or endless",
)


@pytest.fixture(scope="module")
def knowing_server() -> Iterator[Server]:
    """A server as any other whose target knows what LangChain asks: see ``knowing``."""
    server = start_server("--dtype", "float32", module="tests.integration.knowing")
    yield server
    stop_server(server)


class Suite(ChatModelIntegrationTests):
    """What it skips are images, audio and PDFs, Anthropic's wording, and recordings of hosted services."""

    url = ""
    model_override_value = "concierge"

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "concierge",
            "base_url": self.url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 400,
            "max_retries": 0,
            "stream_usage": True,
            "http_client": httpx.Client(limits=NOT_KEPT),
            "http_async_client": httpx.AsyncClient(limits=NOT_KEPT),
        }

    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestTargetThatKnows(Suite):
    """The whole suite."""

    @pytest.fixture(autouse=True)
    def _server(self, knowing_server: Server) -> None:
        type(self).url = knowing_server.base_url


class TestBundledTarget(Suite):
    """The same with nothing but what is in the box."""

    @pytest.fixture(autouse=True)
    def _server(self, server: Server) -> None:
        type(self).url = server.base_url

    @TOO_SMALL
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)

    @TOO_SMALL
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @TOO_SMALL
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @TOO_SMALL
    def test_structured_output_pydantic_2_v1(self, model: BaseChatModel) -> None:
        super().test_structured_output_pydantic_2_v1(model)

    @TOO_SMALL
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @TOO_SMALL
    def test_unicode_tool_call_integration(
        self, model: BaseChatModel, *, tool_choice: str | None = None, force_tool_call: bool = True
    ) -> None:
        super().test_unicode_tool_call_integration(model, tool_choice=tool_choice, force_tool_call=force_tool_call)


def test_a_prompt_that_is_too_long_has_its_own_class(server: Server) -> None:
    model = ChatOpenAI(model="concierge", base_url=server.base_url, api_key="none", max_retries=0)  # type: ignore[arg-type]
    with pytest.raises(ContextOverflowError):
        model.invoke("word " * 3000)


def test_the_target_that_knows_is_drafted_for_and_says_the_same_without(knowing_server: Server) -> None:
    question = {
        "messages": [{"role": "user", "content": "Tell me a joke about cats."}],
        "response_format": {"type": "json_object"},
        "temperature": 0,
    }
    before = knowing_server.metric("moaserve_spec_decode_num_accepted_tokens_total")
    drafted, plain = (
        httpx.post(f"{knowing_server.base_url}/chat/completions", json=question | {"speculative": speculative}, timeout=60).json()
        for speculative in (True, False)
    )
    for reply in (drafted, plain):
        assert reply["choices"][0]["message"]["content"] == json.dumps(JOKE)
    accepted = drafted["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    assert accepted > 0
    assert knowing_server.metric("moaserve_spec_decode_num_accepted_tokens_total") == before + accepted
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0
