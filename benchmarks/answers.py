"""`moaserve bench answers`: how often a target is right, on held-out chats whose answers can be checked by a program."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from app.tools.formats import tool_format
from app.tools.grammar import tool_grammar
from app.tools.schemas import Tool, ToolChoice
from benchmarks.prompts import PromptError, read_lines
from speculative.engine import Engine
from speculative.request import Grammar, Request, SamplingParams

TOOL_CALLS, NUMBERS, REPLIES = "first tool calls", "final numbers", "replies"

_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_NUMBER = re.compile(r"The answer is \$?(-?[\d,]*\.?\d+)")


@dataclass(frozen=True, slots=True)
class Question:
    """A chat up to a turn that can be checked, and what is right there: see ``is_right``. Its answer must follow ``grammar``."""

    kind: str
    token_ids: tuple[int, ...]
    expected: Any
    grammar: Grammar | None = None


def read_questions(
    path: Path, tokenizer: PreTrainedTokenizerBase, *, count: int, max_tokens: int, seed: int, strict_tools: bool = False
) -> dict[str, list[Question]]:
    """At most ``count`` questions of each kind, drawn with ``seed``, whose prompts have at most ``max_tokens`` tokens.

    With ``strict_tools`` the arguments of calls must follow their tools' schemas, as the API has it for such tools.
    """
    lines = list(read_lines(path))
    random.Random(seed).shuffle(lines)
    questions: dict[str, list[Question]] = {}
    for number, row in lines:
        try:
            found = _question(row)
            if found is None or len(questions.setdefault(found[0], [])) == count:
                continue
            kind, messages, expected = found
            text = str(tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False, add_generation_prompt=True))
            token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        except Exception as error:  # templates are programs: they raise whatever they like
            raise PromptError(f"{path}, line {number}: not a dialogue ({error!r})") from error
        if len(token_ids) <= max_tokens:
            grammar = _strict_grammar(row["tools"], tokenizer) if strict_tools and row.get("tools") else None
            questions[kind].append(Question(kind, token_ids, expected, grammar))
    if not any(questions.values()):
        raise PromptError(f"{path} holds no tool call, no 'The answer is …' and no small talk to check")
    return questions


def _strict_grammar(tools: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> Grammar | None:
    """What the model may write that chooses for itself among ``tools``, all of them strict."""
    format = tool_format("auto", tokenizer)
    if format is None:
        raise PromptError("the model has no known way of calling tools, so that they cannot be strict")
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
    return tool_grammar([Tool.model_validate(tool) for tool in strict], ToolChoice(type="auto"), True, format)


def _question(row: dict[str, Any]) -> tuple[str, list[dict[str, Any]], Any] | None:
    """Kind, messages before the turn, and the right answer."""
    messages = row["messages"]
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("tool_calls"):
            calls = [call["function"] for call in message["tool_calls"]]
            return TOOL_CALLS, messages[:index], [(call["name"], json.loads(call["arguments"])) for call in calls]
    last = messages[-1]
    if last["role"] != "assistant" or not last["content"]:
        return None
    if (number := said_number(last["content"])) is not None:
        return NUMBERS, messages[:-1], number
    return (REPLIES, messages[:-1], last["content"]) if row.get("source") == "small-talk" else None


def said_calls(text: str) -> list[tuple[str, Any]] | None:
    """Names and arguments of the tool calls in a text (Hermes style); None where one is not JSON."""
    try:
        calls = [json.loads(call) for call in _CALL.findall(text)]
        return [(call["name"], call["arguments"]) for call in calls]
    except (ValueError, KeyError, TypeError):
        return None


def said_number(text: str) -> float | None:
    """The number of the last "The answer is …"."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def is_right(question: Question, text: str) -> bool:
    """Tool calls: same names and arguments, in order. Numbers: equal. Replies: the same text."""
    if question.kind == TOOL_CALLS:
        return bool(said_calls(text) == question.expected)
    if question.kind == NUMBERS:
        return bool(said_number(text) == question.expected)
    reply: str = question.expected
    return text.strip() == reply.strip()


def answer(engine: Engine, questions: Sequence[Question], max_tokens: int, progress: Callable[[], None]) -> Iterator[str]:
    """Greedy answers without their end tokens, as many at a time as the engine has slots; in the questions' order.

    That order is kept while they come, too: those that have ended first are the short ones, whatever else they are.
    """
    assert engine.tokenizer is not None
    params = SamplingParams(max_tokens, temperature=0.0)
    for number, question in enumerate(questions):
        engine.add(Request(str(number), question.token_ids, replace(params, grammar=question.grammar)))
    written: list[list[int]] = [[] for _ in questions]
    ended, told = set[int](), 0
    while engine.has_work:
        for output in engine.step():
            answered = [token for token in output.new_token_ids if token not in engine.eos_token_ids]
            written[int(output.request_id)].extend(answered)
            if output.finish_reason is not None:
                ended.add(int(output.request_id))
                progress()
        while told in ended:
            # Tool calls may begin and end with special tokens.
            yield str(engine.tokenizer.decode(written[told], skip_special_tokens=False))
            told += 1
