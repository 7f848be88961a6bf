"""Where `moaserve chat` gets its answers: a running server, or an engine in this very process."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import httpx
from pydantic import ValidationError

from app import chat
from app.deps import Serving
from app.errors import ApiError
from app.generation import places_for, requests_for, run
from app.schemas import ChatCompletionRequest
from app.settings import Settings
from app.thinking import thinking
from app.thoughts import Thought
from app.tools.parsing import CallDelta
from app.tools.pieces import Pieces
from speculative.errors import EngineError

if TYPE_CHECKING:
    from speculative.async_engine import AsyncEngine


class ChatError(Exception):
    """An answer could not be had; the message is for the user."""


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """What an answer took: τ, decode speed and length."""

    acceptance_length: float
    tokens_per_second: float
    tokens: int


Told = str | Thought | AnswerStats


class Backend(Protocol):
    """Answers conversations."""

    def answer(self, body: dict[str, Any]) -> AsyncGenerator[Told, None]:
        """Thoughts and the answer's text as they come, then its stats; ``body`` is that of a chat completion request."""

    async def close(self) -> None:
        """Let go of everything."""


class ServerBackend:
    """A running server, ours or another that speaks OpenAI's API."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        base = url.rstrip("/")
        self._url = (base if base.endswith("/v1") else base + "/v1") + "/chat/completions"
        # An answer may take its time; only connecting must be quick.
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=5))

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[Told, None]:
        """The server's answer, streamed."""
        body = body | {"stream": True, "stream_options": {"include_usage": True}}
        if not all(value.isascii() for value in self._headers.values()):
            raise ChatError("--api-key: a key has ASCII characters alone")
        try:
            if (port := httpx.URL(self._url).port or 0) > 65535:
                raise ChatError(f"no answer from {self._url}: there is no port {port}, the last is 65535")
            async with self._client.stream("POST", self._url, json=body, headers=self._headers) as response:
                if response.is_error:
                    await response.aread()
                    raise ChatError(_error_message(response))
                async for line in response.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        for piece in _pieces(json.loads(line.removeprefix("data: "))):
                            yield piece
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ChatError(f"no answer from {self._url}: {error}") from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()


def _error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {response.status_code} {response.reason_phrase}"


def _pieces(chunk: dict[str, Any]) -> list[Told]:
    if "error" in chunk:
        raise ChatError(str(chunk["error"]["message"]))
    texts: list[Told] = []
    for choice in chunk["choices"]:
        delta = choice["delta"]
        if thought := delta.get("reasoning_content") or delta.get("reasoning"):  # the latter is vLLM's
            texts.append(Thought(thought))
        texts.append(delta.get("content") or "")
    if usage := chunk.get("usage"):
        metrics = (chunk.get("metrics") or {}).get("speculative_decoding", {})
        texts.append(
            AnswerStats(
                metrics.get("mean_acceptance_length", 1.0), metrics.get("tokens_per_second", 0.0), usage["completion_tokens"]
            )
        )
    return texts


async def local_backend(settings: Settings) -> LocalBackend:
    """An engine in this process, its model loaded."""
    from speculative.async_engine import AsyncEngine  # brings torch along, which a server's client can do without

    engine = AsyncEngine.from_config(settings.engine_config())
    await engine.start()
    try:
        await engine.wait_ready()
    except EngineError as error:
        raise ChatError(f"cannot load {settings.model}: {error}") from error
    return LocalBackend(settings, engine)


class LocalBackend:
    """An engine in this process, reached by the functions that the HTTP routes use."""

    def __init__(self, settings: Settings, engine: AsyncEngine) -> None:
        self._serving = Serving.of(settings, engine)
        self._engine = engine

    async def answer(self, body: dict[str, Any]) -> AsyncGenerator[Told, None]:
        """The engine's answer, as it comes."""
        try:
            request = ChatCompletionRequest.model_validate(body)
            variables = self._serving.template_variables
            prompt = chat.prompt_tokens(self._serving.tokenizer, request.messages, request, variables=variables)
            thoughts = thinking(self._serving.settings.reasoning_format, self._serving.tokenizer, prompt, None)
            pieces = Pieces.of(None, thoughts)
            requests = requests_for(request, [prompt], self._serving, uuid.uuid4().hex)
            places = places_for(self._serving, requests)
            async with aclosing(run(self._serving, requests, places)) as outputs:
                async for _, output in outputs:
                    for piece in pieces.feed(output.text_delta, final=output.finish_reason is not None):
                        if not isinstance(piece, CallDelta):
                            yield piece
                    if output.finish_reason is not None:
                        stats = output.stats
                        yield AnswerStats(stats.mean_acceptance_length, stats.tokens_per_second, stats.completion_tokens)
        except (ApiError, EngineError, ValidationError) as error:
            raise ChatError(str(error)) from error

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.stop()
        await self._serving.stores.close()
