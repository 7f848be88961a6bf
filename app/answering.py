"""The way that chat and text completions share: check, tokenize, generate, answer."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread
from fastapi import Request as HttpRequest
from fastapi import Response
from pydantic import BaseModel

from app import streaming
from app.deps import Serving, owner_of
from app.errors import InvalidParameterError, NotFoundError, RequestTimeoutError
from app.generation import Choice, best, collect, places_for, run, unless_disconnected, within
from app.revising import Outputs, verified
from app.schemas import ChoicesRequest
from app.structured import Constraint
from app.thinking import Thinking, counted
from app.usage import ResponseMetrics, Usage
from speculative.errors import InvalidRequestError
from speculative.request import Grammar, Request

T = TypeVar("T")


class Writer(streaming.ChunkWriter, Protocol):
    """How one API words its answers, streaming or whole."""

    def whole(self, choices: Sequence[Choice], usage: Usage, metrics: ResponseMetrics) -> BaseModel:
        """The answer to a request that does not stream."""


def check_model(serving: Serving, name: str | None) -> str:
    """What answers call the served model; a name that is none of its own is refused."""
    serving.model_info()
    names = serving.model_names()
    if name is not None and name not in names:
        served = ", ".join(f"'{each}'" for each in names)
        message = f"The model '{name}' does not exist; this server serves {served}."
        raise NotFoundError(message, code="model_not_found", param="model")
    return names[0]


async def tokenize(serving: Serving, work: Callable[[], T]) -> T:
    """Run ``work``, which tokenizes, off the event loop; one at a time, as tokenizers are not made for several threads."""
    return await anyio.to_thread.run_sync(work, limiter=serving.tokenizing)


async def off_loop(much: bool, work: Callable[[], T]) -> T:
    """What ``work`` returns; in a thread where it is ``much``."""
    return await anyio.to_thread.run_sync(work) if much else work()


async def prepared(http: HttpRequest, serving: Serving, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` makes of a request before it is generated from; it leaves the queue with its client, or when its time is up."""
    limit = serving.settings.request_timeout
    try:
        with anyio.fail_after(limit):
            return await unless_disconnected(http, work)
    except TimeoutError:
        raise RequestTimeoutError.of_answer(limit or 0.0) from None


async def compile_grammar(serving: Serving, grammar: Grammar) -> None:
    """Compile a grammar off the event loop; raises InvalidRequestError for one that cannot be followed."""
    await anyio.to_thread.run_sync(serving.engine.check_grammar, grammar, limiter=serving.compiling)


async def check_grammar(serving: Serving, constraint: Constraint | None) -> None:
    """Compile what an answer must look like, off the event loop; raises InvalidParameterError for what cannot be followed."""
    if constraint is None:
        return
    try:
        await compile_grammar(serving, constraint.grammar)
    except InvalidRequestError as error:
        raise InvalidParameterError(f"Invalid value for '{constraint.param}': {error}.", param=constraint.param) from error


async def check_forms(
    serving: Serving, form: Constraint | None, tools: Sequence[Constraint], thoughts: Thinking | None
) -> Grammar | None:
    """Compile what an answer must look like by the caller's ``form`` and by its ``tools``, as `Calling.constraints` has it.

    Returns the grammar of all that is written, ``thoughts`` included; None where that may be anything.
    """
    for constraint in (form, *tools):
        await check_grammar(serving, constraint)
    grammar = tools[-1].grammar if tools else None
    if grammar is None and form is not None:
        grammar = form.grammar
    if thoughts is None or grammar is None:
        return grammar
    whole = thoughts.before(grammar)
    await compile_grammar(serving, whole)
    return whole


def told(outputs: Outputs, thoughts: Thinking | None, *, final: bool) -> Outputs:
    """The same outputs, with their thoughts counted; nothing is taken back of ``final`` ones, nor where there are thoughts."""
    if thoughts is not None:
        return counted(verified(outputs), thoughts)
    return verified(outputs) if final else outputs


def limited(serving: Serving, outputs: Outputs) -> Outputs:
    """The same outputs, in the time that this server allows."""
    limit = serving.settings.request_timeout
    return outputs if limit is None else within(limit, outputs)


async def answer(
    http: HttpRequest,
    serving: Serving,
    body: ChoicesRequest,
    requests: Sequence[Request],
    writer: Writer,
    thoughts: Thinking | None = None,
) -> Response:
    """Generate, and answer as the caller asked: a stream or one document."""
    places = places_for(serving, requests, owner_of(http))
    # Forms are for programs, few of which can take anything back.
    outputs = told(limited(serving, run(serving, requests, places)), thoughts, final=bool(body.stream and body.constraint))
    if body.stream:
        return streaming.stream(outputs, writer, requests, body, places.release, serving.metrics.error)
    try:
        choices = await unless_disconnected(http, collect(outputs, len(requests)))
    finally:
        places.release()
    stats = [choice.stats for choice in choices]
    chosen = best(choices, body.n or 1, body.candidates)

    def document() -> str:
        whole = writer.whole(chosen, Usage.of(stats, body.candidates), ResponseMetrics.of(stats))
        return whole.model_dump_json(exclude_unset=True)

    much = body.logprob_count is not None or body.prompt_logprob_count is not None  # a prompt's take longest of all
    return Response(await off_loop(much, document), media_type="application/json")
