"""The requests behind one HTTP request: run together, recorded, and all aborted when nobody listens any more."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import anyio
from fastapi import Request as HttpRequest

from app.admission import Places
from app.deps import Serving
from app.errors import ClientGoneError, RequestTimeoutError
from app.responses import FinishReason
from app.revising import Outputs, revised
from app.sampling import sampling_params
from app.schemas import SamplingRequest
from speculative.errors import SHUTTING_DOWN, EngineNotReadyError, EngineStepError
from speculative.request import Grammar, Request, RequestOutput, RequestStats, TokenLogprob

T = TypeVar("T")

BEGUN_AT_ONCE: Final = 32
"""Requests of one HTTP request that begin before others have their turn on the event loop."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer."""

    text: str
    finish_reason: FinishReason
    stats: RequestStats
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    outputs: Sequence[RequestOutput] = ()

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; answers of a prompt are ranked by it."""
        return sum(each.logprob for each in self.logprobs) / max(1, len(self.logprobs))


def requests_for(
    body: SamplingRequest,
    prompts: Sequence[Sequence[int]],
    serving: Serving,
    response_id: str,
    default_limit: int | None = None,
    prediction: Sequence[int] = (),
    grammar: Grammar | None = None,
    continues: bool = False,
) -> list[Request]:
    """A validated engine request for each prompt and each of its candidates, in the order of OpenAI's choice indices.

    ``default_limit`` is the number of tokens to generate where the caller sets none; it gives way to the context's end.
    ``prediction`` is what the caller expects to come, ``grammar`` what must come where that is not the body's own constraint. Where
    it ``continues`` the text goes on in the middle of the prompt's.
    """
    serving.admission.check(len(prompts) * body.candidates)  # before any of them is made: there may be very many
    info = serving.model_info()
    requests: list[Request] = []
    for prompt in prompts:
        limit = body.token_limit
        if limit is None and default_limit is not None:
            limit = max(1, min(default_limit, info.max_model_len - len(prompt)))
        token_ids = tuple(prompt)
        for choice in range(body.candidates):
            params = sampling_params(body, info.default_sampling, limit, choice)
            if grammar is not None:
                params = replace(params, grammar=grammar)
            requests.append(
                Request(
                    f"{response_id}-{len(requests)}",
                    token_ids,
                    params,
                    body.priority or 0,
                    tuple(prediction),
                    body.cache_salt or "",
                    revisable=True,
                    continues=continues,
                    adaptive=body.speculative is None,
                    session=body.prompt_cache_key or "",
                )
            )
        serving.engine.validate(requests[-1])  # the choices of a prompt differ in nothing but their seed
    return requests


async def within(seconds: float, outputs: Outputs) -> Outputs:
    """The same outputs; after ``seconds`` they end with RequestTimeoutError, and what still runs is aborted."""
    deadline = time.monotonic() + seconds
    async with aclosing(outputs):
        while True:
            try:
                with anyio.fail_after(deadline - time.monotonic()):  # `wait_for` makes a task for each output
                    output = await anext(outputs)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise RequestTimeoutError.of_answer(seconds) from None
            yield output


def places_for(serving: Serving, requests: Sequence[Request], owner: str = "") -> Places:
    """Places in the queue, to be released by the caller: outputs that nobody begins to read give nothing back."""
    return serving.admission.take([len(request.given_token_ids) for request in requests], owner)


async def run(serving: Serving, requests: Sequence[Request], places: Places) -> Outputs:
    """All requests' outputs as they come, each with its request's index; closing this aborts whatever still runs."""
    if serving.conversations is not None:
        await serving.conversations.restore(requests)
    if len(requests) == 1:
        async with aclosing(_run_one(serving, requests[0], places, 0)) as outputs:
            async for output in outputs:
                yield 0, output
        return

    arrived: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue()

    async def forward(index: int, request: Request) -> None:
        try:
            async with aclosing(_run_one(serving, request, places, index)) as outputs:
                async for output in outputs:
                    arrived.put_nowait((index, output))
            arrived.put_nowait((index, None))
        except Exception as error:
            arrived.put_nowait((index, error))

    tasks: list[asyncio.Task[None]] = []
    try:
        for index, request in enumerate(requests):
            tasks.append(asyncio.create_task(forward(index, request)))
            if len(tasks) % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)
        running = len(tasks)
        while running:
            index, event = await arrived.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                running -= 1
            else:
                yield index, event
    finally:
        for task in tasks:
            task.cancel()
        with anyio.CancelScope(shield=True):  # a disconnect cancels this very task over and over
            await asyncio.gather(*tasks, return_exceptions=True)


async def _run_one(serving: Serving, request: Request, places: Places, index: int) -> AsyncGenerator[RequestOutput, None]:
    model_name = serving.model_name()
    recorder = serving.metrics.request(model_name)
    failure: Exception | None = None
    generated: list[int] = []
    try:
        async with aclosing(serving.engine.generate(request)) as outputs:
            async for output in outputs:
                places.read(index)
                recorder.output(output)
                if serving.conversations is not None:
                    generated += output.new_token_ids
                if output.finish_reason == "error":
                    raise EngineStepError(f"request {request.request_id} failed in the engine")
                if output.finish_reason == "abort":
                    raise EngineNotReadyError(SHUTTING_DOWN)
                yield output
    except Exception as error:
        failure = error
        recorder.fail()
        raise
    finally:
        places.end(index)
        recorder.end()
        if serving.conversations is not None:
            serving.conversations.keep(request, generated)
        if serving.tracing is not None:
            serving.tracing.request(request, model_name, recorder, failure)


async def collect(outputs: Outputs, count: int) -> list[Choice]:
    """The finished choices, in order."""
    gathered: list[list[RequestOutput]] = [[] for _ in range(count)]
    async with aclosing(outputs):
        async for index, output in outputs:
            gathered[index].append(output)
    return [_choice(series) for series in gathered]


def best(choices: Sequence[Choice], n: int, candidates: int) -> list[Choice]:
    """Of each prompt's ``candidates`` the ``n`` likeliest by token, as OpenAI has it, the likeliest first."""
    if n == candidates:
        return list(choices)
    prompts = [choices[start : start + candidates] for start in range(0, len(choices), candidates)]
    return [choice for some in prompts for choice in sorted(some, key=lambda one: one.mean_logprob, reverse=True)[:n]]


def finish_reason(output: RequestOutput) -> FinishReason:
    """How a request ended, as OpenAI names it."""
    assert output.finish_reason == "stop" or output.finish_reason == "length"  # `run` raises for the others
    return output.finish_reason


def _choice(outputs: Sequence[RequestOutput]) -> Choice:
    outputs = revised(outputs)
    if not outputs or outputs[-1].finish_reason is None:
        raise EngineStepError("a request ended without a finish reason")
    return Choice(
        "".join(output.text_delta for output in outputs),
        finish_reason(outputs[-1]),
        outputs[-1].stats,
        tuple(each for output in outputs for each in output.logprobs or ()),
        outputs[0].prompt_logprobs or (),
        outputs,
    )


async def unless_disconnected(http: HttpRequest, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client goes away; then ClientGoneError is raised."""
    task = asyncio.ensure_future(work)

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await task
    except asyncio.CancelledError:
        if watcher.done() and not watcher.cancelled():
            raise ClientGoneError from None
        task.cancel()  # the server itself gives up on this request
        raise
    finally:
        watcher.cancel()
