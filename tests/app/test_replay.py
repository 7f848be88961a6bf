"""The same tokens, however many come at once: what a stream adds up to does not depend on the steps that they came in."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.app.fakes import events
from tests.app.reassembly import reassembled, without_times
from tests.app.scripted import ScriptedEngine, served, tokens_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
WORDS = "Good morning! Two tables for five, please."
# Several tokens make one of these characters; an emoji with a skin tone is two.
MANY_BYTES = "naïve café – 漢字 🙂 👋🏽 done: ✓"
CODE = "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n"
FUNCTION = {"name": "book_table", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}


def called(arguments: str) -> str:
    return '<tool_call>\n{"name": "book_table", "arguments": ' + arguments + "}\n</tool_call>"


@dataclass(frozen=True)
class Case:
    """A request, what the engine writes for each of its choices, and the texts and reasons that must come out."""

    path: str
    body: dict[str, Any]
    written: tuple[list[int], ...]
    texts: tuple[str, ...]
    reasons: tuple[str, ...] = ("stop",)
    tokens: tuple[int, ...] | None = field(default=None)
    """How many tokens each choice has, the one that ends it included; None: all that are written."""


def chat(**extra: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 200, **extra}


def text(**extra: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "max_tokens": 200, **extra}


def before(stop: str, whole: str) -> int:
    """How many tokens complete ``stop`` in a text."""
    ids = tokens_of(whole)
    decode = ScriptedEngine.tokenizer.decode
    return next(count for count in range(1, len(ids) + 1) if stop in decode(ids[:count]))


CUT = len(tokens_of(MANY_BYTES[: MANY_BYTES.index("🙂")])) + 2  # in the middle of the character
CASES = {
    "chat": Case(CHAT, chat(), (tokens_of(WORDS),), (WORDS,)),
    "completion": Case(TEXT, text(), (tokens_of(CODE),), (CODE,)),
    "characters of several tokens": Case(CHAT, chat(), (tokens_of(MANY_BYTES),), (MANY_BYTES,)),
    "chat log-probabilities": Case(CHAT, chat(logprobs=True, top_logprobs=2), (tokens_of(MANY_BYTES),), (MANY_BYTES,)),
    "completion log-probabilities": Case(TEXT, text(logprobs=2), (tokens_of(MANY_BYTES),), (MANY_BYTES,)),
    "an echo": Case(TEXT, text(echo=True), (tokens_of(WORDS),), ("Hi" + WORDS,)),
    "choices": Case(CHAT, chat(n=2), (tokens_of(WORDS), tokens_of(MANY_BYTES)), (WORDS, MANY_BYTES), ("stop", "stop")),
    "choices of several prompts": Case(
        TEXT,
        text(prompt=["Hi", "Hello"], n=2, logprobs=0),
        tuple(map(tokens_of, (WORDS, MANY_BYTES, CODE, "."))),
        (WORDS, MANY_BYTES, CODE, "."),
        ("stop",) * 4,
    ),
    "a stop string": Case(
        CHAT, chat(stop=" tables for"), (tokens_of(WORDS),), ("Good morning! Two",), tokens=(before(" tables for", WORDS),)
    ),
    "the first of several stop strings": Case(
        TEXT, text(stop=["\n\n\n", "print", "zzz"], logprobs=1), (tokens_of(CODE),), (CODE[: CODE.index("\n\n\n")],),
        tokens=(before("\n\n\n", CODE),),
    ),
    "what only begins like a stop string": Case(CHAT, chat(stop=["morning?", "please.."]), (tokens_of(WORDS),), (WORDS,)),
    "a stop string of odd characters": Case(
        CHAT, chat(stop="字 🙂"), (tokens_of(MANY_BYTES),), ("naïve café – 漢",), tokens=(before("字 🙂", MANY_BYTES),)
    ),
    "a limit": Case(
        CHAT, chat(max_tokens=5, logprobs=True), (tokens_of(WORDS),), (ScriptedEngine.tokenizer.decode(tokens_of(WORDS)[:5]),),
        ("length",), (5,),
    ),
    "a limit within a character": Case(
        CHAT, chat(max_tokens=CUT), (tokens_of(MANY_BYTES),), (MANY_BYTES[: MANY_BYTES.index("🙂")] + "\ufffd",),
        ("length",), (CUT,),
    ),
    "a stop token": Case(
        CHAT, chat(stop_token_ids=[tokens_of(WORDS)[4]]), (tokens_of(WORDS),),
        (ScriptedEngine.tokenizer.decode(tokens_of(WORDS)[:4]),), tokens=(5,),
    ),
    "a call": Case(
        CHAT, chat(**TOOLS), (tokens_of(called('{"city": "San José 🙂", "n": [1, {"a": "}"}]}')),), ("",), ("tool_calls",),
    ),
    "calls after a text, with log-probabilities": Case(
        CHAT, chat(**TOOLS, logprobs=True, top_logprobs=1),
        (tokens_of("One moment – 🙂.\n" + called('{"city": "</tool_call>"}') + "\n" + called("{}")),),
        ("One moment – 🙂.",), ("tool_calls",),
    ),
    "what only begins like a call": Case(
        CHAT, chat(**TOOLS, n=2), (tokens_of("<tool_call>\n{nothing}"), tokens_of("a <tool_"),),
        ("<tool_call>\n{nothing}", "a <tool_"), ("stop", "stop"),
    ),
    "a call that a limit cuts off": Case(
        CHAT, chat(**TOOLS, max_tokens=len(tokens_of(called('{"city": "San')[:-14]))),
        (tokens_of(called('{"city": "San José"}')),), ("",), ("length",), (len(tokens_of(called('{"city": "San')[:-14])),),
    ),
    "nothing": Case(CHAT, chat(), ([],), ("",)),
}  # fmt: skip
STEPS = (1, 2, 3, 5, 8)


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_adds_up_to_the_whole_answer_whatever_its_steps(name: str) -> None:
    case = CASES[name]
    counts = case.tokens or tuple(len(written) + 1 for written in case.written)
    answers = []
    for steps in STEPS:
        async with served(ScriptedEngine(case.written, steps)) as (client, _):
            whole = without_times((await client.post(case.path, json=case.body)).json())
        options = {"stream": True, "stream_options": {"include_usage": True}}
        async with served(ScriptedEngine(case.written, steps)) as (client, _):
            chunks = events(await client.post(case.path, json=case.body | options))
        assert reassembled(chunks) == whole, steps
        answers.append(whole)
        assert tuple(_text(choice) for choice in whole["choices"]) == case.texts
        assert tuple(choice["finish_reason"] for choice in whole["choices"]) == case.reasons
        assert whole["usage"]["completion_tokens"] == sum(counts)
        for choice, count in zip(whole["choices"], counts, strict=True):
            if choice["logprobs"] is not None:
                assert _tokens_told(choice["logprobs"]) == count
    assert answers == answers[:1] * len(STEPS)


@pytest.mark.parametrize("steps", STEPS)
async def test_a_character_comes_whole_or_not_at_all(steps: int) -> None:
    async with served(ScriptedEngine([tokens_of(MANY_BYTES)], steps)) as (client, _):
        chunks = events(await client.post(CHAT, json=chat(stream=True)))
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert not any("\ufffd" in delta for delta in deltas)
    # Nothing waits for longer than the step that completes it.
    assert len([delta for delta in deltas if delta]) >= len(tokens_of(MANY_BYTES)) / (steps + 3)


@pytest.mark.parametrize("steps", STEPS)
async def test_usage_so_far_grows_with_what_has_come(steps: int) -> None:
    body = chat(n=2, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    async with served(ScriptedEngine([tokens_of(WORDS), tokens_of(CODE)], steps)) as (client, _):
        chunks = events(await client.post(CHAT, json=body))
    usages = [chunk["usage"] for chunk in chunks]
    told = [usage["completion_tokens"] for usage in usages]
    assert told == sorted(told)
    assert told[-1] == len(tokens_of(WORDS)) + len(tokens_of(CODE)) + 2
    assert len({usage["prompt_tokens"] for usage in usages}) == 1
    assert all(usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] for usage in usages)


def _text(choice: dict[str, Any]) -> str:
    content: str | None = choice["text"] if "text" in choice else choice["message"]["content"]
    return content or ""


def _tokens_told(logprobs: dict[str, Any]) -> int:
    return len(logprobs["content"] if "content" in logprobs else logprobs["tokens"])


RESPONSES = {
    "text": ({}, MANY_BYTES),
    "log-probabilities": ({"include": ["message.output_text.logprobs"], "top_logprobs": 1}, MANY_BYTES),
    "calls": (
        {"tools": [{"type": "function", **FUNCTION, "strict": False}]},
        "One moment.\n" + called('{"city": "San José 🙂"}') + called("{}"),
    ),
}


@pytest.mark.parametrize("name", RESPONSES)
async def test_a_response_adds_up_to_the_whole_one_whatever_its_steps(name: str) -> None:
    extra, written = RESPONSES[name]
    body = {"input": "Hi", "max_output_tokens": 200, **extra}
    answers = []
    for steps in STEPS:
        async with served(ScriptedEngine([tokens_of(written)], steps)) as (client, _):
            whole = (await client.post("/v1/responses", json=body)).json()
        async with served(ScriptedEngine([tokens_of(written)], steps)) as (client, _):
            streamed = (await client.post("/v1/responses", json=body | {"stream": True})).text
        told = [json.loads(event.split("\ndata: ")[1]) for event in streamed.strip().split("\n\n")]
        assert told[-1]["type"] == "response.completed"
        answers += [_output(whole), _output(told[-1]["response"])]
        deltas: dict[int, str] = {}
        for event in told:
            if event["type"] in ("response.output_text.delta", "response.function_call_arguments.delta"):
                deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
        items = whole["output"]
        assert list(deltas.values()) == [item.get("arguments") or item["content"][0]["text"] for item in items]
    assert answers == answers[:1] * len(answers)


def _output(response: dict[str, Any]) -> list[Any]:
    """Items without their ids, and usage."""
    items = [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]]
    return [*items, response["usage"]]
